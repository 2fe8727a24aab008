"""What every field of an artifact means, in which unit and since which schema version.

The JSON Schema and docs/artifact.md are made of this; a test compares it with the models.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FieldDoc:
    """A field: its type with the unit, its meaning, and the schema version that brought it."""

    type: str
    meaning: str
    since: int = 1


def _f(type: str, meaning: str, since: int = 1) -> FieldDoc:
    return FieldDoc(type=type, meaning=meaning, since=since)


_COVERAGE = _f("share above 0, or null", "take only as much as holds this share, at most the sizes; null: the sizes", 2)
_IMPORTED = _f("mapping or null", "where the section comes from, if it was taken over from another tool's file", 3)

# Of each model: where its fields lie in the file, and the fields.
DOCS: dict[str, tuple[str, dict[str, FieldDoc]]] = {
    "Artifact": (
        "the file",
        {
            "schema_version": _f("4", "the layout of this file"),
            "created_at": _f("text", "when it was written, UTC, `2025-01-31T12:00:00Z`"),
            "model": _f("mapping", "which model it is for"),
            "search": _f("mapping or null", "how the patterns were found; null: none was searched here"),
            "patterns": _f("name: pattern", "the patterns in use; an unused one is an error"),
            "prefill": _f("mapping", "which query head gets which pattern"),
            "decode": _f("mapping or null", "which layers choose the tokens that others attend to in decode", 2),
            "kv_cache": _f("mapping or null", "what each layer and KV head keeps of its keys and values", 3),
            "evidence": _f("list", "measurements against a baseline"),
            "costs": _f("list", "devices whose measured cost tables lie in the sidecar", 4),
            "sidecar": _f("mapping or null", "the file with the arrays"),
            "content_sha256": _f("64 hex digits", "hash of the content, see [Hashes](#hashes)"),
        },
    ),
    "ModelInfo": (
        "model",
        {
            "name": _f("text", "as it was given: a hub id, a folder, a file"),
            "revision": _f("text or null", "the hub revision, where one was asked for"),
            "architecture": _f("text or null", "the transformers class"),
            "config_sha256": _f(
                "64 hex digits or null", "over the configuration that determines attention (`runtime.fingerprint`)"
            ),
            "weights_sha256": _f("64 hex digits or null", "over a sample of every weight"),
            "num_layers": _f("int", "layers"),
            "num_heads": _f("int", "query heads a layer"),
            "num_kv_heads": _f("int", "KV heads a layer; divides `num_heads`"),
            "head_dim": _f("int", "channels a head"),
            "rope": _f("mapping or null", "the rotary embedding's parameters, as the configuration has them"),
            "max_positions": _f("int, tokens", "the longest prompt that the configuration allows"),
        },
    ),
    "SearchInfo": (
        "search",
        {
            "tool_version": _f("text", "of headwise"),
            "command": _f("text", "the command line that wrote this file"),
            "preset": _f(
                "`paper` or `scaled`", "MInference's own lengths and sizes, or the same scaled to shorter prompts"
            ),
            "seed": _f("int", "of the calibration prompts"),
            "calibration": _f("mapping", "the prompts that the search looked at"),
            "allocation": _f(
                "`heads` or `model`",
                "whether the budget is one for each head (MInference 1.0, Algorithm 1) or one for all heads together",
                4,
            ),
            "budget": _f("text", "as it was given: `a_shape:SINK,WINDOW` or a share of the dense causal FLOPs"),
            "target_density": _f("share", "what the budget comes to, of the causal area"),
            "cost": _f("mapping or null", "what the search counted as cost; null: tiles, alike for all kinds", 4),
            "n_trials": _f("int or null", "Optuna trials behind the result; null: there was no study", 4),
            "device": _f("text", "where the model ran"),
            "dtype": _f("text", "in which precision it ran"),
            "kernel_backend": _f("text", "the attention kernels that scored the candidates"),
            "summary": _f("mapping", "what was found, in means over the searched heads"),
        },
    ),
    "Calibration": (
        "search.calibration",
        {
            "tasks": _f("list of text", "`kv_retrieval`, `passkey`, `text`, `jsonl` and so on; one until version 3", 4),
            "lengths": _f("list of int, tokens", "the prompts' lengths"),
            "samples": _f("int", "prompts of each task and length"),
            "sha256": _f("64 hex digits", "over the prompts' token ids"),
        },
    ),
    "Summary": (
        "search.summary",
        {
            "recall": _f("share", "attention mass kept"),
            "error": _f("number", "relative L2 distance of the head's output from dense"),
            "density": _f("share", "of the causal area computed, in whole tiles"),
            "winners": _f("kind: int", "heads that each kind won"),
            "best_single_kind": _f(
                "kind or null",
                "the kind with the highest mean recall, if all heads had to share one; null can be where `allocation` "
                "is `model`",
            ),
            "best_single_kind_recall": _f("share or null", "that recall"),
        },
    ),
    "SearchCost": (
        "search.cost",
        {
            "unit": _f("`seconds` or `flops`", "measured seconds of a device, or floating-point operations", 4),
            "device": _f("text", "whose seconds; `costs` has its table. With `flops` where the search ran", 4),
        },
    ),
    "Dense": ("patterns, kind dense", {"kind": _f("`dense`", "the whole causal area; named `dense`")}),
    "AShape": (
        "patterns, kind a_shape",
        {
            "kind": _f("`a_shape`", "the first keys and a window before each query; named `a_1024_4096`"),
            "sink": _f("int, tokens", "the first keys"),
            "window": _f("int, tokens", "the last keys before each query, itself included"),
        },
    ),
    "TriShape": (
        "patterns, kind tri_shape",
        {
            "kind": _f("`tri_shape`", "an A-shape whose last queries see every key; named `tri_1024_4096_128`", 2),
            "sink": _f("int, tokens", "the first keys", 2),
            "window": _f("int, tokens", "the last keys before each query, itself included", 2),
            "last": _f("int, tokens", "the last queries, which see every key", 2),
        },
    ),
    "Dilated": (
        "patterns, kind dilated",
        {
            "kind": _f("`dilated`", "the first keys, and every n-th tile of a window; named `dil_1024_4096_2`", 2),
            "sink": _f("int, tokens", "the first keys", 2),
            "window": _f("int, tokens", "the last keys before each query, of which every n-th tile is computed", 2),
            "dilation": _f(
                "int, tiles", "n: of the window's tiles of 64 keys every n-th, the query's own among them", 2
            ),
        },
    ),
    "Strided": (
        "patterns, kind strided",
        {
            "kind": _f("`strided`", "an A-shape, and diagonals of tiles beyond it; named `str_1024_4096_8`", 2),
            "sink": _f("int, tokens", "the first keys", 2),
            "window": _f("int, tokens", "the last keys before each query, itself included", 2),
            "stride": _f("int, tiles", "beyond the window every `stride`-th diagonal of tiles of 64 keys", 2),
        },
    ),
    "Static": (
        "patterns, kind static",
        {
            "kind": _f("`static`", "columns and diagonals that are the same on every prompt; named `static_NAME`", 2),
            "indices": _f("text", "the name of the sidecar's arrays that list them, see [Arrays](#arrays)", 2),
        },
    ),
    "VerticalSlash": (
        "patterns, kind vertical_slash",
        {
            "kind": _f(
                "`vertical_slash`",
                "the columns and diagonals that a prompt's last queries attend to most; named `vs_1000_6096`, "
                "`vs_1000_6096_q32`, `vs_1000_6096_c95`",
            ),
            "vertical": _f("int, columns", "key columns; the first 64 are always among them"),
            "slash": _f("int, diagonals", "diagonals; the nearest 64 are always among them"),
            "last_q": _f("int from 1 to 1024", "the last queries, by whose attention is chosen"),
            "coverage": _COVERAGE,
        },
    ),
    "BlockSparse": (
        "patterns, kind block_sparse",
        {
            "kind": _f(
                "`block_sparse`",
                "for each 64 queries the blocks whose mean-pooled keys score highest; named `bs_100`, `bs_100_c90`",
            ),
            "blocks": _f("int, blocks of 64 keys", "blocks; a query's own and the first are always among them"),
            "coverage": _COVERAGE,
        },
    ),
    "MemoryUnits": (
        "patterns, kind memory_units",
        {
            "kind": _f("`memory_units`", "sinks, a window, and tiles of the past looked up; named `mu_128_4096_32`", 3),
            "sink": _f("int, tokens", "the first keys, in whole tiles of 64", 3),
            "window": _f("int, tokens", "the last keys before each query, itself included", 3),
            "units": _f("int, tiles of 64 keys", "tiles between sinks and window that 64 queries look up", 3),
            "representatives": _f("int, keys", "keys that stand for a tile: those that the queries after it want", 3),
        },
    ),
    "Prefill": (
        "prefill",
        {
            "dense_below": _f("int, tokens", "prompts with fewer tokens are served densely"),
            "dense_tail": _f(
                "int, tokens",
                "the last so many queries of a prompt (whole tiles of 64 positions) see every key; 0: none",
            ),
            "growth": _f("mapping or null", "how sizes go with the prompt's length; null: they stay as they are", 4),
            "layers": _f(
                "one row a layer",
                "a row has a pattern's name for every query head, in the model's own order; `null` leaves the layer "
                "as it is: it slides, or nothing was said about it",
            ),
            "front": _f(
                "mapping or null", "settings between fast and exact, of which one can be chosen when it is loaded", 4
            ),
            "imported": _IMPORTED,
        },
    ),
    "Growth": (
        "prefill.growth",
        {
            "length": _f("int, tokens", "where the sizes in `patterns` hold", 4),
            "powers": _f(
                "kind: {field: number from 0 to 1}",
                "on K keys a size s becomes max(1, round(s * (K / `length`) ** power)), both lengths in whole tiles of "
                "64; sizes that are not named stay as they are",
                4,
            ),
        },
    ),
    "Front": (
        "prefill.front",
        {
            "length": _f("int, tokens", "of the prompts that the figures are for", 4),
            "unit": _f("`seconds` or `flops`", "of all costs in the front; seconds are of `search.cost.device`", 4),
            "dense_cost": _f("number above 0", "of dense attention: all layers, one prompt", 4),
            "measured_on": _f("`calibration` or `held_out`", "the prompts of `kl` and `recall`", 4),
            "points": _f("list of 1 to 32 points", "ascending in cost and descending in kl: none is beaten in both", 4),
        },
    ),
    "Point": (
        "prefill.front.points, each entry",
        {
            "cost": _f("number above 0", "predicted, of all layers' attention and index builds on one prompt", 4),
            "speedup": _f("number above 0", "`dense_cost` over `cost`: predicted, and of attention alone", 4),
            "kl": _f("number, nats a token", "mean divergence of the next token's distribution from dense", 4),
            "recall": _f("share", "attention mass kept, mean over the searched heads", 4),
            "density": _f("share", "of the causal area computed, mean over the searched heads", 4),
            "layers": _f("one row a layer", "as `prefill.layers`; `null` for the same layers", 4),
        },
    ),
    "Imported": (
        "prefill.imported, kv_cache.imported",
        {
            "format": _f("`minference`, `sparse_attention_config` or `duo_attention`", "the file's format", 3),
            "file": _f("text", "the file's bare name", 3),
            "sha256": _f("64 hex digits", "of the file's bytes", 3),
            "scores": _f(
                "`recall`, `other` or null", "what the file's scores are: shares of attention kept, others, none", 3
            ),
        },
    ),
    "Decode": ("decode", {"omnikv": _f("mapping", "OmniKV's filter layers; `python -m search.filters` writes it", 2)}),
    "OmniKV": (
        "decode.omnikv",
        {
            "filter_layers": _f(
                "list of layers, ascending",
                "attend to everything and choose the tokens for the layers after them, each up to the next filter "
                "layer",
                2,
            ),
            "dense_layers": _f(
                "list of layers, ascending",
                "attend to everything and choose nothing; so do all layers before the first filter layer. Layers that "
                "slide are named nowhere",
                2,
            ),
            "selector": _f(
                "`last`, `uniform`, `exponential`",
                "by whose scores is chosen: the last query's, or the mean of the last `window` queries', all alike or "
                "halved from each to the one before",
                2,
            ),
            "window": _f("int, queries", "queries of the selector", 2),
            "budget": _f(
                "int, tokens, or number in (0, 1)",
                "how many tokens a sparse layer attends to, or which share of the context",
                2,
            ),
            "prefill_ratio": _f(
                "number above 0, or null",
                "in chunked prefill, how many tokens of the past a sparse layer sees for each token of the chunk; "
                "null: all. A chunk's own tokens are always seen",
                2,
            ),
            "similarity": _f("mapping or null", "what the filter layers keep on held-out prompts", 2),
        },
    ),
    "Similarity": (
        "decode.omnikv.similarity",
        {
            "kept": _f("share", "attention mass kept by the chosen layers, mean over full-attention layers", 2),
            "evenly_spaced": _f("share", "the same by as many evenly spaced layers", 2),
            "random": _f("share", "the same by randomly chosen layers, mean of `random_samples` choices", 2),
            "random_samples": _f("int", "random choices", 2),
            "top_k": _f("int, tokens", "tokens of each filter that count as kept", 2),
            "tasks": _f("list of text", "the held-out prompts' tasks", 2),
        },
    ),
    "KVCache": (
        "kv_cache",
        {
            "policies": _f("name: policy", "the policies in use; an unused one is an error", 3),
            "layers": _f(
                "one row a layer",
                "a policy's name for all KV heads of the layer, or a list with one for each; `null`: the layer slides "
                "over a window of the model's own",
                3,
            ),
            "imported": _IMPORTED,
        },
    ),
    "Full": ("kv_cache.policies, kind full", {"kind": _f("`full`", "everything is kept", 3)}),
    "Streaming": (
        "kv_cache.policies, kind streaming",
        {
            "kind": _f("`streaming`", "the first tokens and the last (StreamingLLM)", 3),
            "sinks": _f("int, tokens", "first tokens that are kept", 3),
            "window": _f("int, tokens", "last tokens that are kept, the newest included", 3),
            "positions": _f(
                "`cache` or `original`",
                "a token's position is counted in the cache, so that a stream never ends, or is that in the text",
                3,
            ),
        },
    ),
    "H2O": (
        "kv_cache.policies, kind h2o",
        {
            "kind": _f("`h2o`", "the tokens that were attended to most, and the latest (H2O)", 3),
            "heavy": _f(
                "int, tokens, or share", "how many of the most attended tokens are kept, of those seen so far", 3
            ),
            "recent": _f("int, tokens, or share", "how many of the latest tokens are kept", 3),
            "normalised": _f("true or false", "scores are divided by how many queries could see a token", 3),
            "eviction": _f(
                "`top_k` or `greedy`",
                "keep the best of each call's whole cache, or evict one token after each query",
                3,
            ),
        },
    ),
    "SnapKV": (
        "kv_cache.policies, kind snapkv",
        {
            "kind": _f("`snapkv`", "of each prompt what its last queries attend to; all that is generated (SnapKV)", 3),
            "budget": _f("int, tokens, or share", "tokens kept of a prompt, the window included", 3),
            "window": _f("int, tokens", "the prompt's last queries, which vote and are kept", 3),
            "pool": _f("odd int, tokens", "votes are averaged over so many neighbours", 3),
        },
    ),
    "Measurement": (
        "evidence, each entry",
        {
            "name": _f("text", "what was measured"),
            "value": _f("number", "with the artifact applied"),
            "unit": _f("text", "of `value` and `baseline`"),
            "baseline": _f("number or null", "without the artifact, in the same unit"),
            "baseline_name": _f("text or null", "what the baseline was; null where there is none"),
            "length": _f("int or null, tokens", "of the prompts"),
            "samples": _f("int or null", "measurements behind the value"),
            "command": _f("text", "measures it again"),
            "device": _f("text", "on which machine"),
            "versions": _f("name: version", "of what the number depends on"),
        },
    ),
    "DeviceCosts": (
        "costs, each entry",
        {
            "device": _f("text", "the machine whose seconds they are", 4),
            "backend": _f("text", "the attention kernels that were timed", 4),
            "versions": _f("name: version", "of what the seconds depend on", 4),
            "command": _f("text", "measures them again", 4),
            "optimised": _f("true or false", "the search's objective was made of this table; of at most one", 4),
            "patterns": _f("list of text", "what the numbers in the column `pattern` stand for", 4),
            "dtypes": _f("list of text", "what the numbers in the column `dtype` stand for", 4),
        },
    ),
    "Sidecar": (
        "sidecar",
        {
            "file": _f("text", "the bare name of a .safetensors file beside this one"),
            "sha256": _f("64 hex digits", "of its bytes"),
        },
    ),
}


def tables() -> str:
    """The fields as Markdown: a heading and a table for each part of the file."""
    parts = []
    for place, fields in DOCS.values():
        lines = [f"### {place}", "", "| field | type | since | meaning |", "|---|---|---|---|"]
        lines += [f"| `{name}` | {doc.type} | {doc.since} | {doc.meaning} |" for name, doc in fields.items()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"
