"""Calibration and test prompts: seeded, of exact length in tokens, the same in every process.

KINDS are the tasks; docs/tasks.md explains them. A new task is a function with @task in a module of
profiling.prompts.tasks.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NamedTuple

from artifacts import HeadwiseError
from artifacts.errors import shorten
from profiling.prompts import tasks
from profiling.prompts.kind import REGISTERED, Evidence, Prompt, Request, TaskSpec
from profiling.prompts.tokens import Encoder

__all__ = [
    "CALIBRATED_TASKS",
    "DEFAULT_TASKS",
    "GATE_TASKS",
    "KINDS",
    "TASKS",
    "Evidence",
    "Prompt",
    "Task",
]
__all__ += ["Fewer", "digest", "fewer_sentence", "fewer_sentences", "make_prompts", "parse_name"]
__all__ += ["parse_task", "per_context"]

for _module in iter_modules(tasks.__path__):
    import_module(f"{tasks.__name__}.{_module.name}")
# By name: the order does not depend on the order of imports.
KINDS: dict[str, TaskSpec] = dict(sorted(REGISTERED.items()))
TASKS = ", ".join(KINDS) + " (headwise tasks explains them)"


@dataclass(frozen=True)
class Task:
    """A kind of task with its file and parameters."""

    kind: str
    file: Path | None = None
    parameters: tuple[tuple[str, float | int], ...] = ()

    @property
    def has_text(self) -> bool:
        """True if prompts are made out of a text or file, so that those of other seeds may overlap.

        Generated prompts of another seed are other prompts.
        """
        return self.file is not None or KINDS[self.kind].has_text

    @property
    def name(self) -> str:
        """The same on every machine: it has the last part of the file's path only."""
        if self.file is None:
            return str(self)
        return str(replace(self, file=Path(self.file.name)))

    def __str__(self) -> str:
        """The text that parse_task reads."""
        text = self.kind
        if self.parameters:
            text += "@" + ",".join(f"{name}={value}" for name, value in self.parameters)
        if self.file is not None:
            text += f":{self.file}"
        return text


def parse_task(text: str) -> Task:
    """Read a task such as `kv_retrieval`, `passkey:FILE` or `passkey@depth=0.5:FILE`.

    Raises:
        HeadwiseError: none of these, a parameter that the task does not have, or the file is not
            there.
    """
    head, colon, file = text.partition(":")
    name, at, values = head.partition("@")
    kind = KINDS.get(name)
    if kind is None or (colon and kind.takes_file == "no"):
        raise HeadwiseError(f"unknown task {shorten(text)}; known: {TASKS}")
    if at:
        parameters = _parameters(kind, values)
    else:
        parameters = ()
    if not file and (colon or kind.takes_file == "must"):
        raise HeadwiseError(f"the task {name!r} needs a file: {name}:FILE")
    if not file:
        return Task(name, None, parameters)
    path = Path(os.path.expanduser(file))
    if not os.path.isfile(path):
        if os.path.exists(path):
            wrong = "is not a file"
        else:
            wrong = "does not exist"
        raise HeadwiseError(f"the file {shorten(file)} of the task {name!r} {wrong}")
    return Task(name, path, parameters)


def distinct(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """The tasks, each once: by file, however its path is written.

    Raises:
        HeadwiseError: two tasks have one name, so that their figures would be joined.
    """
    by_file = {replace(task, file=task.file and task.file.resolve()): task for task in tasks}
    names = [task.name for task in by_file.values()]
    for name in names:
        if names.count(name) > 1:
            raise HeadwiseError(f"--task has two tasks {name}: their files need different names")
    return tuple(by_file.values())


def parse_name(name: str) -> str:
    """The kind in a task's name."""
    return name.partition(":")[0].partition("@")[0]


def _parameters(kind: TaskSpec, text: str) -> tuple[tuple[str, float | int], ...]:
    """`depth=0.5,hops=2` as pairs, in the order of the table: the same task has one name."""
    by_name = {parameter.name: parameter for parameter in kind.parameters}
    values: dict[str, float | int] = {}
    for item in text.split(","):
        name, equals, value = item.partition("=")
        if name not in by_name or not equals or name in values:
            takes = "it takes none"
            if by_name:
                takes = f"it takes {', '.join(by_name)}, each once, as in {kind.usage}"
            raise HeadwiseError(
                f"cannot read the parameter {shorten(item)} of the task {kind.name!r}: {takes}"
            )
        values[name] = by_name[name].read(value, kind.name)
    return tuple((name, values[name]) for name in by_name if name in values)


# Default tasks of an evaluation; docs/results.md has the table that they were selected by.
# Questions of a later turn share a context: 16 of them cost little more than one.
DEFAULT_TASKS = tuple(map(parse_task, ("line_turns@questions=16", "line_asked", "chain", "prose")))
# Default calibration tasks of a search: artifacts calibrated on these lose no more of the answers
# of a later turn.
CALIBRATED_TASKS = tuple(map(parse_task, ("line_asked", "chain", "prose")))
# Default tasks of a search's gate: all kinds of answers in one prefill.
GATE_TASKS = tuple(map(parse_task, ("facts", "prose")))


def make_prompts(
    task: Task, tokenizer: Any, *, length: int, samples: int, seed: int
) -> list[Prompt]:
    """Make `samples` prompts of exactly `length` tokens.

    Prompts of a text share none of it, so that a short text has fewer: `fewer_sentences` names such
    tasks. The first ones do not depend on `samples`.

    Args:
        task: its kind, file and parameters.
        tokenizer: any transformers tokenizer; its tokens at the start of a sequence count among
            the `length` tokens.
        length: in tokens.
        samples: how many prompts; different ones.
        seed: equal seeds, tokenizers and files yield equal prompts.

    Raises:
        HeadwiseError: a file that is missing, empty, malformed or too short; a length
            that the question alone fills.
    """
    for name, value in (("length", length), ("samples", samples)):
        if value < 1:
            raise HeadwiseError(f"{name} must be at least 1, got {value}")
    request = Request(
        name=task.kind,
        encode=Encoder(tokenizer),
        text=task.file,
        length=length,
        samples=samples,
        seed=seed,
    )
    kind = KINDS[task.kind]
    prompts = kind.make(request, **dict(task.parameters))
    assert len(prompts) == samples or (0 < len(prompts) < samples and task.has_text)
    assert all(len(prompt.input_ids) == length for prompt in prompts)
    assert all(bool(prompt.text_spans) == task.has_text for prompt in prompts)
    assert all((prompt.cell is not None) == task.has_text for prompt in prompts)
    return [replace(prompt, task=task.name, metric=kind.metric) for prompt in prompts]


def per_context(task: Task) -> int:
    """Number of prompts of a task that share a context and its prefill."""
    names = {parameter.name for parameter in KINDS[task.kind].parameters}
    if "questions" in names:
        return int(dict(task.parameters).get("questions", 8))
    return 1


class Fewer(NamedTuple):
    """A task whose text has `prompts` prompts of the `samples` that were asked for."""

    task: str
    length: int
    prompts: int
    samples: int


def fewer_sentence(fewer: Fewer) -> str:
    """Say that a task's text has fewer prompts than were asked for."""
    return (
        f"{fewer.prompts} of {fewer.samples} prompts of {fewer.task} at {fewer.length} tokens: "
        "there is no more text that does not overlap"
    )


def fewer_sentences(
    tasks: Iterable[Task], prompts: Iterable[Prompt], *, length: int, samples: int
) -> list[str]:
    """Name the tasks whose text has fewer prompts than `samples`."""
    counts = Counter(prompt.task for prompt in prompts)
    names = dict.fromkeys(task.name for task in tasks if task.has_text)
    return [
        fewer_sentence(Fewer(name, length, counts[name], samples))
        for name in names
        if counts[name] < samples
    ]


def digest(prompts: Sequence[Prompt]) -> str:
    """sha256 over the ids, the answers and where these are asked for, in hexadecimal."""
    content = [
        [list(p.input_ids), p.answer, *([p.turn, p.scored] if p.turn or p.scored else [])]
        for p in prompts
    ]
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()
