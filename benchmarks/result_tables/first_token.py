"""Seconds to the first token: against OpenVINO, behind a cached prefix, and of earlier searches."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .table import Results, interval, link, markdown, matching, one, seconds, table, times

QWEN = "Qwen2.5-Coder-0.5B"
QWEN_LARGE = "Qwen2.5-Coder-1.5B"
SMOLLM2 = "SmolLM2-135M"
DENSE = ("dense", "dense_kernel", "openvino")
XATTENTION = "xattention_0.95"
HEADWISE = "headwise"
# Rows of the first table: model, result file of openvino.py.
COMPARED = (
    (SMOLLM2, "smollm2_8192_compared"),
    (QWEN, "qwen_0.5b_4096_compared"),
    (QWEN, "qwen_0.5b_8192_compared"),
    (QWEN, "qwen_0.5b_16384_compared"),
    (QWEN_LARGE, "qwen_1.5b_4096_compared"),
    (QWEN_LARGE, "qwen_1.5b_8192_compared"),
)
# Columns of the table of earlier searches, by a method's name in the files.
METHODS = {
    "dense": "sdpa",
    "dense_kernel": "Headwise's dense kernel",
    "openvino": "OpenVINO dense",
    "xattention": "OpenVINO XAttention",
    HEADWISE: "Headwise",
}
# Its rows: model, processor, result file, and the record of a file that has several.
EARLIER = (
    (QWEN, "EPYC Zen 4", "qwen_0.5b_first_token", "8192"),
    (QWEN, "EPYC Zen 4", "qwen_0.5b_first_token", "16384"),
    (QWEN, "EPYC Zen 4", "qwen_0.5b_first_token", "32768"),
    (SMOLLM2, "Granite Rapids (AMX)", "smollm2_first_token_printed", "granite_rapids_8192"),
    (SMOLLM2, "EPYC Zen 5", "smollm2_8192_rivals", None),
    (SMOLLM2, "EPYC Zen 4", "smollm2_8192_rivals_zen4", None),
    (SMOLLM2, "EPYC Zen 3 (float32)", "smollm2_first_token_printed", "zen3_8192"),
    (SMOLLM2, "Granite Rapids (AMX)", "smollm2_first_token_printed", "granite_rapids_32768"),
    (SMOLLM2, "EPYC Zen 5", "smollm2_32768_rivals", None),
    (SMOLLM2, "EPYC Zen 4", "smollm2_32768_rivals_zen4", None),
)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Rows of one result file of openvino.py.

    Attributes:
        model: name in the table.
        file: name of the result file.
        tokens: length of the prompts.
        methods: the row of all tasks of each method.
        losses: rows of all tasks.
        proven: the bound that the artifact's search has proven; None without one.
    """

    model: str
    file: str
    tokens: int
    methods: dict[str, dict[str, Any]]
    losses: list[dict[str, Any]]
    proven: float | None

    @property
    def fastest(self) -> str:
        """Name of the fastest dense attention."""
        over = self.methods[HEADWISE]["over"]
        return min(over, key=lambda name: over[name])

    @property
    def dense(self) -> str:
        """Name of the dense attention of torch that Headwise's losses are against."""
        return next(name for name in ("dense", "dense_kernel") if name in self.methods)

    def loss(self, method: str, baseline: str | None = None) -> dict[str, Any]:
        """The loss of a method against a baseline, or dense attention of the same engine."""
        if baseline is None:
            openvino = method == "openvino" or method.startswith("xattention")
            baseline = "openvino" if openvino else self.dense
        return one(self.losses, method=method, baseline=baseline)


def compared(results: Results, name: str, model: str = "") -> Compared:
    """Read a result file of openvino.py."""
    file = results[name]
    return Compared(
        model=model,
        file=name,
        tokens=results.settings(name)["tokens"],
        methods={row["method"]: row for row in matching(file.part("method"), task="all")},
        losses=matching(file.part("loss"), task="all"),
        proven=one(file.part("artifact"), method=HEADWISE)["lost_high"],
    )


@table("compared")
def compared_table(results: Results) -> str:
    """Speed and accuracy of each artifact, on the same prompts."""
    header = ["model", "tokens", "first token, s: dense", "XAttention", "Headwise", "speedup"]
    header += ["correct, dense", "lost by XAttention", "lost by Headwise", "proven"]
    rows = []
    for model, name in COMPARED:
        row = compared(results, name, model)
        dense = row.methods[row.dense]
        cells = [model, link(f"{row.tokens:,}", name)]
        for method in (row.fastest, XATTENTION, HEADWISE):
            cells.append(seconds(row.methods[method]["seconds"]["median"]))
        cells.append(times(row.methods[HEADWISE]["over"][row.fastest]))
        cells.append(f"{dense['correct']:,} of {dense['answers']:,}")
        cells += [interval(row.loss(method), ".1%") for method in (XATTENTION, HEADWISE)]
        cells.append("" if row.proven is None else f"at most {row.proven:.1%}")
        rows.append(cells)
    return markdown(header, rows)


@table("points")
def points_table(results: Results) -> str:
    """Other thresholds of XAttention and the more exact point of the artifact."""
    rows = []
    for model, name in COMPARED:
        row = compared(results, name, model)
        for method, figures in row.methods.items():
            if method in DENSE:
                continue
            of_headwise = "" if method == HEADWISE else interval(row.loss(method, HEADWISE), ".1%")
            cells = [model, f"{row.tokens:,}", label(method)]
            cells.append(seconds(figures["seconds"]["median"]))
            cells.append(times(figures["over"][row.fastest]))
            cells += [interval(row.loss(method), ".1%"), of_headwise]
            cells.append(_spread(figures["seconds"], ".1f"))
            cells.append(_spread(figures["lost_by_prompt"], ".1%"))
            rows.append(cells)
    header = ["model", "tokens", "method", "first token, s", "speedup", "lost, of own dense"]
    header += ["lost, of Headwise's answers", "first token by prompt, s", "lost by prompt"]
    return markdown(header, rows)


def _spread(figures: dict[str, float], spec: str) -> str:
    return f"{figures['min']:{spec}} to {figures['max']:{spec}}"


def label(method: str) -> str:
    """Return a method's name on the page."""
    if method in DENSE:
        return "dense"
    if method.startswith(HEADWISE):
        return method.replace("headwise@", "Headwise, ").replace("headwise", "Headwise")
    names = {"vertical_slash": "vertical-slash, all heads", "minference": "MInference's search"}
    return names.get(method, method.replace("xattention_", "XAttention "))


@table("first token")
def earlier_table(results: Results) -> str:
    """Seconds to the first token with artifacts of earlier searches."""
    header = ["tokens", "model", "processor", *METHODS.values(), "speedup vs. fastest dense"]
    rows = []
    for model, processor, name, record in EARLIER:
        tokens, by_method = _earlier(results, name, record)
        took = {method: row["seconds"] for method, row in by_method.items()}
        fastest = min((method for method in DENSE if method in took), key=lambda m: took[m])
        # The median over the rounds, where the file has it.
        speedups = by_method[HEADWISE].get("speedups", {})
        speedup = speedups.get(fastest, took[fastest] / took[HEADWISE])
        cells = [f"{tokens:,}", model, link(processor, name)]
        cells += [seconds(took[method]) if method in took else "" for method in METHODS]
        rows.append([*cells, times(speedup)])
    return markdown(header, rows)


def _earlier(
    results: Results, name: str, record: str | None
) -> tuple[int, dict[str, dict[str, Any]]]:
    """The length of the prompt, and the rows by method."""
    file = results[name]
    if record is None:
        tokens = results.settings(name)["length"]
        rows: Iterable[dict[str, Any]] = file.part("row")
    else:
        tokens = one(file.part("records"), name=record)["settings"]["length"]
        rows = matching(file.part("records: rows"), records=record)
    return tokens, {row["method"]: row for row in rows}


@table("1B shape")
def shape_table(results: Results) -> str:
    """Seconds to the first token of the shape of Llama 3.2 1B."""
    file = results["llama_1b_shape_prefill"]
    rows = []
    for record in file.part("records"):
        of_record = matching(file.part("records: rows"), records=record["name"])
        took = {row["method"]: row["seconds"] for row in of_record}
        fastest = min(took[method] for method in DENSE if method in took)
        cells = [record["name"].partition("_")[0], f"{record['settings']['length']:,}"]
        cells += [
            seconds(took[m]) if m in took else "" for m in ("dense", "dense_kernel", HEADWISE)
        ]
        rows.append([*cells, times(fastest / took[HEADWISE])])
    header = ["layers", "tokens", "sdpa, s", "Headwise's dense kernel, s", "Headwise, s"]
    return markdown([*header, "speedup vs. fastest dense"], rows)


@table("prefix")
def prefix_table(results: Results) -> str:
    """Seconds to the first of new tokens behind cached ones."""
    rows = []
    for row in results["qwen_0.5b_prefix_reuse"].part("row"):
        took = row["seconds"]
        rows.append(_prefix("transformers", row["cached"], row["new"], took, HEADWISE))
    for row in results["qwen_0.5b_prefix_reuse_vllm"].part("row"):
        took = row["first_seconds"]
        rows.append(_prefix("vLLM", row["cached"], row["length"], took, "artifact"))
    header = ["engine", "cached tokens", "new tokens", "the engine's own attention, s"]
    header += ["Headwise's dense kernel, s", "artifact, s", "speedup vs. the dense kernel"]
    return markdown(header, rows)


def _prefix(
    engine: str, cached: int, new: int, took: dict[str, list[float]], own: str
) -> list[str]:
    medians = [
        seconds(statistics.median(took[method])) if method in took else ""
        for method in ("dense", "dense_kernel", own)
    ]
    ratio = statistics.median(
        dense / fast for dense, fast in zip(took["dense_kernel"], took[own], strict=True)
    )
    return [engine, f"{cached:,}", f"{new:,}", *medians, times(ratio)]
