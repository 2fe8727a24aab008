"""RULER's own files (Hsieh et al. 2024): JSON lines with input, outputs and, in newer ones, answer_prefix.

Its scripts write them as `TASK/validation.jsonl`. Without its files there are the tasks niah_..., vt, cwe, fwe, qa_....
"""

from __future__ import annotations

from pathlib import Path

from artifacts import HeadwiseError
from artifacts.errors import shorten
from profiling.prompts.prompt import SUBSETS, Prompt
from profiling.prompts.suites import Asked, Record, prompts_of
from profiling.prompts.tokens import Encoder

_SUITE = "ruler"
# By the first part of a task's name: the metric and what RULER lets a model answer with.
_FAMILIES = {"niah": ("all", 128), "vt": ("all", 30), "cwe": ("all", 120), "fwe": ("all", 50), "qa": ("any", 32)}


def ruler(
    encode: Encoder,
    file: Path | None,
    length: int,
    samples: int,
    seed: int,
    *,
    task: str | None = None,
    shorter: bool = False,
) -> list[Prompt]:
    """Prompts of one of RULER's files, whose task is the name of the file or of its folder."""
    assert file is not None
    name = task or (file.parent.resolve().name if file.stem in SUBSETS else file.stem)
    if name.partition("_")[0] not in _FAMILIES:
        raise HeadwiseError(
            f"{file.name}: {shorten(name)} is no task of RULER; write ruler@task=NAME:FILE with a name that begins "
            f"with one of {', '.join(_FAMILIES)}"
        )
    metric, new_tokens = _FAMILIES[name.partition("_")[0]]

    def ask(record: Record) -> Asked:
        prefix = record.text("answer_prefix") if "answer_prefix" in record else ""
        return Asked(record.text("input") + prefix, record.texts("outputs"), metric, new_tokens)

    return prompts_of(encode, file, length, samples, seed, suite=_SUITE, ask=ask, shorter=shorter)
