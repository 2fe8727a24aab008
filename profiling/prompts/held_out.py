"""Prompts that a search has not seen: the one mechanism by which everything that judges is kept from what chose.

Generated prompts of another seed are other prompts. Texts are another matter: their windows may overlap, so what has
been seen is remembered by digests of its tokens, in the artifact too; renamed and edited files stay honest.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from artifacts import HeadwiseError, seen_windows
from profiling.prompts.prompt import Prompt, Task, make_prompts, parse_task, per_context

if TYPE_CHECKING:
    from artifacts.sidecar import Array

# Made anew from a file or a text by every seed, and so possibly out of what a search has seen.
_OF_TEXTS = ("text", "prose", "jsonl", "infinitebench", "longbench", "ruler")
# Prompts that share so many tokens in a row say the same.
_ALIKE = 64
# Seeds of searches that differ by little must not meet.
SEED = 1_000_003
# Sets of prompts: of calibration, then held-out ones, each unlike those before. `search.gate` takes the last.
SETS = 4
_SEEDS, _ROUNDS = 40, 8


def of_texts(task: str | Task) -> bool:
    """Whether prompts of the task come out of a text or a file, where those of other seeds may overlap them."""
    return (parse_task(task) if isinstance(task, str) else task).kind in _OF_TEXTS


class Seen:
    """Windows of 64 tokens by which prompts are known again."""

    def __init__(self, prompts: Iterable[Prompt] = (), *, digests: Iterable[str] = ()) -> None:
        self._known = set(map(bytes.fromhex, digests))
        self.add(*prompts)

    @classmethod
    def by(cls, artifacts: Iterable[Mapping[str, Array]]) -> Seen:
        """What the searches of some artifacts have seen, by the arrays of their sidecars."""
        return cls(digests={digest for arrays in artifacts for digest in seen_windows(arrays)})

    @property
    def digests(self) -> list[str]:
        """64 hex digits each, in order."""
        return sorted(digest.hex() for digest in self._known)

    def add(self, *prompts: Prompt) -> None:
        for prompt in prompts:
            self._known.update(_windows(prompt, _ALIKE))

    def overlaps(self, prompt: Prompt) -> bool:
        """Whether a prompt has tokens in a row with one of them in common."""
        return bool(self._known) and any(digest in self._known for digest in _windows(prompt, 1))


def _windows(prompt: Prompt, step: int) -> Iterator[bytes]:
    """The digests of a prompt's windows, one in every `step` tokens."""
    ids = array("i", prompt.input_ids)
    data, size = ids.tobytes(), ids.itemsize
    ends = range(_ALIKE * size, len(data) + 1, step * size)
    return (hashlib.sha256(data[end - _ALIKE * size : end]).digest() for end in ends)


def told_overlap(task: str, length: int, overlapping: int, samples: int) -> str:
    """That some prompts of a task, told by its name, were seen: in a sentence."""
    return (
        f"{overlapping} of {samples} prompts of {task} at {length} tokens overlap what the search looked at: take a "
        "longer text, or fewer samples"
    )


def held_out(
    tasks: Sequence[str], tokenizer: Any, *, length: int, samples: int, seed: int, seen: Seen, number: int = 0
) -> list[Prompt]:
    """Prompts of the tasks that nothing has seen.

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
    found: list[Prompt] = []
    for task in dict.fromkeys(tasks):
        for turn in range(_SEEDS):
            at = seed + SEED * (1 + number * _SEEDS + turn)
            made = make_prompts(task, tokenizer, length=length, samples=samples * per_context(task), seed=at)
            if not of_texts(task) or not any(map(seen.overlaps, made)):
                found += made
                break
        else:
            raise HeadwiseError(
                f"{parse_task(task).name} is too short to hold prompts out: {samples} x {length} tokens that no search "
                "looks at are needed; take a longer text (text:FILE), a shorter --length or fewer --samples"
            )
    return found


class Unseen(NamedTuple):
    """prompts: as many as were asked for. overlapping: how many of them the searches have seen, for want of others."""

    prompts: list[Prompt]
    overlapping: int


def unseen_prompts(
    task: str | Task, tokenizer: Any, *, length: int, samples: int, seed: int, seen: Seen, shorter: bool = False
) -> Unseen:
    """Prompts as make_prompts makes them, with others in place of those that searches have seen.

    What replaces them is apart from the rest where the text is long enough for that.
    """

    def made(turn: int) -> list[Prompt]:
        at = seed + SEED * turn
        return make_prompts(task, tokenizer, length=length, samples=samples, seed=at, shorter=shorter)

    first = made(0)
    if not of_texts(task):
        return Unseen(first, 0)
    chosen = [prompt for prompt in first if not seen.overlaps(prompt)]
    if len(chosen) == samples:
        return Unseen(chosen, 0)
    others = [prompt for turn in range(1, _ROUNDS) for prompt in made(turn) if not seen.overlaps(prompt)]
    taken = Seen(chosen)
    for apart in (True, False):
        for prompt in others:
            if len(chosen) < samples and prompt not in chosen and not (apart and taken.overlaps(prompt)):
                chosen.append(prompt)
                taken.add(prompt)
    known = [prompt for prompt in first if prompt not in chosen][: samples - len(chosen)]
    return Unseen(chosen + known, len(known))


def seeded_prompts(
    task: str | Task,
    tokenizer: Any,
    *,
    length: int,
    samples: int,
    seeds: Sequence[int],
    seen: Seen,
    shorter: bool = False,
) -> Unseen:
    """As unseen_prompts makes them, as many of each seed; a text's windows of one seed are none of those before."""
    known, found = Seen(digests=seen.digests), list[Unseen]()
    for seed in seeds:
        how: dict[str, Any] = {"length": length, "samples": samples, "seed": seed, "shorter": shorter}
        found.append(unseen_prompts(task, tokenizer, seen=known, **how))
        if of_texts(task) and len(seeds) > 1:
            known.add(*found[-1].prompts)
    prompts = [prompt for made in found for prompt in made.prompts]
    return Unseen(prompts, sum(map(seen.overlaps, prompts)) if of_texts(task) else 0)
