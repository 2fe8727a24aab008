"""Prompts that a search has not seen: of its tasks, from seeds of their own, and out of other parts of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from artifacts import Artifact, HeadwiseError
from profiling.prompts import Prompt, make_prompts, parse_task

SEED = 1_000_003
# Made anew from a file or a text by every seed, and so possibly out of what a search has seen.
_OF_TEXTS = ("text", "prose", "jsonl", "infinitebench", "longbench", "ruler")
_SEEDS = 40
# Prompts that share so many tokens in a row say the same.
_ALIKE = 64


def held_out(
    tasks: Sequence[str], tokenizer: Any, *, length: int, samples: int, seed: int, seen: Sequence[Prompt]
) -> list[Prompt]:
    """Prompts of the tasks that no search with that seed looks at.

    Args:
        tasks: as profiling.prompts.parse_task reads them.
        tokenizer: the model's.
        length: in tokens.
        samples: prompts of each task.
        seed: the search's.
        seen: the prompts that the search looked at.

    Raises:
        HeadwiseError: a text is too short to have anything left that was not seen.
    """
    known = _pieces(seen)
    found: list[Prompt] = []
    for task in dict.fromkeys(tasks):
        for turn in range(_SEEDS):
            # Seeds of searches that differ by little must not meet.
            made = make_prompts(task, tokenizer, length=length, samples=samples, seed=seed + SEED * (1 + turn))
            if parse_task(task).kind not in _OF_TEXTS or not any(_overlaps(prompt, known) for prompt in made):
                found += made
                break
        else:
            raise HeadwiseError(
                f"{parse_task(task).name} is too short to hold prompts out: {samples} x {length} tokens that no search "
                "looks at are needed; take a longer text (text:FILE), a shorter --length or fewer --samples"
            )
    return found


def seen_by_search(artifact: Artifact, tasks: Sequence[str], tokenizer: Any) -> list[Prompt]:
    """The prompts of an artifact's search, of those among these tasks that it looked at."""
    if artifact.search is None:
        return []
    calibration, seed = artifact.search.calibration, artifact.search.seed
    known = [task for task in dict.fromkeys(tasks) if parse_task(task).name in calibration.tasks]
    return [
        prompt
        for task in known
        if parse_task(task).kind in _OF_TEXTS
        for length in calibration.lengths
        for prompt in make_prompts(task, tokenizer, length=length, samples=calibration.samples, seed=seed)
    ]


def _pieces(prompts: Sequence[Prompt]) -> set[tuple[int, ...]]:
    """Every _ALIKE tokens of the prompts, one after the other."""
    return {
        prompt.input_ids[start : start + _ALIKE]
        for prompt in prompts
        for start in range(0, len(prompt.input_ids) - _ALIKE + 1, _ALIKE)
    }


def _overlaps(prompt: Prompt, known: set[tuple[int, ...]]) -> bool:
    ids = prompt.input_ids
    return any(ids[start : start + _ALIKE] in known for start in range(len(ids) - _ALIKE + 1))
