"""An evaluation's answers in the result folders of kvpress (its evaluation/evaluate.py, 0.5.4), for what reads those.

    DIR/<dataset>__<length>__<model>__<method>__<share dropped>[__query_aware]/
        predictions.csv  metrics.json  config.yaml

RULER's tasks are of the dataset `ruler`, scored as there; all others of the dataset `headwise`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from artifacts.files import atomic_write, out_folder
from profiling.evaluation.measure import Outcome
from profiling.prompts.kind import RULER
from profiling.prompts.prompt import KINDS, Prompt, parse_name
from profiling.quality.answers import new_tokens

_RULER, _OWN = "ruler", "headwise"
_COLUMNS = (
    "question",
    "answer_prefix",
    "answer",
    "task",
    "max_new_tokens",
    "predicted_answer",
    "compression_ratio",
)


class _Group(NamedTuple):
    """What shares a folder. query_aware: the question is prefilled with the rest, not asked in a later turn."""

    dataset: str
    length: int
    method: str
    query_aware: bool


def write_results(
    out: Path, record: dict[str, Any], outcomes: Sequence[Outcome], tokenizer: Any, *, model: str
) -> list[Path]:
    """Write a folder for each dataset, length and method; one that is there gets a numbered folder inside.

    Args:
        out: the folder of all results.
        record: what profiling.evaluation.record.record_of made of the same outcomes.
        outcomes: with their prompts; those without answers after their prompts are left out.
        tokenizer, model: the model's, and its name.

    Returns:
        The folders.

    Raises:
        HeadwiseError: a folder that cannot be written.
    """
    groups: dict[_Group, list[tuple[str, Prompt, dict[str, Any]]]] = {}
    for outcome in outcomes:
        dataset, task = _task(outcome.task)
        for prompt, found in zip(outcome.prompts, outcome.records, strict=True):
            if (prompt.answer is not None or prompt.references) and not prompt.scored:
                group = _Group(dataset, outcome.length, outcome.method, not prompt.turn)
                groups.setdefault(group, []).append((task, prompt, found))
    written = []
    for group, rows in groups.items():
        (method,) = (m for m in record["methods"] if (m["name"], m["length"]) == (group.method, group.length))
        ratio = 1 - (1.0 if method["kept"] is None else method["kept"])
        config = _config(record, group, method, ratio, out, model)
        folder = _new(out / _name(config))
        with out_folder(folder):
            atomic_write(folder / "predictions.csv", _predictions(rows, ratio, tokenizer))
            atomic_write(folder / "metrics.json", json.dumps(_metrics(group.dataset, rows), indent=4).encode())
            atomic_write(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False).encode())
        written.append(folder)
    return written


def _task(name: str) -> tuple[str, str]:
    """The dataset that a task belongs to, and what the task is called there."""
    kind = parse_name(name)
    of_ruler = KINDS[kind].source == RULER
    if not of_ruler:
        return _OWN, name
    # ruler:niah_single_1/validation.jsonl is a file of RULER's own.
    return _RULER, Path(name.partition(":")[2]).parent.name or kind if kind == _RULER else kind


def _name(config: dict[str, Any]) -> str:
    parts = [config["dataset"], config["data_dir"], config["model"].replace("/", "--"), config["press_name"]]
    parts.append(f"{config['compression_ratio']:.2f}")
    return "__".join([*parts, *(["query_aware"] if config["query_aware"] else [])])


def _new(folder: Path) -> Path:
    """The folder, or where it is there already the first number inside it that is free."""
    if not folder.exists():
        return folder
    number = 1
    while (folder / str(number)).exists():
        number += 1
    return folder / str(number)


def _predictions(rows: Sequence[tuple[str, Prompt, dict[str, Any]]], ratio: float, tokenizer: Any) -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for task, prompt, found in rows:
        question = tokenizer.decode(prompt.input_ids[len(prompt.context) :])
        answers = list(prompt.references or (prompt.answer or "",))
        writer.writerow([question, "", answers, task, new_tokens(tokenizer, prompt), found["text"], ratio])
    return file.getvalue().encode()


def _metrics(dataset: str, rows: Sequence[tuple[str, Prompt, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Percent by task, two digits."""
    scores: dict[str, list[float]] = {}
    for task, _, found in rows:
        scores.setdefault(task, []).append(found["score"])
    metric = "string_match" if dataset == _RULER else "score"
    return {task: {metric: round(100 * sum(given) / len(given), 2)} for task, given in scores.items()}


def _config(
    record: dict[str, Any], group: _Group, method: dict[str, Any], ratio: float, out: Path, model: str
) -> dict[str, Any]:
    """kvpress's fields in its order; those that stand for something that there is not are null."""
    settings = record["settings"]
    return {
        "dataset": group.dataset,
        "data_dir": str(group.length),
        "model": model,
        "device": settings["device"],
        "press_name": group.method,
        "compression_ratio": ratio,
        "key_channel_compression_ratio": None,
        "fraction": 1.0,
        "max_new_tokens": None,
        "max_context_length": None,
        "query_aware": group.query_aware,
        "needle_depth": None,
        "compression_interval": None,
        "target_size": None,
        "hidden_states_buffer_size": None,
        "output_dir": str(out),
        "log_level": "INFO",
        "model_kwargs": {"dtype": settings["dtype"]},
        "press_init_command": f"{group.method}({method['sizes']})",
        "seed": settings["seed"],
        "fp8": False,
    }
