"""The prompts of a search: to calibrate on, and held out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from artifacts import HeadwiseError, ModelInfo
from artifacts.schema.search import MAX_WINDOWS
from profiling.models.loading import LoadedModel
from profiling.progress import announce
from profiling.prompts.held_out import Seen, held_out
from profiling.prompts.kind import LengthTooShort
from profiling.prompts.prompt import (
    CALIBRATED_TASKS,
    GATE_TASKS,
    Prompt,
    Task,
    distinct,
    fewer_sentences,
    make_prompts,
    per_context,
)
from search.model.config import ModelSearch
from search.model.proof import KINDS, LOOKS, Kind

# The longest default length: beyond it a search takes long.
_LONGEST = 8192


def length_of(config: ModelSearch, model: ModelInfo) -> int:
    """The prompts' length in tokens.

    Raises:
        HeadwiseError: it is beyond the model's positions, or not beyond the dense tail.
    """
    length = config.length or min(_LONGEST, model.max_positions)
    if not config.beyond_positions:
        check_positions(length, model)
    config.check_tail(length)
    return length


def check_positions(length: int, model: ModelInfo, *, strict: bool = False) -> None:
    """Raise HeadwiseError where a length is beyond the model's positions.

    Args:
        length: of a prompt, in tokens.
        model: with the number of positions.
        strict: True if the command has no --beyond-positions.
    """
    if length > model.max_positions:
        option = ", or pass --beyond-positions to exceed the trained length"
        if strict:
            option = ""
        raise HeadwiseError(
            f"--length {length} is more than the {model.max_positions} positions of {model.name}; "
            f"choose a shorter one{option}"
        )


def calibration_prompts(config: ModelSearch, loaded: LoadedModel, length: int) -> list[Prompt]:
    """The calibration prompts.

    Raises:
        HeadwiseError: the length is too short for a task.
    """

    def make(tokens: int) -> list[Prompt]:
        return whole_contexts(
            config.tasks, loaded, length=tokens, samples=config.samples, seed=config.seed
        )

    return _made(make, length, "calibration", by_default=config.tasks == CALIBRATED_TASKS)


def whole_contexts(
    tasks: Iterable[Task], loaded: LoadedModel, *, length: int, samples: int, seed: int
) -> list[Prompt]:
    """`samples` contexts of each task, each task once, with all questions that share one."""
    return [
        prompt
        for task in distinct(tasks)
        for prompt in make_prompts(
            task, loaded.tokenizer, length=length, samples=samples * per_context(task), seed=seed
        )
    ]


class NoMoreText(HeadwiseError):
    """A round of held-out prompts cannot be made: the text of a task has none left."""


class HeldOut:
    """Held-out prompts, batch by batch, each unlike those before and those of the search.

    Contexts and windows are the units of the intervals. Of a text that is too short a batch has
    half as many windows, a quarter, or none.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        loaded: LoadedModel,
        *,
        length: int,
        samples: int,
        seed: int,
        seen: Seen,
        first: int = 0,
    ) -> None:
        """Prepare; the first batch of texts is made at once, to refuse one that is too short.

        Args:
            tasks: of the prompts.
            loaded: the model.
            length: of a prompt, in tokens.
            samples: the factor of all counts.
            seed: of the search.
            seen: windows that the search has seen; those of the batches are added.
            first: number of the first batch; batches of other numbers have other seeds.

        Raises:
            HeadwiseError: the length is too short for a task, or a text for the length; or two
                tasks have one name.
        """
        self.tasks = distinct(tasks)
        self._loaded = loaded
        self._options: dict[str, Any] = {"length": length, "seed": seed}
        self._seen = seen
        self._samples = samples
        self._numbers = count(first)
        self._first = {kind: self._make(kind, LOOKS[0], required=True) for kind in KINDS}

    def announce(self) -> None:
        """Announce each task whose text has fewer contexts than the first look takes."""
        for task in self.tasks:
            samples = LOOKS[0] * self._samples * per_context(task)
            length = self._options["length"]
            announce_fewer([task], self.first, length=length, samples=samples)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of the tasks."""
        return tuple(kind for kind in KINDS if any(_kind_of(task) == kind for task in self.tasks))

    @property
    def first(self) -> list[Prompt]:
        """The first prompts of all kinds, before any was taken."""
        return [prompt for prompts in self._first.values() for prompt in prompts]

    def take(self, kind: Kind, contexts: int, *, every: bool = False) -> list[Prompt]:
        """Make prompts of the tasks of a kind; empty where there is none, or no more text.

        Args:
            kind: of the tasks.
            contexts: number of contexts of each task, or of windows of each text.
            every: True if each task must have some, as at the first look of a round.

        Raises:
            NoMoreText: one of the tasks has none, with `every`.
        """
        prompts = self._first.pop(kind, None)
        if prompts is None:
            prompts = self._make(kind, contexts, required=False, every=every)
        return prompts

    def _make(
        self, kind: Kind, contexts: int, *, required: bool, every: bool = False
    ) -> list[Prompt]:
        number = next(self._numbers)

        def make(tokens: int) -> list[Prompt]:
            options = {**self._options, "length": tokens, "number": number, "seen": self._seen}
            prompts = []
            for task in self.tasks:
                if _kind_of(task) == kind:
                    samples = contexts * self._samples
                    batch = self._batch(task, samples, options, required=required)
                    if every and not batch:
                        raise NoMoreText(
                            f"{task.name} has no text left that the search has not seen; take a "
                            "longer text"
                        )
                    prompts += batch
            return prompts

        by_default = self.tasks == GATE_TASKS
        prompts = _made(make, self._options["length"], "held-out", by_default=by_default)
        windows = self._seen.windows(prompts)
        if windows > MAX_WINDOWS:
            if required:
                raise HeadwiseError(
                    f"the prompts are {windows:,} windows of 64 tokens, and an artifact lists at "
                    f"most {MAX_WINDOWS:,} that its search has seen: take fewer --samples or a "
                    "shorter --length"
                )
            if every:
                raise NoMoreText(
                    f"an artifact lists at most {MAX_WINDOWS:,} windows that its search has seen, "
                    "which are used up; take fewer --samples or a shorter --length"
                )
            return []
        self._seen.add(*prompts)
        return prompts

    def _batch(
        self, task: Task, contexts: int, options: Mapping[str, Any], *, required: bool
    ) -> list[Prompt]:
        """The prompts of a task: as many contexts as asked for, or as its text has.

        Raises:
            HeadwiseError: there is none, and one is required.
        """
        tokenizer = self._loaded.tokenizer
        fault: HeadwiseError | None = None
        while contexts:
            try:
                return held_out((task,), tokenizer, samples=contexts, **options)
            except LengthTooShort:
                raise
            except HeadwiseError as error:
                if not task.has_text:
                    raise
                fault = error
            contexts //= 2
        if required and fault is not None:
            raise fault
        return []


def _kind_of(task: Task) -> Kind:
    """The kind of loss that a task measures."""
    if task.kind in ("text", "prose"):
        return "text"
    return "answer"


def announce_fewer(
    tasks: Iterable[Task], prompts: Sequence[Prompt], *, length: int, samples: int
) -> None:
    """Announce each task whose text has fewer prompts than `samples`."""
    for task in dict.fromkeys(tasks):
        for line in fewer_sentences([task], prompts, length=length, samples=samples):
            announce(line)


def _made(
    make: Callable[[int], list[Prompt]], length: int, which: str, *, by_default: bool
) -> list[Prompt]:
    """Make prompts of a length; for default tasks the error names a length that is enough.

    It names no task, for the user did not ask for these by name.
    """
    try:
        return make(length)
    except LengthTooShort:
        if not by_default:
            raise
    enough = 1 << length.bit_length()
    while not _fits(make, enough):
        enough *= 2
    raise HeadwiseError(
        f"--length {length} is too short for the {which} prompts; {enough} is enough"
    )


def _fits(make: Callable[[int], list[Prompt]], length: int) -> bool:
    try:
        make(length)
    except LengthTooShort:
        return False
    return True
