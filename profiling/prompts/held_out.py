"""Prompts that a search has not seen: evidence is kept apart from calibration here alone.

Generated prompts of another seed are other prompts. Texts are another matter: their windows may
overlap, so what has been seen is remembered by digests of its tokens, in the artifact too; renamed
and edited files stay honest. Every 64th window of 64 tokens is, so that nothing that is held out
shares 127 tokens in a row with what was seen.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from artifacts import HeadwiseError, seen_windows
from profiling.prompts.prompt import Prompt, Task, make_prompts, parse_task, per_context

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

# Made anew from a file or a text by every seed, and so possibly out of what a search has seen.
_OF_TEXTS = ("text", "prose", "jsonl")
# A prompt's windows of so many tokens, one after the other, are remembered.
_ALIKE = 64
# Seeds of searches that differ by little must not meet.
SEED = 1_000_003
# The number of the set of held-out prompts that `headwise gate` takes; no search takes it.
GATE_SET = 4
# Seeds by which prompts of a text are sought that were not seen.
_ROUNDS = 40


def of_texts(task: str | Task) -> bool:
    """True if prompts come out of a text or file, where other seeds' may overlap."""
    return (parse_task(task) if isinstance(task, str) else task).kind in _OF_TEXTS


class Seen:
    """Windows of 64 tokens by which prompts are known again."""

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
        for prompt in prompts:
            self._known.update(_windows(prompt, _ALIKE))

    def windows(self, prompts: Iterable[Prompt]) -> int:
        """Number of windows that are remembered together with those of these prompts."""
        return len(self._known.union(*(_windows(prompt, _ALIKE) for prompt in prompts)))

    def overlaps(self, prompt: Prompt) -> bool:
        """True if a prompt has one of the windows in it, anywhere."""
        return bool(self._known) and any(digest in self._known for digest in _windows(prompt, 1))


def _windows(prompt: Prompt, step: int) -> Iterator[bytes]:
    """The digests of a prompt's windows, one in every `step` tokens."""
    ids = array("i", prompt.input_ids)
    data = ids.tobytes()
    size = ids.itemsize
    ends = range(_ALIKE * size, len(data) + 1, step * size)
    return (hashlib.sha256(data[end - _ALIKE * size : end]).digest() for end in ends)


def overlap_sentence(task: str, length: int, overlapping: int, samples: int) -> str:
    """Say that some prompts of a task were seen by the search."""
    return (
        f"{overlapping} of {samples} prompts of {task} at {length} tokens overlap what the search "
        f"looked at: take a "
        "longer text, or fewer samples"
    )


class Unseen(NamedTuple):
    """Prompts, and how many of them the searches have seen for want of others.

    apart: whether those that took the place of others share nothing with the rest.
    """

    prompts: list[Prompt]
    overlapping: int
    apart: bool = True


def unseen_prompts(
    task: str | Task, tokenizer: Any, *, length: int, samples: int, seed: int, seen: Seen
) -> Unseen:
    """Make prompts as make_prompts does, seen ones replaced by those of other seeds.

    What replaces them is apart from the rest where the text is long enough for that.
    """

    def made(turn: int) -> list[Prompt]:
        at = seed + SEED * turn
        return make_prompts(task, tokenizer, length=length, samples=samples, seed=at)

    first = made(0)
    if not of_texts(task):
        return Unseen(first, 0)
    chosen = [prompt for prompt in first if not seen.overlaps(prompt)]
    taken = Seen(chosen)
    near = list[Prompt]()
    replacements = (
        prompt for turn in range(1, _ROUNDS) for prompt in made(turn) if not seen.overlaps(prompt)
    )
    while len(chosen) < samples and (prompt := next(replacements, None)) is not None:
        if taken.overlaps(prompt):
            near.append(prompt)
        else:
            chosen.append(prompt)
            taken.add(prompt)
    apart = len(chosen) == samples
    chosen += [prompt for prompt in dict.fromkeys(near) if prompt not in chosen][
        : samples - len(chosen)
    ]
    known = [prompt for prompt in first if prompt not in chosen][: samples - len(chosen)]
    return Unseen(chosen + known, len(known), apart)


def held_out(
    tasks: Sequence[str],
    tokenizer: Any,
    *,
    length: int,
    samples: int,
    seed: int,
    seen: Seen,
    number: int = 0,
) -> list[Prompt]:
    """Prompts of the tasks that nothing has seen, none of them for want of others.

    Args:
        tasks: as profiling.prompts.prompt.parse_task reads them.
        tokenizer: the model's.
        length: in tokens.
        samples: prompts of each task, or contexts with all questions that share one.
        seed: the search's.
        seen: what was looked at.
        number: of the set; sets of other numbers have other seeds.

    Raises:
        HeadwiseError: a text is too short to have anything left that was not seen.
    """
    at = seed + SEED * (1 + number * _ROUNDS)
    prompts: list[Prompt] = []
    for task in dict.fromkeys(tasks):
        many = samples * per_context(task)
        made = unseen_prompts(task, tokenizer, length=length, samples=many, seed=at, seen=seen)
        if made.overlapping or not made.apart:
            raise HeadwiseError(
                f"{parse_task(task).name} is too short to hold prompts out: {samples} x {length} "
                f"tokens that no search "
                "looks at are needed; take a longer text (text:FILE), a shorter --length or fewer "
                "--samples"
            )
        prompts += made.prompts
    return prompts


def seeded_prompts(
    task: str | Task,
    tokenizer: Any,
    *,
    length: int,
    samples: int,
    seeds: Sequence[int],
    seen: Seen,
) -> Unseen:
    """Make unseen prompts of each seed; a text's windows of one seed are none of another's."""
    known = Seen(digests=seen.digests)
    by_seed = list[Unseen]()
    for seed in seeds:
        by_seed.append(
            unseen_prompts(task, tokenizer, length=length, samples=samples, seed=seed, seen=known)
        )
        if of_texts(task) and len(seeds) > 1:
            known.add(*by_seed[-1].prompts)
    prompts = [prompt for made in by_seed for prompt in made.prompts]
    if of_texts(task):
        overlaps = sum(map(seen.overlaps, prompts))
    else:
        overlaps = 0
    return Unseen(prompts, overlaps)
