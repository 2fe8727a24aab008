"""RULER's own files (Hsieh et al. 2024): JSON lines with input, outputs and, in newer ones, answer_prefix.

Its scripts write them as `TASK/validation.jsonl`. Without its files there are the tasks niah_..., vt, cwe, fwe, qa_....
"""

from __future__ import annotations

from pathlib import Path

from artifacts import HeadwiseError
from artifacts.errors import shorten
from profiling.prompts.kind import RULER, Kind, Prompt, Wanted
from profiling.prompts.suites import TASK, Asked, Record, prompts_of

# Subsets that RULER names its files by, in a folder that has the task's name.
_SUBSETS = ("validation", "test")
# By the first part of a task's name: the metric and what RULER lets a model answer with.
_FAMILIES = {"niah": ("all", 128), "vt": ("all", 30), "cwe": ("all", 120), "fwe": ("all", 50), "qa": ("any", 32)}


def of_folder(kind: str, file: Path) -> bool:
    """Whether it is the file's folder that says which task of RULER it holds."""
    return kind == "ruler" and file.stem in _SUBSETS


def ruler(wanted: Wanted, *, task: str | None = None) -> list[Prompt]:
    """Prompts of one of RULER's files, whose task is the name of the file or of its folder."""
    file = wanted.file
    name = task or (file.parent.resolve().name if of_folder(wanted.name, file) else file.stem)
    if name.partition("_")[0] not in _FAMILIES:
        raise HeadwiseError(
            f"{file.name}: {shorten(name)} is no task of RULER; write ruler@task=NAME:FILE with a name that begins "
            f"with one of {', '.join(_FAMILIES)}"
        )
    metric, new_tokens = _FAMILIES[name.partition("_")[0]]

    def ask(record: Record) -> Asked:
        prefix = record.text("answer_prefix") if "answer_prefix" in record else ""
        return Asked(record.text("input") + prefix, record.texts("outputs"), metric, new_tokens)

    return prompts_of(wanted, ask)


KINDS = (
    Kind(
        name="ruler",
        make=ruler,
        takes_file="must",
        parameters=(TASK,),
        asks="what the records of one of RULER's own files ask",
        scored="all references named; any for qa",
        source=RULER,
    ),
)
