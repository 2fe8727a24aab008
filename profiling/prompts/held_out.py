"""Prompts that a search has not seen, and which prompts are independent of each other.

Evidence is kept apart from calibration here alone.

Generated prompts of another seed are other prompts. Windows of a text may overlap, so the text that
has been seen is remembered by digests of its tokens, in the artifact too: a renamed or edited file
is recognized. Hidden pieces, instructions and questions, which all prompts of a task share, are not
part of the text. Every 64th window of 64 tokens is remembered, so no held-out prompt shares 127
tokens in a row of its text with the seen text.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from artifacts import HeadwiseError, seen_windows
from profiling.prompts.kind import Span
from profiling.prompts.prompt import Prompt, Task, make_prompts, per_context
from profiling.prompts.tokens import Ids, flat

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

# The numbers of the prompts of each unit.
Units = Sequence[Sequence[int]]
# Tokens of a window that is remembered.
_ALIKE = 64
# Seeds of searches that differ by little must not meet.
SEED = 1_000_003
# The number of the first batch of held-out prompts that `headwise gate` takes; no search has as
# many.
GATE_SET = 1000
# Multiples of SEED from one set of held-out prompts to the next.
_STRIDE = 40
# Prompts whose texts share more than this fraction are not independent of each other.
_SHARED = 1 / 8


class Seen:
    """Windows of 64 tokens by which prompts are recognized."""

    def __init__(self, prompts: Iterable[Prompt] = (), *, digests: Iterable[str] = ()) -> None:
        self._known = set(map(bytes.fromhex, digests))
        self.add(*prompts)

    @classmethod
    def by(cls, artifacts: Iterable[Mapping[str, Array]]) -> Seen:
        """Windows that the searches of some artifacts have seen, from their sidecars."""
        return cls(digests={digest for arrays in artifacts for digest in seen_windows(arrays)})

    @property
    def digests(self) -> list[str]:
        """64 hex digits each, in order."""
        return sorted(digest.hex() for digest in self._known)

    def add(self, *prompts: Prompt) -> None:
        """Remember the windows of some prompts."""
        for prompt in prompts:
            self._known.update(_windows(prompt, _ALIKE))

    def windows(self, prompts: Iterable[Prompt]) -> int:
        """Number of windows that are remembered together with those of these prompts."""
        return len(self._known.union(*(_windows(prompt, _ALIKE) for prompt in prompts)))

    def overlaps(self, prompt: Prompt) -> bool:
        """True if a prompt has one of the windows in it, anywhere."""
        return bool(self._known) and any(digest in self._known for digest in _windows(prompt, 1))


def is_seed_of_search(seed: int, searched: int) -> bool:
    """True if a search of seed `searched` has the generated prompts of `seed`, held out or not."""
    return seed >= searched and (seed - searched) % SEED == 0


def text_of(prompt: Prompt) -> Ids:
    """The tokens that other prompts may share: the text of a prompt, or all of a generated one."""
    if not prompt.text_spans:
        return prompt.input_ids
    return flat(prompt.input_ids[start:end] for start, end in prompt.text_spans)


def _windows(prompt: Prompt, step: int) -> Iterator[bytes]:
    """The digests of a prompt's windows, one in every `step` tokens."""
    ids = array("i", text_of(prompt))
    data = ids.tobytes()
    size = ids.itemsize
    ends = range(_ALIKE * size, len(data) + 1, step * size)
    return (hashlib.sha256(data[end - _ALIKE * size : end]).digest() for end in ends)


class Overlap(NamedTuple):
    """Prompts of a task that a search had seen, of `samples` prompts in all."""

    task: str
    length: int
    overlapping: int
    samples: int


def overlap_sentence(overlap: Overlap) -> str:
    """Say that some prompts of a task were seen by the search."""
    return (
        f"{overlap.overlapping} of {overlap.samples} prompts of {overlap.task} at "
        f"{overlap.length} tokens overlap what the search looked at: take a longer text, or fewer "
        "samples"
    )


class Unseen(NamedTuple):
    """Prompts that searches have not seen, as far as there are any.

    Attributes:
        prompts: as many as were asked for, or as many as a text has without overlap.
        overlapping: how many of them the searches have seen.
        seeds: the number of each prompt's seed.
    """

    prompts: list[Prompt]
    overlapping: int
    seeds: tuple[int, ...] = ()


def _prompts_of_text(
    task: Task, tokenizer: Any, *, length: int, samples: int, seed: int
) -> Iterator[Prompt]:
    """Yield all prompts that a text has, the first `samples` at once, then more and more."""
    count = 0
    while True:
        made = make_prompts(task, tokenizer, length=length, samples=samples, seed=seed)
        yield from made[count:]
        if len(made) < samples:
            return
        count = samples
        samples *= 2


def unseen_prompts(
    task: Task,
    tokenizer: Any,
    *,
    length: int,
    samples: int,
    seed: int,
    seen: Seen,
    previous: Collection[Span | None] = (),
) -> Unseen:
    """Make prompts as make_prompts does, of a text those that searches have not seen.

    Args:
        task: its kind, file and parameters.
        tokenizer: the model's.
        length: in tokens.
        samples: number of prompts.
        seed: of the prompts.
        seen: text that searches have seen; it is used only where there is no other.
        previous: cells of the text that have prompts of other seeds.
    """
    options: dict[str, Any] = {"length": length, "samples": samples, "seed": seed}
    if not task.has_text:
        return Unseen(make_prompts(task, tokenizer, **options), 0)
    new: list[Prompt] = []
    known: list[Prompt] = []
    for prompt in _prompts_of_text(task, tokenizer, **options):
        if prompt.cell in previous:
            continue
        if seen.overlaps(prompt):
            known.append(prompt)
        else:
            new.append(prompt)
        if len(new) == samples:
            break
    known = known[: samples - len(new)]
    return Unseen(new + known, len(known))


def held_out(
    tasks: Iterable[Task],
    tokenizer: Any,
    *,
    length: int,
    samples: int,
    seed: int,
    seen: Seen,
    number: int = 0,
) -> list[Prompt]:
    """Make prompts of the tasks that nothing has seen; those of a task share no text.

    Args:
        tasks: each is asked once.
        tokenizer: the model's.
        length: in tokens.
        samples: prompts of each task, or contexts with all questions that share one.
        seed: the search's.
        seen: text that searches have seen.
        number: of the set; sets of other numbers have other seeds.

    Raises:
        HeadwiseError: a text is too short to have anything left that was not seen.
    """
    at = seed + SEED * (1 + number * _STRIDE)
    prompts: list[Prompt] = []
    for task in dict.fromkeys(tasks):
        many = samples * per_context(task)
        options: dict[str, Any] = {"length": length, "samples": many, "seed": at}
        if not task.has_text:
            prompts += make_prompts(task, tokenizer, **options)
            continue
        selected: list[Prompt] = []
        taken = Seen()
        for prompt in _prompts_of_text(task, tokenizer, **options):
            if not seen.overlaps(prompt) and not taken.overlaps(prompt):
                selected.append(prompt)
                taken.add(prompt)
            if len(selected) == many:
                break
        if len(selected) < many:
            raise HeadwiseError(
                f"{task.name} is too short to hold prompts out: {samples} x {length} "
                "tokens that no search looks at are needed; take a longer text, a shorter --length "
                "or fewer --samples"
            )
        prompts += selected
    return prompts


def seeded_prompts(
    task: Task,
    tokenizer: Any,
    *,
    length: int,
    samples: int,
    seeds: Sequence[int],
    seen: Seen,
) -> Unseen:
    """Make unseen prompts of each seed; those of a text are in other cells than those before."""
    previous: set[Span | None] = set()
    by_seed = list[Unseen]()
    for seed in seeds:
        by_seed.append(
            unseen_prompts(
                task,
                tokenizer,
                length=length,
                samples=samples,
                seed=seed,
                seen=seen,
                previous=previous - {None},
            )
        )
        previous.update(prompt.cell for prompt in by_seed[-1].prompts)
    return Unseen(
        [prompt for batch in by_seed for prompt in batch.prompts],
        sum(batch.overlapping for batch in by_seed),
        tuple(number for number, batch in enumerate(by_seed) for _ in batch.prompts),
    )


def units(prompts: Sequence[Prompt]) -> Units:
    """Group prompts into units that are independent of each other, for statistics.

    Prompts of one unit have the same context, or the same text apart from what is hidden in it, or
    texts of which more than _SHARED is the same: other questions on a document, a text that repeats
    itself. So do the contexts of one number of a kind of task, since parameters such as a depth
    change the same prompt. The filler and the instructions that all prompts of a task share are
    part of the task, not of its text.

    Args:
        prompts: of any tasks and files, of one length; those of a task in the order of its seeds.

    Returns:
        The numbers of the prompts of each unit, in the order of their first ones.
    """
    parents = list(range(len(prompts)))

    def root(number: int) -> int:
        while parents[number] != number:
            number = parents[number]
        return number

    def join(one: int, other: int) -> None:
        first, last = sorted((root(one), root(other)))
        parents[last] = first

    def join_equal(keys: Iterable[Hashable]) -> dict[Hashable, int]:
        firsts: dict[Hashable, int] = {}
        for number, key in enumerate(keys):
            join(firsts.setdefault(key, number), number)
        return firsts

    join_equal(prompt.context for prompt in prompts)
    join_equal(_numbered(prompts))
    texts = join_equal(
        text_of(prompt) if prompt.text_spans else number for number, prompt in enumerate(prompts)
    )
    own = {number: prompts[number] for number in texts.values() if prompts[number].text_spans}
    for one, other in _sharing(own):
        join(one, other)
    groups: dict[int, list[int]] = {}
    for number in range(len(prompts)):
        groups.setdefault(root(number), []).append(number)
    return [tuple(group) for group in groups.values()]


def unit_means(values: Sequence[float], groups: Units) -> list[float]:
    """The mean of each unit, of a value for each prompt."""
    return [fmean(values[number] for number in group) for group in groups]


def _numbered(prompts: Iterable[Prompt]) -> Iterator[tuple[str, int]]:
    """Yield each prompt's task without parameters, and the number of its context in its task."""
    contexts: dict[str, dict[Ids, int]] = {}
    for prompt in prompts:
        numbers = contexts.setdefault(prompt.task, {})
        number = numbers.setdefault(prompt.context, len(numbers))
        head, colon, file = prompt.task.partition(":")
        yield head.partition("@")[0] + colon + file, number


def _sharing(prompts: Mapping[int, Prompt]) -> Iterator[tuple[int, int]]:
    """Yield the numbers of each two prompts of which one has more than _SHARED of the other."""
    holders: dict[bytes, list[int]] = {}
    sizes: dict[int, int] = {}
    for number, prompt in prompts.items():
        marks = set(_windows(prompt, _ALIKE))
        sizes[number] = len(marks)
        for mark in marks:
            holders.setdefault(mark, []).append(number)
    for number, prompt in prompts.items():
        shared = Counter(
            other for mark in {*_windows(prompt, 1)} & holders.keys() for other in holders[mark]
        )
        for other, count in shared.items():
            if other != number and count > _SHARED * sizes[other]:
                yield other, number
