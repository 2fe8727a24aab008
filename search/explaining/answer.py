"""Answers a question about an artifact's heads as plain data, and writes the answer as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from artifacts import HeadwiseError, load_pair
from artifacts.files import out_folder
from search.common.measures import MEASURES
from search.explaining.findings import Findings, Result, on_hull
from search.explaining.question import Question
from search.explaining.why import reasons

_HEADER = f"{'error':>9}{'recall':>9}{'density':>9}{'ms':>10}"


def run(question: Question) -> dict[str, Any]:
    """The answer as plain data, with the picture's paths where a model is given.

    Raises:
        HeadwiseError: no such head, an artifact without scores, or one that is not of that model.
    """
    artifact, arrays = load_pair(question.file)
    try:
        found = Findings.of(artifact, arrays)
        if question.layer is not None:
            _check(found, question.layer, question.head)
    except HeadwiseError as error:
        raise HeadwiseError(f"{question.file}: {error}") from None
    if question.model is not None and question.head is None:
        raise HeadwiseError("--model draws one head: give --head LAYER.HEAD")
    if question.layer is None:
        return {**_origin(found), "layers": [_layer(found, layer) for layer in _searched(found)]}
    if question.head is None:
        return {**_origin(found), "heads": _heads(found, question.layer)}
    answer = {**_origin(found), **_head(found, question.layer, question.head)}
    if question.model is not None:
        from search.explaining.head_picture import draw_head

        folder = question.out or question.file.resolve().parent
        with out_folder(folder):
            answer |= draw_head(question, artifact, arrays, folder)
    return answer


def _check(found: Findings, layer: int, head: int | None) -> None:
    model = found.artifact.model
    if not 0 <= layer < model.num_layers or not 0 <= (head or 0) < model.num_heads:
        name = f"layer {layer}" if head is None else f"head {layer}.{head}"
        raise HeadwiseError(
            f"no {name}: {model.name} has layers 0 to {model.num_layers - 1}, each with heads 0 to "
            f"{model.num_heads - 1}"
        )
    if found.artifact.prefill.layers[layer] is None:
        raise HeadwiseError(f"layer {layer} is left as it is, for it slides over a window: nothing was searched there")


def _origin(found: Findings) -> dict[str, Any]:
    search = found.artifact.search
    assert search is not None
    return {
        "model": found.artifact.model.name,
        "lengths": list(search.calibration.lengths),
        "samples": search.calibration.samples,
        "budget": search.budget,
        "unit": next((cost for cost in ("seconds", "flops") if cost in found.candidates[0].measures), "density"),
    }


def _searched(found: Findings) -> list[int]:
    return [layer for layer, row in enumerate(found.artifact.prefill.layers) if row is not None]


def _head(found: Findings, layer: int, head: int) -> dict[str, Any]:
    row = found.artifact.prefill.layers[layer]
    assert row is not None
    return {
        "layer": layer,
        "head": head,
        "pattern": row[head],
        "why": reasons(found, layer, head),
        "candidates": _table(found, layer, head),
        "heads": _heads(found, layer),
    }


def _table(found: Findings, layer: int, head: int) -> list[dict[str, Any]]:
    """By cost where heads were weighed against each other, for that is the curve; by error where all cost the same."""
    results = found.results(layer, head)
    line = set(on_hull(results))
    order = sorted(range(len(results)), key=lambda at: _order(found, results[at]))
    winner = int(found.chosen[layer, head])
    return [{**asdict(results[at]), "on_hull": at in line, "chosen": results[at].candidate == winner} for at in order]


def _order(found: Findings, result: Result) -> tuple[float, float]:
    search = found.artifact.search
    by_error = search is not None and search.allocation == "heads"
    return (result.error, result.cost) if by_error else (result.cost, result.loss)


def _heads(found: Findings, layer: int) -> list[dict[str, Any]]:
    """What the heads of a layer got; nulls for one that the search chose nothing for."""
    row = found.artifact.prefill.layers[layer]
    assert row is not None
    heads = []
    for head, name in enumerate(row):
        winner = found.winner(layer, head)
        scores: dict[str, float | None] = dict.fromkeys((*MEASURES, "seconds"))
        if winner is not None:
            scores |= {key: getattr(winner, key) for key in scores}
            scores |= {key: float(array[layer, head]) for key, array in found.scores.items()}
        tried = sum(candidate.tried(layer, head) for candidate in found.candidates)
        heads.append({"layer": layer, "head": head, "pattern": name, **scores, "tried": tried})
    return heads


def _layer(found: Findings, layer: int) -> dict[str, Any]:
    heads = [head for head in _heads(found, layer) if head["error"] is not None]
    kinds = Counter(found.artifact.patterns[name].kind for name in found.artifact.prefill.layers[layer] or ())
    mean = {name: float(np.mean([head[name] for head in heads])) for name in MEASURES if heads}
    seconds = [head["seconds"] for head in heads]
    worst = max(heads, key=lambda head: head["error"], default=None)
    return {
        "layer": layer,
        "kinds": dict(kinds.most_common()),
        **mean,
        "seconds": sum(seconds) if seconds and None not in seconds else None,
        "worst": None if worst is None else f"{layer}.{worst['head']}",
        "worst_error": None if worst is None else worst["error"],
    }


def report(answer: dict[str, Any]) -> str:
    """The answer as text."""
    lengths = ", ".join(f"{length:,}" for length in answer["lengths"])
    lines = [f"{answer['model']}: searched at {lengths} tokens, budget {answer['budget']}"]
    if "layers" in answer:
        lines.append(f"{'layer':>5}{_HEADER}  worst head     kinds")
        for layer in answer["layers"]:
            kinds = ", ".join(f"{kind} {count}" for kind, count in layer["kinds"].items())
            worst = f"{layer['worst'] or '':<7}{_number(layer['worst_error'])}"
            lines.append(_row(f"{layer['layer']:>5}", layer, f"  {worst}  {kinds}"))
        return "\n".join(lines)
    if "why" not in answer:
        return "\n".join([*lines, *_heads_table(answer["heads"])])
    lines.append(f"layer {answer['layer']}, head {answer['head']}: {answer['pattern']}\n")
    measure = next((name for name in ("objective", "change") if answer["candidates"][0][name] is not None), None)
    header = {"objective": "loss", "change": "change", None: ""}[measure]
    lines.append(f"  {'tried':<26}{_HEADER}{header:>11}")
    for row in answer["candidates"]:
        lost = f"{row[measure]:>11.2e}" if measure else ""
        more = f"{lost}{'  hull' if row['on_hull'] else ''}"
        lines.append(_row(f"{'*' if row['chosen'] else ' '} {row['pattern']:<26}", row, more))
    lines.append("* chosen; hull: no mixture of two others loses less at the cost\n")
    lines += answer["why"]
    lines.append(f"\nthe heads of layer {answer['layer']}")
    lines += _heads_table(answer["heads"])
    if "missed" in answer:
        lines.append("")
        lines += [answer["missed"]["sentence"], *answer["files"]]
    return "\n".join(lines)


def _heads_table(heads: Sequence[dict[str, Any]]) -> list[str]:
    names = ((f"{head['layer']}.{head['head']}", head["pattern"]) for head in heads)
    rows = (_row(f"{at:>7}  {name:<26}", head) for (at, name), head in zip(names, heads, strict=True))
    return [f"{'head':>7}  {'pattern':<26}{_HEADER}", *rows]


def _row(what: str, scores: dict[str, Any], more: str = "") -> str:
    """A row of any table, below _HEADER."""
    seconds = scores.get("seconds")
    ms = "-" if seconds is None else f"{1e3 * seconds:.3f}"
    return f"{what}{''.join(f'{_number(scores.get(name)):>9}' for name in MEASURES)}{ms:>10}{more}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
