"""The tables of the page about GPUs."""

from __future__ import annotations

import statistics

from .table import Results, markdown, one, seconds, table, times

_FILE = "h100_first_run"
_KINDS = {"a_shape": "A-shape", "vertical_slash": "vertical-slash", "block_sparse": "block-sparse"}
_SINGLE = tuple(_KINDS)


def _three(value: float) -> str:
    """Return a time at three or four significant digits."""
    return f"{value:.3f}" if value < 10 else f"{value:.2f}"


@table("gpu first token")
def first_token_table(results: Results) -> str:
    """Prefills of an 8B shape."""
    rows = []
    for row in results[_FILE].part("prefill"):
        took = [statistics.median(row["seconds"][m]) for m in ("dense", "dense_kernel", "headwise")]
        cells = [f"{row['length']:,}", f"{row['density']:.2f}", *map(_three, took)]
        rows.append([*cells, times(row["times the fastest dense"])])
    header = ["tokens", "density", "sdpa (cuDNN), s", "Headwise's dense kernel, s", "Headwise, s"]
    return markdown([*header, "speedup vs. fastest dense"], rows)


@table("gpu attention")
def attention_table(results: Results) -> str:
    """Attention of one layer by the sizes of MInference 1.0."""
    rows = []
    for row in results[_FILE].part("attention"):
        took = [1000 * row[f"{name}_seconds"] for name in ("sdpa", "build", "sparse")]
        cells = [f"{row['length']:,}", _KINDS[row["pattern"]], f"{row['density']:.2f}"]
        cells += [f"{each:.0f}" if each >= 100 else f"{each:.1f}" for each in took]
        rows.append([*cells, times(row["times the fastest of torch"])])
    header = ["tokens", "pattern", "density", "sdpa (cuDNN), ms", "selection, ms"]
    return markdown([*header, "attention, ms", "speedup vs. sdpa"], rows)


@table("gpu throughput")
def throughput_table(results: Results) -> str:
    """Throughput of each kernel at 32,768 tokens."""
    file = results[_FILE].part("builds")
    dense = one(file, pattern="dense")
    rates = {
        "cuDNN, dense": dense["flops"] / dense["ms"]["CUDNN_ATTENTION"],
        "torch's FlashAttention-2, dense": dense["flops"] / dense["ms"]["FLASH_ATTENTION"],
        "Headwise, every key": dense["flops"] / dense["ms"]["auto"],
    }
    for pattern, name in _KINDS.items():
        row = one(file, pattern=pattern)
        rates[f"Headwise, {name}"] = row["flops"] / row["ms"]["auto"]
    return markdown(["kernel", "TFLOP/s"], [[n, f"{rate / 1e9:.0f}"] for n, rate in rates.items()])


@table("gpu host time")
def host_table(results: Results) -> str:
    """Time of the host for each call."""
    calls = results[_FILE].part("calls")
    groups = {
        "attention of a layer": lambda call: call.startswith("attention"),
        "selection, layer of vertical-slash or block-sparse heads": lambda call: (
            call in ("build vertical_slash", "build block_sparse")
        ),
        "selection, layer with heads of several kinds": lambda call: call == "build mixed",
        "decode attention of one token": lambda call: (
            call.startswith("decode") and call != "decode sdpa"
        ),
    }
    rows = []
    for name, belongs in groups.items():
        took = [row["host_ms"] for row in calls if belongs(row["call"])]
        rows.append([name, f"{min(took):.1f} to {max(took):.1f}"])
    return markdown(["call", "ms"], rows)


@table("gpu launches")
def launches_table(results: Results) -> str:
    """Launches of the selection, and its Python time."""
    rows = [
        [
            str(row["layer"]),
            f"{row['launches']}, before {row['launches_before']}",
            f"{row['python_ms']:.2f}, before {row['python_ms_before']:.2f}",
        ]
        for row in results["selection_launches"].rows
    ]
    header = ["layer", "launches from queries, keys and values to the output"]
    return markdown([*header, "Python of the selection, ms"], rows)


@table("gpu decode")
def decode_table(results: Results) -> str:
    """Decode attention of one token after 8,192 tokens."""
    calls = results[_FILE].part("calls")
    took = one(results[_FILE].part("decode"), length=8192)
    rows = []
    for name, call, field in (
        ("sdpa, all keys", "decode sdpa", "sdpa_seconds"),
        ("Headwise, all keys", "decode all", "all_seconds"),
        ("Headwise, 2,048 selected keys", "decode a quarter", "chosen_seconds"),
    ):
        replay = one(calls, length=8192, call=call)["replay_ms"]
        rows.append([name, f"{replay:.3f}", seconds(1000 * took[field])])
    return markdown(["", "in a CUDA graph, ms", "wall time without a graph, ms"], rows)


@table("gpu tests")
def tests_table(results: Results) -> str:
    """The tests of the first run."""
    rows = [
        [str(row["tests"]), f"{row['passed']}", f"{row['failed']}"]
        for row in results[_FILE].part("tests")
    ]
    return markdown(["tests", "passed", "failed"], rows)
