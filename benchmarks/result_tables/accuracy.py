"""Correct answers, perplexity and KL by method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .table import Results, link, markdown, one, span, table

_NAMES = {
    "dense": "dense",
    "headwise": "searched",
    "s1": "searched, seed 1",
    "s2": "searched, seed 2",
    "vertical_slash": "vertical-slash",
    "paper": "MInference's search",
    "a_shape": "A-shape",
    "a_shape-tail": "A-shape without dense tail",
}
# Of the first table: model, tokens and tasks, result file.
_EVALUATED = (
    ("1.5B, `label_map`, `line_asked`", "qwen_1.5b_4096_evaluation"),
    ("0.5B, `label_map`, `line_asked`", "qwen_0.5b_4096_evaluation"),
    ("0.5B, the same, `niah_multikey_1`, `niah_multivalue`, `vt`", "qwen_0.5b_4096_ruler"),
    ("0.5B, `label_map`, `line_asked`, `chain`", "qwen_0.5b_8192_evaluation"),
    ("0.5B, `niah_multikey_1`, `niah_multivalue`, `vt`, `cwe`, `fwe`", "qwen_0.5b_8192_ruler"),
    ("0.5B, `line_asked`, `niah_multivalue`", "qwen_0.5b_16384_evaluation"),
)
_COLUMNS = ("dense", "headwise", "vertical_slash", "paper", "a_shape-tail")
# Of the table by task: model, result file, its name of A-shape.
_BY_TASK = (
    ("SmolLM2", "smollm2_2048_report", "a_shape"),
    ("SmolLM2", "smollm2_4096_separation_default", "a_shape-tail"),
    ("Gemma-3", "gemma3_16384_evaluation_answers", "a_shape"),
)
_REPORTED = ("dense", "headwise", "s1", "s2", "vertical_slash", "paper", "a_shape")


def figure(
    results: Results, file: str, method: str, task: str = "all answers", measure: str = "score"
) -> dict[str, Any] | None:
    """Return a figure of an evaluation; None if the method was not measured."""
    rows = results[file].part("figures")
    found = [
        row
        for row in rows
        if (row["task"], row["method"], row["measure"]) == (task, method, measure)
    ]
    return found[0] if found else None


def _difference(row: dict[str, Any], spec: str) -> str:
    cell = f"{row['difference']:{spec}} "
    cell += span(row["difference_low"], row["difference_high"], spec)
    return cell + (f", {row['verdict']}" if row.get("verdict") else "")


def density(results: Results, file: str, method: str) -> float:
    """Return the density of a method in an evaluation."""
    value: float = one(results[file].part("methods"), name=method)["density"]
    return value


def _scores(
    results: Results, file: str, methods: Sequence[str], task: str = "all answers"
) -> list[str]:
    rows = [figure(results, file, method, task) for method in methods]
    return ["" if row is None else f"{row['value']:.3f}" for row in rows]


@table("evaluations")
def evaluations_table(results: Results) -> str:
    """Qwen2.5-Coder on prompts that no search saw."""
    rows = []
    for name, file in _EVALUATED:
        own = figure(results, file, "headwise")
        if own is None:
            raise ValueError(f"{file} must have all answers of headwise")
        scores = _scores(results, file, _COLUMNS)
        cells = [name, link(f"{own['length']:,}", file), f"{own['count']}"]
        cells.append(f"{density(results, file, 'headwise'):.2f}")
        rows.append([*cells, *scores[:2], _difference(own, "+.3f"), *scores[2:]])
    header = ["model, tasks", "tokens", "prompts", "density", "dense", "Headwise", "minus dense"]
    return markdown([*header, *(_NAMES[name] for name in _COLUMNS[2:])], rows)


@table("by task")
def by_task_table(results: Results) -> str:
    """Correct answers by task."""
    rows = []
    for task in ("line_asked", "label_map", "chain"):
        for model, file, a_shape in _BY_TASK:
            own = figure(results, file, "headwise", task)
            if own is None:
                continue
            methods = ("dense", "headwise", "vertical_slash", a_shape)
            cells = [f"`{task}`", model, link(f"{own['length']:,}", file)]
            cells.append(f"{density(results, file, 'headwise'):.3f}")
            rows.append([*cells, *_scores(results, file, methods, task)])
    header = ["task", "model", "tokens", "density", "dense", "Headwise", "vertical-slash"]
    return markdown([*header, "A-shape"], rows)


@table("all tasks")
def all_tasks_table(results: Results) -> str:
    """SmolLM2 at 4,096 tokens over all tasks."""
    file = "smollm2_4096_separation_default"
    return _reported(results, file, ("dense", "headwise", "vertical_slash", "a_shape-tail"))


@table("report SmolLM2")
def smollm2_table(results: Results) -> str:
    """SmolLM2 at 2,048 tokens, method by method."""
    return _reported(results, "smollm2_2048_report", _REPORTED)


@table("report Gemma-3")
def gemma_table(results: Results) -> str:
    """Gemma-3 at 2,048 tokens, method by method."""
    methods = ("dense", "headwise", "s1", "s2", "vertical_slash", "a_shape")
    return _reported(results, "gemma3_2048_report", methods)


def _reported(results: Results, file: str, methods: Sequence[str]) -> str:
    rows = []
    for method in methods:
        score = figure(results, file, method)
        text = figure(results, file, method, "prose", "perplexity")
        if score is None or text is None:
            raise ValueError(f"{file} must have answers and prose of {method}")
        cells = [_NAMES[method], f"{density(results, file, method):.3f}", f"{score['value']:.3f}"]
        if method == "dense":
            cells += ["", f"{text['value']:.2f}"]
        else:
            cells += [_difference(score, "+.3f"), _difference(text, "+.1%")]
        rows.append(cells)
    header = ["method", "density", "correct answers", "minus dense"]
    return markdown([*header, "perplexity of `prose`, vs. dense"], rows)


@table("essays")
def essays_table(results: Results) -> str:
    """Perplexity of essays at 8,192 tokens."""
    rows = []
    for model, file in (
        ("SmolLM2", "smollm2_8192_evaluation_model"),
        ("Gemma-3", "gemma3_8192_evaluation_text"),
    ):
        for method in ("headwise", "vertical_slash", "a_shape"):
            text = figure(results, file, method, "text:essays.txt", "perplexity")
            if text is None:
                continue
            cells = [link(model, file), _NAMES[method], f"{density(results, file, method):.3f}"]
            rows.append([*cells, _difference(text, "+.2%")])
    return markdown(["model", "method", "density", "perplexity vs. dense"], rows)


@table("MInference")
def minference_table(results: Results) -> str:
    """A search with a budget of 0.25 and MInference's, at 4,096 tokens."""
    names = {"cfg.yaml": "search, budget 0.25"}
    names |= {
        f"heads_{budget}.yaml": f"MInference's search, {budget}"
        for budget in ("0.3", "0.25", "0.2", "0.15")
    }
    rows = []
    for config, name in names.items():
        row = one(results["smollm2_4096_versus"].part("row"), config=config)
        rows.append(
            [
                name,
                f"{row['density']:.3f}",
                f"{row['seconds']:.3f}",
                f"{row['kl']:.4f} ± {row['kl_error']:.4f}",
                f"{row['loss']:+.3f} ± {row['loss_error']:.3f}",
            ]
        )
    header = ["artifact", "density", "attention, s", "KL to dense, nats/token"]
    return markdown([*header, "rise of NLL, nats/token"], rows)


@table("skip-softmax")
def skip_table(results: Results) -> str:
    """An earlier search's artifact and skip-softmax with one threshold for all heads."""
    file = "smollm2_4096_skip_softmax_versus"
    dense = results.settings(file)["dense_seconds"]["dense_kernel"]
    names = {"s4.yaml": "earlier search", "skip_463.yaml": "skip-softmax, as fast"}
    names["skip_0.4.yaml"] = "skip-softmax, faster"
    rows = []
    for config, name in names.items():
        row = one(results[file].part("row"), config=config)
        cells = [name, f"{row['density']:.3f}", f"{dense / row['seconds']:.2f}x"]
        rows.append([*cells, f"{row['kl']:.4f}"])
    header = ["method", "density", "speedup vs. Headwise's dense kernel", "KL, nats/token"]
    return markdown(header, rows)


@table("statistics")
def statistics_table(results: Results) -> str:
    """The loss of one artifact by several statistics."""
    rows = [
        [str(row["statistic"]), f"{row['loss']:.1%} {span(row['low'], row['high'], '.1%')}"]
        for row in results["qwen_0.5b_4096_statistics"].part("row")
    ]
    return markdown(["statistic", "lost, of dense attention's value"], rows)
