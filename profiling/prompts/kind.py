"""Prompts, requests and kinds of tasks, on which every file of tasks builds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from artifacts import HeadwiseError
from artifacts.errors import shorten
from profiling.prompts.tokens import Encoder, Ids

BEGINS = "whether the generated text begins with the expected answer"
SHARE = "fraction of the expected answers that the generated text contains"
RULER = "RULER, Hsieh et al. 2024"


# A half-open range of token positions.
Span = tuple[int, int]
Metric = Literal["begins", "all"]


class LengthTooShort(HeadwiseError):
    """A length into which a task's prompt does not go."""


@dataclass(frozen=True)
class Evidence:
    """One thing that an answer takes out of the prompt.

    Attributes:
        expected: the text that a right greedy answer has for it, its leading space included.
        span: half-open range of token positions of the block that states it.
        lead: the text between the answer to the part before it and `expected`; empty for the first
            one, for which the prompt's end asks.
    """

    expected: str
    span: Span
    lead: str = ""


@dataclass(frozen=True)
class Prompt:
    """Token ids, special tokens included, with the right answer where it is known.

    Attributes:
        input_ids: all ids of the prompt.
        answer: the right answer; None where there is none or it is unknown.
        evidence: where in the prompt the answer lies, in the order in which it is put together;
            empty where unknown.
        metric: how profiling.prompts.metrics scores an answer; `begins` compares with `answer`.
        references: texts that the metric compares an answer with, if not `answer`.
        new_tokens: how many tokens the task's authors let a model answer with; at least a few more
            than `answer` has.
        turn: how many of the last ids are fed in a later turn. The ids before them, the context,
            are prefilled under the method, which does not see the turn; the turn is fed after it
            with dense attention over the cache. Prompts with the same context share its prefill.
        scored: half-open ranges of the context's tokens that are answers too: the model is asked
            for them inside the prompt, so they measure the method's prefill of the tokens before
            them.
        labels: which kind of answer each scored range is, where a prompt has several kinds.
        text_spans: half-open ranges of the tokens that come from a text, whose windows in other
            prompts may overlap; empty where the prompt is generated. Joined, they are one window of
            the text, without the pieces hidden in it.
        cell: which part of the text that window lies in, by its first and last token; of a file of
            prompts, its line. No other prompt of the same task and seed has it. None where the
            prompt is generated.
        task: the task that made the prompt, as Task.name; empty where it was made by hand.
    """

    input_ids: Ids
    answer: str | None
    evidence: tuple[Evidence, ...] = ()
    metric: Metric = "begins"
    references: tuple[str, ...] = ()
    new_tokens: int | None = None
    turn: int = 0
    scored: tuple[Span, ...] = ()
    labels: tuple[str, ...] = ()
    text_spans: tuple[Span, ...] = ()
    cell: Span | None = None
    task: str = ""

    def __post_init__(self) -> None:
        length = len(self.context)
        if not 0 <= self.turn < max(1, len(self.input_ids)):
            raise ValueError(f"turn must be from 0 to {len(self.input_ids) - 1}, got {self.turn}")
        answers = [*self.references, *(part.expected for part in self.evidence)]
        if self.answer is not None:
            answers.append(self.answer)
        if blank := [each for each in answers if not each.strip()]:
            # Any text begins with it, and contains it.
            raise ValueError(f"an answer must have text, got {blank[0]!r}")
        if wrong := [span for span in self.scored if not 0 < span[0] < span[1] <= length]:
            raise ValueError(f"scored ranges must lie within 1 to {length}, got {wrong[0]}")

    @property
    def context(self) -> Ids:
        """Ids that are prefilled: all but those of a later turn."""
        return self.input_ids[: len(self.input_ids) - self.turn]

    @property
    def continuation(self) -> str | None:
        """The answer as text that continues the prompt, its leading space included."""
        if self.evidence:
            return "".join(part.lead + part.expected for part in self.evidence)
        if self.answer is None:
            return None
        return f" {self.answer}"

    @classmethod
    def answered_by(cls, input_ids: Ids, *evidence: Evidence, **scoring: Any) -> Prompt:
        """Make a prompt whose answer is that of its evidence, one after the other.

        Args:
            input_ids: all ids of the prompt.
            evidence: in the order of the answer.
            scoring: other fields, from `metric` on.
        """
        return cls(
            input_ids,
            "".join(part.lead + part.expected for part in evidence).strip(),
            evidence,
            **scoring,
        )


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to a task's generator: `samples` prompts of `length` tokens each.

    Of a text there are at most as many prompts as it has parts that do not overlap.

    Attributes:
        name: of the kind.
        encode: the tokenizer.
        text: the user's file, where one was given.
        length: of a prompt, in tokens.
        samples: number of prompts.
        seed: of all random numbers.
    """

    name: str
    encode: Encoder
    text: Path | None
    length: int
    samples: int
    seed: int

    @property
    def file(self) -> Path:
        """The file of a task that must have one."""
        assert self.text is not None
        return self.text

    def rng(self, *numbers: int) -> random.Random:
        """Random numbers of this task and seed, others for each prompt or context."""
        return random.Random(" ".join(map(str, (self.seed, self.name, *numbers))))

    def prompts(self, make: Callable[[random.Random], Prompt]) -> list[Prompt]:
        """Make all prompts, each with a separate random generator."""
        return [make(self.rng(number)) for number in range(self.samples)]

    def prompts_in(
        self, cells: Iterable[Span | None], make: Callable[[random.Random, Span | None], Prompt]
    ) -> list[Prompt]:
        """Make a prompt in each cell of a text, at most as many as were asked for."""
        numbered = zip(range(self.samples), cells, strict=False)
        return [make(self.rng(number), cell) for number, cell in numbered]

    def room(self, *parts: Ids) -> int:
        """Tokens left next to the tokenizer's prefix and these parts.

        Raises:
            LengthTooShort: the parts alone take more.
        """
        room = self.length - len(self.encode.prefix) - sum(map(len, parts))
        if room < 0:
            raise self.too_small(f"give at least {self.length - room}")
        return room

    def assemble(
        self, head: Ids, items: Iterable[Ids], question: Ids = ()
    ) -> tuple[Ids, list[Span]]:
        """Join prefix, head, items and question to exactly `length` tokens.

        Args:
            head: before the items.
            items: of at least as many tokens as there is room for; what is too much is cut from
                the start of the first ones.
            question: after the items.

        Returns:
            The ids, and each item's range of positions, which is empty where all of it is cut.
        """
        ids = [*self.encode.prefix, *head]
        listed = list(items)
        cut = len(ids) + sum(map(len, listed)) + len(question) - self.length
        assert cut >= 0, "too few tokens"
        spans = []
        for item in listed:
            gone = min(cut, len(item))
            cut -= gone
            spans.append((len(ids), len(ids) + len(item) - gone))
            ids += item[gone:]
        return (*ids, *question), spans

    def text_spans(self, items: Sequence[Span], hidden: Iterable[Span]) -> tuple[Span, ...]:
        """Return the ranges of the user's text in a prompt.

        Args:
            items: ranges of all items.
            hidden: ranges of those that are hidden in the text.

        Returns:
            The ranges between the hidden ones; none where the haystack is generated.
        """
        if self.text is None:
            return ()
        bounds = [items[0][0], *(at for span in sorted(hidden) for at in span), items[-1][1]]
        return tuple(zip(bounds[::2], bounds[1::2], strict=True))

    def too_short(self, has: int, room: int) -> HeadwiseError:
        """The error of a text that has too few tokens to fill a prompt."""
        prompt = f"{self.name} at length {self.length}"
        return HeadwiseError(
            f"{self.file.name} is too short for {prompt}: it has {has} tokens, {room} are needed"
        )

    def too_small(self, why: str) -> LengthTooShort:
        """The error of a length into which a prompt does not go."""
        return LengthTooShort(f"length {self.length} is too small for {self.name}: {why}")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a task after an @, as in `passkey@depth=0.5`; bounds are included."""

    name: str
    type: type[float] | type[int]
    says: str
    low: float = 0
    high: float = float("inf")

    def read(self, text: str, kind: str) -> float | int:
        """The value that a user wrote; HeadwiseError where it is none."""
        try:
            value = self.type(text)
        except ValueError:
            value = None
        if value is None or not self.low <= float(value) <= self.high:
            if self.type is int:
                number = "a whole number"
            else:
                number = "a number"
            bounds = f"of at least {self.low:g}"
            if self.high < float("inf"):
                bounds = f"from {self.low:g} to {self.high:g}"
            raise HeadwiseError(
                f"{self.name} of the task {kind!r} must be {number} {bounds}, got {shorten(text)}"
            )
        return value


DEPTH = Parameter(
    "depth", float, "position of the fact: 0 is the start, 1 the end (default random)", 0, 1
)
QUESTION_FIRST = Parameter(
    "question_first",
    int,
    "1: the question precedes the text, and the end only refers to it (default 0)",
    0,
    1,
)
QUESTIONS = Parameter("questions", int, "questions that share a context (default 8)", 1, 1000)


Generator = Callable[..., list[Prompt]]
"""Makes the prompts of a request; takes parameters by name."""


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One kind of task: a generator and a metric. docs/tasks.md describes them all.

    Attributes:
        name: the first word of a task.
        make: generates the prompts; called with the request, and by name with the parameters that
            were given.
        asks: the question, in words.
        source: the paper.
        metric: how profiling.prompts.metrics scores the answers.
        scored: the metric in words.
        takes_file: whether a task may or must name a file, out of which its prompts are made.
        has_text: True if the prompts are windows of a built-in text if no file is named.
        parameters: what may follow an @.
    """

    name: str
    make: Generator
    asks: str
    source: str
    metric: Metric = "begins"
    scored: str = BEGINS
    takes_file: Literal["no", "may", "must"] = "no"
    has_text: bool = False
    parameters: tuple[Parameter, ...] = ()

    @property
    def usage(self) -> str:
        """Spelling of the task, such as `passkey[@depth=D][:FILE]`."""
        parameters = ",".join(
            f"{parameter.name}={parameter.name[0].upper()}" for parameter in self.parameters
        )
        file = {"no": "", "may": "[:FILE]", "must": ":FILE"}[self.takes_file]
        if parameters:
            suffix = f"[@{parameters}]"
        else:
            suffix = ""
        return self.name + suffix + file


# By name; profiling.prompts.prompt.KINDS has them all.
REGISTERED: dict[str, TaskSpec] = {}


def task(name: str, **fields: Any) -> Callable[[Generator], Generator]:
    """Register the decorated generator as a kind of task.

    Args:
        name: the first word of a task.
        fields: all others of a TaskSpec.
    """

    def register(make: Generator) -> Generator:
        REGISTERED[name] = TaskSpec(name=name, make=make, **fields)
        return make

    return register
