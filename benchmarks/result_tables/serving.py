"""Attention of one layer, later chunks, memory of a prefill, and vLLM."""

from __future__ import annotations

import statistics
from typing import Any

from .table import Results, interval, link, markdown, matching, one, ratios, seconds, table, times

_KINDS = {
    "a_shape": "A-shape",
    "vertical_slash": "vertical-slash",
    "block_sparse": "block-sparse",
    "dense": "Headwise's dense kernel",
}
_DENSE_RUN = "smollm2_vllm_first_token_dense"
_RUN = "smollm2_vllm_first_token"
_DECODE = "smollm2_vllm_decode"
_SERVER = "smollm2_vllm_server"


@table("one layer")
def layer_table(results: Results) -> str:
    """Attention of one layer at 32,768 tokens."""
    rows = []
    for row in results["attention_cpu_bf16_32768_zen4"].part("lines"):
        own = row["sparse_seconds"] + row["build_seconds"]
        fastest = min(row["sdpa_seconds"], row["kernel_seconds"])
        cells = [_KINDS[row["pattern"]], f"{row['density']:.3f}", f"{own:.3f}"]
        rows.append([*cells, times(fastest / own)])
    header = ["pattern", "density", "seconds, index included", "speedup vs. fastest dense"]
    return markdown(header, rows)


@table("CPU engines")
def engines_table(results: Results) -> str:
    """Dense causal attention at 8,192 tokens with AMX."""
    rows = []
    for row in matching(results["cpu_engines_amx"].part("dense"), length=8192):
        rates = row["gflops"]
        cells = [f"{row['head_dim']}", f"{rates['amx']:,.0f}", f"{rates['sdpa']:,.0f}"]
        rows.append([*cells, times(rates["amx"] / rates["sdpa"])])
    return markdown(["head dim", "Headwise, GFLOP/s", "sdpa, GFLOP/s", "speedup"], rows)


@table("later chunks")
def chunks_table(results: Results) -> str:
    """One layer's attention for new tokens after cached ones."""
    rows = []
    for row in results["attention_turns"].part("turns"):
        took = row["seconds"]
        cells = [f"{row['past']:,}", f"{row['new']:,}", row["served"]]
        cells += [f"{1000 * took[name]:.2f}" for name in ("sdpa", "dense kernel", "headwise")]
        rows.append([*cells, interval(row["against_better"], ".2f")])
    header = ["cached tokens", "new tokens", "served", "sdpa, ms", "Headwise's dense kernel, ms"]
    return markdown([*header, "artifact, ms", "artifact's time / fastest dense"], rows)


@table("prefill memory")
def memory_table(results: Results) -> str:
    """Memory and time of a prefill of 32,768 tokens."""
    rows = [
        [str(row["prefill"]), f"{row['mib']:,}", f"{row['seconds']:.1f}"]
        for row in results["smollm2_32768_prefill_memory"].rows
    ]
    return markdown(["prefill", "cache and activations, MiB", "seconds"], rows)


@table("vLLM")
def vllm_table(results: Results) -> str:
    """Times in vLLM, with an artifact and without."""
    dense = one(results[_DENSE_RUN].part("row"))["first_seconds"]
    own, kernel, artifact = (dense[name] for name in ("dense", "dense_kernel", "artifact"))
    row = [link("8,191 tokens, Zen 4", _DENSE_RUN), *map(_median, (own, kernel, artifact))]
    rows = [["first token", *row, f"{ratios(kernel, artifact)} vs. fastest dense"]]
    for each in results[_RUN].part("row"):
        own, artifact = (each["first_seconds"][name] for name in ("dense", "artifact"))
        where = link(f"{each['length']:,} tokens, Zen 5", _RUN)
        speedup = times(statistics.median(own) / statistics.median(artifact))
        cells = [where, _median(own), "", _median(artifact), f"{speedup} vs. vLLM's own"]
        rows.append(["first token", *cells])
    later = _run(results, "Zen 5, request by request", 32700)
    own, artifact = (later["later_seconds"][name] for name in ("dense", "artifact"))
    speedup = times(statistics.median(own) / statistics.median(artifact))
    cells = [link("after 32,700 tokens, Zen 5", _DECODE), _milli(own), "", _milli(artifact)]
    rows.append(["a later token", *cells, f"{speedup} vs. vLLM's own"])
    rates = [
        one(results[_SERVER].part("rates"), engine=name)["tokens_a_second"]
        for name in ("own", "headwise")
    ]
    middle = statistics.median(results.settings(_SERVER)["times_the_tokens"])
    cells = [link("eight clients, Zen 5", _SERVER), f"{rates[0]}", "", f"{rates[1]}"]
    rows.append(["tokens/s", *cells, f"{times(middle)} vs. vLLM's own"])
    header = ["", "prompt, processor", "vLLM's own", "Headwise's dense kernel", "artifact"]
    return markdown([*header, "speedup"], rows)


def _run(results: Results, run: str, length: int) -> dict[str, Any]:
    return one(results[_DECODE].part("row"), run=run, length=length)


def _median(took: list[float]) -> str:
    return f"{seconds(statistics.median(took))} s"


def _milli(took: list[float]) -> str:
    return f"{statistics.median(took):.3f} s"


@table("vLLM decode")
def vllm_decode_table(results: Results) -> str:
    """Later tokens in vLLM with filter layers."""
    batch = "Zen 4, a batch in one launch"
    rows = []
    for token, run, length, kind in (
        ("first, 8,127 tokens", batch, 8127, "first"),
        ("later, after 8,127", "Zen 5, request by request", 8127, "later"),
        ("later, after 8,127", batch, 8127, "later"),
        ("later, after 32,700", batch, 32700, "later"),
    ):
        row = _run(results, run, length)
        own, artifact = (row[f"{kind}_seconds"][name] for name in ("dense", "artifact"))
        spec = _median if kind == "first" else _milli
        rows.append(
            [token, run.partition(",")[0], spec(own), spec(artifact), ratios(own, artifact)]
        )
    header = ["token", "processor", "vLLM's own attention", "artifact"]
    return markdown([*header, "speedup vs. vLLM's own"], rows)


@table("vLLM server")
def server_table(results: Results) -> str:
    """A server under load."""
    file = results[_SERVER]
    both = [
        {
            **one(file.part("engine"), engine=name),
            **one(file.part("round"), engine=name),
            "other": one(file.part("answers"), engine=name),
        }
        for name in ("own", "headwise")
    ]
    rates = results.settings(_SERVER)["times_the_tokens"]
    alone = [row["alone_seconds"] for row in both]
    middle = f"{times(statistics.median(rates))} ({min(rates):.2f} to {max(rates):.2f})"
    equal, memory = (
        [", ".join(map(str, row[name])) for row in both] for name in ("equal_to_alone", "memory_gb")
    )

    def cells(name: str, unit: str = "", spec: str = "") -> list[str]:
        return [f"{row[name]:{spec}}{unit}" for row in both]

    rows = [
        ["failed requests", *cells("failed"), ""],
        ["all 16 prompts, one by one", *cells("alone_seconds", " s", ".0f")],
        ["a round of eight clients", *cells("seconds", " s"), middle],
        ["slowest request of a round", *cells("slowest_seconds", " s"), ""],
        ["outputs of 16 that equal those of the prompt alone, by round", *equal, ""],
        ["correct answers of 16, one by one (another run, on a busy machine)"],
        ["correct answers of 16, eight clients (the same run)"],
        ["resident memory before the first round, after the last, GB", *memory, ""],
        ["time from the worker's death to the client's HTTP 500 and the server's end"],
    ]
    rows[1].append(times(alone[0] / alone[1]))
    rows[5] += [*(f"{row['other']['alone_right']}" for row in both), ""]
    rows[6] += [*(f"{row['other']['clients_right']}" for row in both), ""]
    rows[8] += [*(f"{row['killed']['seconds']:.1f} s" for row in both), ""]
    return markdown(["", "vLLM's own attention", "artifact", "speedup"], rows)


@table("vLLM requests")
def requests_table(results: Results) -> str:
    """Requests that fit into vLLM's cache."""
    rows = [
        [str(row["kept"]), f"{row['of one request']}", f"{row['at once']}"]
        for row in results["vllm_snapkv_requests"].part("found")
    ]
    return markdown(["cached tokens", "pages of a request", "requests at once"], rows)
