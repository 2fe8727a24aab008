"""Decode: filter layers, caches that drop tokens, and streams."""

from __future__ import annotations

import math
from typing import Any

from .table import Results, interval, link, markdown, matching, one, seconds, table, times

_MIB = 2**20
# Runs of the filter layers: budget, part of the file, method, name of the filters.
_BUDGETS = (
    ("1/4", "decode, more rows: rows", "headwise", "pooled1024"),
    ("1/8", "decode: rows", "headwise", "pooled512"),
    ("1/16", "decode: rows", "pooled256", "pooled256"),
)
_POLICIES = {
    "full": "full",
    "h2o:heavy=0.1,recent=0.1": "H2O 0.1 + 0.1",
    "streaming:sinks=4,window=1020": "streaming 4 + 1,020",
    "snapkv:budget=0.2": "SnapKV 0.2",
}
_LONG = (
    ("filter layers, 1/8 of the tokens", "decode: rows", "headwise"),
    ("SnapKV, a quarter of the prompt", "decode: rows", "snapkv:budget=0.25"),
    ("random eviction, a quarter", "decode: rows", "random:budget=0.25"),
    ("H2O, an eighth heavy, an eighth recent", "h2o: rows", "h2o:heavy=0.125,recent=0.125"),
    ("streaming, 4 sinks and 1,020 tokens", "streaming: rows", "streaming:sinks=4,window=1020"),
)
_STREAMS = {
    "streaming": "streaming",
    "window-only": "window only, `--policy streaming:sinks=0,window=1024`",
    "original": "streaming with `positions: original`",
    "dense": "dense",
}


def _change(row: dict[str, Any], spec: str) -> str:
    """Return the change of the perplexity of a row, whose file has that of its logarithm."""
    change = {name: math.expm1(row["change"][name]) for name in ("value", "low", "high")}
    return interval(change, spec)


@table("filter layers")
def filters_table(results: Results) -> str:
    """Perplexity by budget of the filter layers."""
    name = "smollm2_4096_decode_rules"
    rows = []
    for budget, part, method, filters in _BUDGETS:
        row = one(results[name].part(part), method=method)
        scores = matching(results[name].part("filters: scores"), filters=filters)
        own, even = (one(scores, name=each) for each in ("held_out", "evenly_spaced"))
        layers = ", ".join(map(str, own["filter_layers"]))
        cells = [budget, layers, f"{row['tokens']:,.0f}", _change(row, "+.2%")]
        rows.append([*cells, f"{own['error']:.4f}, {even['error']:.4f}"])
    header = ["budget", "filter layers", "tokens read", "perplexity vs. dense"]
    return markdown([*header, "error: these layers, evenly spaced"], rows)


@table("filter layers 0.5B")
def qwen_table(results: Results) -> str:
    """Filter layers of Qwen2.5-Coder-0.5B."""
    rows = []
    for row in results["qwen_0.5b_4096_omnikv"].part("row"):
        cells = ["dense", "", "", ""]
        if row["budget"] is not None:
            cells = ["filter layers", f"1/{1 / row['budget']:.0f}", f"{row['tokens_read']:.0f}"]
            cells.append(_change(row, "+.1%"))
        rows.append([*cells, f"{row['correct']} of {row['of']}"])
    header = ["method", "budget", "tokens read", "perplexity vs. dense"]
    return markdown([*header, "`niah_multivalue`"], rows)


@table("filter layer errors")
def errors_table(results: Results) -> str:
    """Errors of filter layers of Qwen2.5-Coder-0.5B on two sets of prompts."""
    rows = []
    for prompts, name, part, field in (
        ("two-stage and key-value retrieval, code", "qwen_0.5b_4096_omnikv", "filters", "name"),
        ("other prompts", "qwen_0.5b_4096_filters", None, "choice"),
    ):
        of_file = results[name].rows if part is None else results[name].part(part)
        errors = {row[field]: row["error"] for row in of_file}
        cells = [link(prompts, name), f"{errors['held_out']:.4f}"]
        rows.append([*cells, f"{errors['evenly_spaced']:.4f}"])
    return markdown(["prompts", "error of the selected layers", "evenly spaced"], rows)


@table("selected tokens")
def selected_table(results: Results) -> str:
    """Time of a decoded token with filter layers."""
    rows = []
    for name in ("smollm2_8192_omnikv_speed", "smollm2_32768_omnikv_speed"):
        context = results.settings(name)["context"]
        dense, own = (
            one(results[name].part("row"), method=method)["token_seconds"]
            for method in ("dense", "headwise")
        )
        cells = [link(f"{context:,}", name), f"{1000 * dense:.0f}", f"{1000 * own:.0f}"]
        rows.append([*cells, times(dense / own)])
    return markdown(["after tokens", "sdpa, ms/token", "filter layers, ms/token", "speedup"], rows)


@table("retrieval")
def retrieval_table(results: Results) -> str:
    """Answers of retrieval tasks with selected tokens at decode."""
    rows = []
    for task, name in (
        ("pass keys, SmolLM2, sparse prefill", "smollm2_4096_omnikv_passkeys"),
        ("lines, Gemma-3", "gemma3_6700_omnikv_lines"),
    ):
        about = results.settings(name)
        right = [
            f"{one(results[name].part('row'), method=method)['right']} of {about['trials']}"
            for method in ("dense", "headwise")
        ]
        rows.append([task, link(f"{about['task_length']:,}", name), *right])
    return markdown(["task", "tokens", "dense", "selected tokens"], rows)


@table("cache speed")
def caches_table(results: Results) -> str:
    """Time, memory and throughput of caches that drop tokens."""
    file = results["smollm2_cache_speed"].part("row")
    rows = []
    for context in (4096, 16384):
        full = one(file, policy="full", context=context)
        for policy, name in _POLICIES.items():
            row = one(file, policy=policy, context=context)
            rates = [each["batch_tokens_a_second"] for each in (row, full)]
            rows.append(
                [
                    name,
                    f"{context:,}",
                    f"{1000 * row['token_seconds']:.1f}",
                    times(full["token_seconds"] / row["token_seconds"]),
                    f"{row['bytes'] / _MIB:.1f}",
                    f"{row['batch']}",
                    f"{rates[0]:.1f}",
                    times(rates[0] / rates[1]),
                ]
            )
    header = ["policy", "context", "ms/token", "speedup", "MiB", "batch in 1 GiB"]
    return markdown([*header, "tokens/s of the batch", "throughput vs. full"], rows)


@table("cache perplexity")
def long_table(results: Results) -> str:
    """Perplexity of 2,048 decoded tokens."""
    file = results["smollm2_4096_decode_long"]
    rows = []
    for name, part, method in _LONG:
        row = one(file.part(part), method=method)
        rows.append([name, _change(row, "+.1%")])
    return markdown(["method", "perplexity vs. dense"], rows)


@table("caches 0.5B")
def qwen_caches_table(results: Results) -> str:
    """Caches of a fifth of a text of code."""
    file = results["qwen_0.5b_8192_caches"].part("row")
    dense = one(file, method="dense")["perplexity"]
    names = {"full": "full"} | dict(list(_POLICIES.items())[1:])
    rows = []
    for row in file:
        if row["method"] == "dense":
            continue
        name = names.get(row["method"], "streaming 4 + 1,634")
        rows.append(
            [
                name,
                f"{row['perplexity'] / dense - 1:+.0%}",
                f"{row['right']} of {len(row['answers'])}",
            ]
        )
    return markdown(["cache", "perplexity vs. dense", "later questions"], rows)


@table("kvpress")
def kvpress_table(results: Results) -> str:
    """Correct answers with a quarter of the tokens, by Headwise and by kvpress."""
    rows = []
    for row in results["smollm2_1024_peers"].part("row"):
        library, _, name = str(row["method"]).rpartition(": ")
        name = {"dense_kernel": "dense", "none": "dense"}.get(name, name)
        cells = [library or "Headwise", name, f"{row['of_full']:.2f}"]
        rows.append([*cells, interval({**row, "value": row["score"]}, ".3f")])
    return markdown(["library", "method", "cache, of full", "correct answers"], rows)


@table("streams")
def streams_table(results: Results) -> str:
    """Perplexity and memory of streams."""
    file = results["smollm2_stream_essays"].part("row")
    rows = []
    for method, name in _STREAMS.items():
        row = one(file, method=method)
        cells = [name, f"{row['perplexity']:.2f}", f"{row['last_quarter']:.2f}"]
        ratio = f"{row['ratio']:.3f} ± {row['error']:.3f}"
        rows.append([*cells, ratio, f"{row['cache_bytes'] / _MIB:.1f}"])
    header = ["method", "perplexity", "last quarter", "ratio to a recomputed window"]
    return markdown([*header, "MiB of keys and values"], rows)


@table("stream speed")
def stream_speed_table(results: Results) -> str:
    """Time of a token of a stream, and of a window recomputed for each token."""
    file = results["smollm2_stream_speed"]
    took = results.settings("smollm2_stream_speed")["timed"]
    middle = {method: sorted(each)[len(each) // 2] for method, each in took.items()}
    rows = []
    for row in file.part("row"):
        method = row["method"]
        speedup = middle["recomputed"] / middle[method]
        rows.append([method, seconds(1000 * middle[method]), f"{speedup:.0f}x"])
    return markdown(["method", "ms/token", "speedup vs. recomputed"], rows)
