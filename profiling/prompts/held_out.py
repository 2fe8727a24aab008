"""Prompts that a search has not seen: evidence is kept apart from calibration here alone.

Generated prompts of another seed are other prompts. Windows of a text may overlap, so the text that
has been seen is remembered by digests of its tokens, in the artifact too: a renamed or edited file
is recognized. Hidden pieces, instructions and questions, which all prompts of a task share, are not
part of the text. Every 64th window of 64 tokens is remembered, so no held-out prompt shares 127
tokens in a row of its text with the seen text.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from artifacts import HeadwiseError, seen_windows
from profiling.prompts.prompt import Prompt, Task, make_prompts, parse_task, per_context
from profiling.prompts.tokens import Ids, flat

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

# Tokens of a window that is remembered.
_ALIKE = 64
# Seeds of searches that differ by little must not meet.
SEED = 1_000_003
# The number of the first batch of held-out prompts that `headwise gate` takes; no search has as
# many.
GATE_SET = 1000
# Seeds by which prompts of a text are sought that were not seen.
_ROUNDS = 40


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


def overlap_sentence(task: str, length: int, overlapping: int, samples: int) -> str:
    """Say that some prompts of a task were seen by the search."""
    return (
        f"{overlapping} of {samples} prompts of {task} at {length} tokens overlap what the search "
        "looked at: take a longer text, or fewer samples"
    )


class Unseen(NamedTuple):
    """Prompts that searches have not seen, as far as there are any.

    Attributes:
        prompts: as many as were asked for.
        overlapping: how many of them the searches have seen.
        disjoint: True if those that replace others share nothing with the rest.
    """

    prompts: list[Prompt]
    overlapping: int
    disjoint: bool = True


def unseen_prompts(
    task: str | Task,
    tokenizer: Any,
    *,
    length: int,
    samples: int,
    seed: int,
    seen: Seen,
    previous: Seen | None = None,
) -> Unseen:
    """Make prompts as make_prompts does, seen ones replaced by those of other seeds.

    Args:
        task: as profiling.prompts.prompt.parse_task reads it.
        tokenizer: the model's.
        length: in tokens.
        samples: number of prompts.
        seed: of the first prompts.
        seen: text that searches have seen.
        previous: further text that the prompts must not overlap if the text is long enough.
    """
    if isinstance(task, str):
        task = parse_task(task)

    def made(turn: int) -> list[Prompt]:
        at = seed + SEED * turn
        return make_prompts(task, tokenizer, length=length, samples=samples, seed=at)

    first = made(0)
    if not task.has_text:
        return Unseen(first, 0)
    taken = Seen(digests=previous.digests if previous else ())
    new = [prompt for prompt in first if not seen.overlaps(prompt)]
    selected = [prompt for prompt in new if not taken.overlaps(prompt)]
    near = [prompt for prompt in new if prompt not in selected]
    taken.add(*selected)
    replacements = (
        prompt for turn in range(1, _ROUNDS) for prompt in made(turn) if not seen.overlaps(prompt)
    )
    while len(selected) < samples and (prompt := next(replacements, None)) is not None:
        if taken.overlaps(prompt):
            near.append(prompt)
        else:
            selected.append(prompt)
            taken.add(prompt)
    disjoint = len(selected) == samples
    selected += [prompt for prompt in dict.fromkeys(near) if prompt not in selected][
        : samples - len(selected)
    ]
    repeated = [prompt for prompt in first if prompt not in selected][: samples - len(selected)]
    return Unseen(selected + repeated, len(repeated), disjoint)


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
    """Make prompts of the tasks that nothing has seen.

    Args:
        tasks: as profiling.prompts.prompt.parse_task reads them.
        tokenizer: the model's.
        length: in tokens.
        samples: prompts of each task, or contexts with all questions that share one.
        seed: the search's.
        seen: text that searches have seen.
        number: of the set; sets of other numbers have other seeds.

    Raises:
        HeadwiseError: a text is too short to have anything left that was not seen.
    """
    at = seed + SEED * (1 + number * _ROUNDS)
    prompts: list[Prompt] = []
    for task in dict.fromkeys(tasks):
        many = samples * per_context(task)
        unseen = unseen_prompts(task, tokenizer, length=length, samples=many, seed=at, seen=seen)
        if unseen.overlapping or not unseen.disjoint:
            raise HeadwiseError(
                f"{parse_task(task).name} is too short to hold prompts out: {samples} x {length} "
                "tokens that no search looks at are needed; take a longer text, a shorter --length "
                "or fewer --samples"
            )
        prompts += unseen.prompts
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
    """Make unseen prompts of each seed, of a text disjoint ones where it is long enough."""
    previous = Seen()
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
                previous=previous,
            )
        )
        previous.add(*by_seed[-1].prompts)
    return Unseen(
        [prompt for batch in by_seed for prompt in batch.prompts],
        sum(batch.overlapping for batch in by_seed),
    )
