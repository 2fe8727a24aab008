"""Prompts out of texts that no search has looked at: what an artifact was made by says little of what it is worth."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from profiling.prompts.prompt import Prompt, Task, make_prompts, parse_task

# Made anew from a file or a text by every seed, and so possibly out of what a search has seen.
_OF_TEXTS = ("text", "prose", "jsonl", "infinitebench", "longbench", "ruler")
# Prompts that share so many tokens in a row say the same.
_ALIKE = 64
# Seeds of searches that differ by little must not meet.
SEED = 1_000_003
_ROUNDS = 8


def of_texts(task: str | Task) -> bool:
    """Whether prompts of the task come out of a text or a file, where those of other seeds may overlap them."""
    return (parse_task(task) if isinstance(task, str) else task).kind in _OF_TEXTS


class Pieces:
    """Tokens in a row by which prompts are known again."""

    def __init__(self, prompts: Iterable[Prompt] = ()) -> None:
        self._known: set[tuple[int, ...]] = set()
        for prompt in prompts:
            self.add(prompt)

    def add(self, prompt: Prompt) -> None:
        ids = prompt.input_ids
        self._known |= {ids[start : start + _ALIKE] for start in range(0, len(ids) - _ALIKE + 1, _ALIKE)}

    def overlaps(self, prompt: Prompt) -> bool:
        """Whether a prompt has tokens in a row with one of them in common."""
        ids = prompt.input_ids
        return any(ids[start : start + _ALIKE] in self._known for start in range(len(ids) - _ALIKE + 1))


def told_overlap(task: str, length: int, overlapping: int, samples: int) -> str:
    """That some prompts of a task, told by its name, were seen: in a sentence."""
    return (
        f"{overlapping} of {samples} prompts of {task} at {length} tokens overlap what the search looked at: take a "
        "longer text, or fewer samples"
    )


class Unseen(NamedTuple):
    """prompts: as many as were asked for. overlapping: how many of them the searches have seen, for want of others."""

    prompts: list[Prompt]
    overlapping: int


def unseen_prompts(
    task: str | Task,
    tokenizer: Any,
    *,
    length: int,
    samples: int,
    seed: int,
    seen: Pieces,
    shorter: bool = False,
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
    taken = Pieces(chosen)
    for apart in (True, False):
        for prompt in others:
            if len(chosen) < samples and prompt not in chosen and not (apart and taken.overlaps(prompt)):
                chosen.append(prompt)
                taken.add(prompt)
    known = [prompt for prompt in first if prompt not in chosen][: samples - len(chosen)]
    return Unseen(chosen + known, len(known))
