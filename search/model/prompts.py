"""The prompts of a search: to calibrate on, and held out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from artifacts import HeadwiseError, ModelInfo
from artifacts.schema.search import MAX_WINDOWS
from profiling.models.loading import LoadedModel
from profiling.progress import announce
from profiling.prompts.held_out import GATE_SET, Seen, held_out
from profiling.prompts.kind import LengthTooShort
from profiling.prompts.prompt import (
    CALIBRATED_TASKS,
    GATE_TASKS,
    Prompt,
    fewer_sentences,
    make_prompts,
    parse_task,
    per_context,
)
from search.model.acceptance import ROUNDS
from search.model.config import ModelSearch
from search.model.losses import CONTEXTS

# The longest default length: beyond it a search takes long.
_LONGEST = 8192


def length_of(config: ModelSearch, model: ModelInfo) -> int:
    """The prompts' length in tokens.

    Raises:
        HeadwiseError: it is beyond the model's positions.
    """
    length = config.length or min(_LONGEST, model.max_positions)
    if not config.beyond_positions:
        check_positions(length, model)
    return length


def check_positions(length: int, model: ModelInfo) -> None:
    """Raise HeadwiseError where a length is beyond the model's positions."""
    if length > model.max_positions:
        raise HeadwiseError(
            f"--length {length} is more than the {model.max_positions} positions of {model.name}; "
            "choose a shorter one, or pass --beyond-positions to exceed the trained length"
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
    tasks: Iterable[str], loaded: LoadedModel, *, length: int, samples: int, seed: int
) -> list[Prompt]:
    """`samples` contexts of each task, each task once, with all questions that share one."""
    return [
        prompt
        for task in dict.fromkeys(tasks)
        for prompt in make_prompts(
            task, loaded.tokenizer, length=length, samples=samples * per_context(task), seed=seed
        )
    ]


def held_out_prompts(
    tasks: Iterable[str],
    loaded: LoadedModel,
    *,
    length: int,
    samples: int,
    seed: int,
    seen: Seen,
    number: int,
) -> list[Prompt]:
    """Held-out prompts: four contexts of each task for each sample, two windows of a text.

    Contexts are the units of the intervals, so there are more of them than are calibrated on. Of a
    file that is too short there are half as many, or one. Sets of other numbers differ.

    Raises:
        HeadwiseError: the length is too short for a task, or a text for the length.
    """
    names = tuple(dict.fromkeys(tasks))

    def make(tokens: int) -> list[Prompt]:
        options: dict[str, Any] = {"length": tokens, "seed": seed, "seen": seen, "number": number}
        prompts = []
        for task in names:
            times = _times(task)
            if parse_task(task).has_text:
                while times > 1 and not _has(task, loaded, samples=times * samples, **options):
                    times //= 2
            prompts += held_out((task,), loaded.tokenizer, samples=samples * times, **options)
        return prompts

    return _made(make, length, "held-out", by_default=names == GATE_TASKS)


def _times(task: str) -> int:
    """Held-out contexts of a task for each sample, if its text is long enough."""
    if parse_task(task).kind in ("text", "prose"):
        return 2
    return CONTEXTS


def announce_fewer(
    tasks: Iterable[str], prompts: Sequence[Prompt], *, length: int, samples: int, held_out: bool
) -> None:
    """Announce each task whose text has fewer prompts than were asked for.

    Args:
        tasks: of the prompts.
        prompts: to calibrate on, or held out.
        length: of the prompts.
        samples: see ModelSearch.
        held_out: whether the prompts are held out.
    """
    for task in dict.fromkeys(tasks):
        wanted = samples
        if held_out:
            wanted *= _times(task)
        for line in fewer_sentences([task], prompts, length=length, samples=wanted):
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


def _has(task: str, loaded: LoadedModel, **options: Any) -> bool:
    """True if the task's file is long enough for these held-out prompts."""
    try:
        held_out((task,), loaded.tokenizer, **options)
    except HeadwiseError:
        return False
    return True


def held_out_sets(
    config: ModelSearch, loaded: LoadedModel, length: int, seen: Seen
) -> Iterator[list[Prompt]]:
    """Yield held-out sets of prompts, each unlike those before, as far as texts reach.

    A set that is taken is added to `seen`.

    Raises:
        HeadwiseError: a text has none at all, or an artifact cannot list all windows.
    """
    for number in range(ROUNDS + 1):
        if number == GATE_SET:
            continue
        try:
            prompts = held_out_prompts(
                config.held_out_tasks,
                loaded,
                length=length,
                samples=config.samples,
                seed=config.seed,
                seen=seen,
                number=number,
            )
        except HeadwiseError:
            if not number:
                raise
            return
        windows = seen.windows(prompts)
        if windows > MAX_WINDOWS:
            if number:
                return
            raise HeadwiseError(
                f"the prompts are {windows:,} windows of 64 tokens, and an artifact lists at most "
                f"{MAX_WINDOWS:,} that its search has seen: take fewer --samples or a shorter "
                "--length"
            )
        seen.add(*prompts)
        yield prompts
