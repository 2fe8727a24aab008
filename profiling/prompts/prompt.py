"""Calibration and test prompts: seeded, of exact length in tokens, the same in every process.

profiling/prompts/kinds.py lists the tasks, docs/tasks.md explains them.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from artifacts import HeadwiseError
from artifacts.errors import shorten
from profiling.prompts.kind import Kind
from profiling.prompts.kinds import DEFAULT_TASKS, JUDGED_TASKS, KINDS, TASKS
from profiling.prompts.tokens import Encoder, Ids

__all__ = [
    "DEFAULT_TASKS",
    "JUDGED_TASKS",
    "SUBSETS",
    "TASKS",
    "Find",
    "Prompt",
    "Task",
    "digest",
    "make_prompts",
    "parse_task",
]
# Subsets that RULER names its files by, in a folder that has the task's name.
SUBSETS = ("validation", "test")


@dataclass(frozen=True)
class Find:
    """One thing that an answer takes out of the prompt.

    expected: the text that a right greedy answer has for it, its leading space included.
    span: half-open range of token positions of the block that says it.
    lead: what leads on to it from the find before it; empty for the first, for which the prompt's end asks.
    """

    expected: str
    span: tuple[int, int]
    lead: str = ""


@dataclass(frozen=True)
class Prompt:
    """Token ids, special tokens included, and what a right greedy answer starts with, where that is known.

    turn: how many of the last ids come in a later turn. The ids before them, the context, are prefilled under the
        method; these are fed after it with dense attention over the cache, and the prefill did not know them. Prompts
        with the same context share its prefill.
    scored: half-open ranges of the context's tokens that are answers too: the model is asked for them inside the
        prompt, so what the method's prefill makes of the tokens before them is what is measured.
    labels: which kind of answer each scored range is, where a prompt has several kinds.
    task: what the prompt was made of, as Task.name; empty where it was made by hand.
    finds: where in the prompt the answer lies, in the order in which it is put together; empty where unknown.
    metric: how an answer is scored, as profiling.prompts.metrics knows it; `begins` is with `answer`.
    references: what the metric compares an answer with, where that is not `answer`.
    choices: the classes or options that an answer chooses from.
    new_tokens: how many tokens the task's authors let a model answer with; at least a few more than `answer` has.
    """

    input_ids: Ids
    answer: str | None
    finds: tuple[Find, ...] = ()
    metric: str = "begins"
    references: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    new_tokens: int | None = None
    turn: int = 0
    scored: tuple[tuple[int, int], ...] = ()
    labels: tuple[str, ...] = ()
    task: str = ""

    def __post_init__(self) -> None:
        length = len(self.context)
        if not 0 <= self.turn < max(1, len(self.input_ids)):
            raise ValueError(f"turn must be from 0 to {len(self.input_ids) - 1}, got {self.turn}")
        if wrong := [span for span in self.scored if not 0 < span[0] < span[1] <= length]:
            raise ValueError(f"scored ranges must lie within 1 to {length}, got {wrong[0]}")

    @property
    def context(self) -> Ids:
        """What is prefilled: all ids but those of a later turn."""
        return self.input_ids[: len(self.input_ids) - self.turn]

    @property
    def family(self) -> str:
        """What a task is about, one of profiling.prompts.kinds.FAMILIES; empty where the prompt was made by hand."""
        return KINDS[parse_name(self.task)].family if self.task else ""

    @property
    def continuation(self) -> str | None:
        """The answer as text that goes on from the prompt's end, its leading space included."""
        if self.finds:
            return "".join(find.lead + find.expected for find in self.finds)
        return None if self.answer is None else f" {self.answer}"

    @classmethod
    def to_find(cls, input_ids: tuple[int, ...], *finds: Find, **scoring: Any) -> Prompt:
        """A prompt whose answer is what it takes to find, in turn; `scoring` are fields from `metric` on."""
        return cls(input_ids, "".join(find.lead + find.expected for find in finds).strip(), finds, **scoring)


@dataclass(frozen=True)
class Task:
    """What to make prompts of; `name` is the same on every machine: of the file it has the last part only."""

    kind: str
    file: Path | None = None
    parameters: tuple[tuple[str, float | int | str], ...] = ()

    @property
    def name(self) -> str:
        told = ",".join(f"{name}={value}" for name, value in self.parameters)
        name = self.kind + (f"@{told}" if told else "")
        if self.file is None:
            return name
        of_ruler = self.kind == "ruler" and self.file.stem in SUBSETS
        return f"{name}:{self.file.parent.resolve().name}/{self.file.name}" if of_ruler else f"{name}:{self.file.name}"


def parse_task(text: str) -> Task:
    """Read a task as TASKS lists them, such as `kv_retrieval`, `passkey:FILE` or `needle@depth=0.5:FILE`.

    Raises:
        HeadwiseError: none of these, a parameter that the task does not have, or the file is not there.
    """
    head, colon, file = text.partition(":")
    name, at, told = head.partition("@")
    kind = KINDS.get(name)
    if kind is None or (colon and kind.takes_file == "no"):
        raise HeadwiseError(f"unknown task {shorten(text)}; known: {TASKS}")
    parameters = _parameters(kind, told) if at else ()
    if not file and (colon or kind.takes_file == "must"):
        raise HeadwiseError(f"the task {name!r} needs a file: {name}:FILE")
    if not file:
        return Task(name, None, parameters)
    path = Path(file).expanduser()
    if not path.is_file():
        wrong = "is not a file" if path.exists() else "does not exist"
        raise HeadwiseError(f"the file {shorten(file)} of the task {name!r} {wrong}")
    return Task(name, path, parameters)


def parse_name(name: str) -> str:
    """The kind in a task's name."""
    return name.partition(":")[0].partition("@")[0]


def _parameters(kind: Kind, told: str) -> tuple[tuple[str, float | int | str], ...]:
    """`depth=0.5,hops=2` as pairs, in the order of the table: the same task has one name."""
    known = {parameter.name: parameter for parameter in kind.parameters}
    found: dict[str, float | int | str] = {}
    for item in told.split(","):
        name, equals, value = item.partition("=")
        if name not in known or not equals or name in found:
            takes = f"it takes {', '.join(known)}, each once, as in {kind.usage}" if known else "it takes none"
            raise HeadwiseError(f"cannot read the parameter {shorten(item)} of the task {kind.name!r}: {takes}")
        found[name] = known[name].read(value, kind.name)
    return tuple((name, found[name]) for name in known if name in found)


def make_prompts(
    task: str | Task, tokenizer: Any, *, length: int, samples: int, seed: int, shorter: bool = False
) -> list[Prompt]:
    """Make `samples` prompts of exactly `length` tokens.

    Args:
        task: as parse_task reads it.
        tokenizer: any transformers tokenizer; what it starts a sequence with counts among the `length` tokens.
        length: in tokens.
        samples: how many prompts; different ones.
        seed: the same seed, tokenizer and file give the same prompts.
        shorter: take also those prompts of a published suite that have fewer than `length` tokens.

    Raises:
        HeadwiseError: unknown task; a file that is missing, empty, malformed or too short; a length that the
            question alone fills.
    """
    task = parse_task(task) if isinstance(task, str) else task
    for name, value in (("length", length), ("samples", samples)):
        if value < 1:
            raise HeadwiseError(f"{name} must be at least 1, got {value}")
    kind = KINDS[task.kind]
    module, _, function = kind.maker.partition(":")
    make = getattr(importlib.import_module(module), function)
    told = {**kind.fixed, **dict(task.parameters), **({} if kind.exact else {"shorter": shorter})}
    prompts: list[Prompt] = make(Encoder(tokenizer), task.file, length, samples, seed, **told)
    assert len(prompts) == samples
    assert all(len(prompt.input_ids) == length or (shorter and not kind.exact) for prompt in prompts)
    return [replace(prompt, task=task.name) for prompt in prompts]


def per_context(task: str | Task) -> int:
    """How many prompts of a task share a context: so many are a whole one, and cost little more than one of them."""
    task = parse_task(task) if isinstance(task, str) else task
    known = {parameter.name for parameter in KINDS[task.kind].parameters}
    return int(dict(task.parameters).get("questions", 8)) if "questions" in known else 1


def digest(prompts: Sequence[Prompt]) -> str:
    """sha256 over the ids, the answers and where these are asked for, in hexadecimal."""
    content = [[list(p.input_ids), p.answer, *([p.turn, p.scored] if p.turn or p.scored else [])] for p in prompts]
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()
