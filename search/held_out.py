"""Prompts that a search has not seen: of its tasks, from seeds of their own, and out of other parts of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from artifacts import HeadwiseError
from profiling.prompts import Prompt, make_prompts, parse_task
from profiling.unseen import SEED, Pieces, of_texts

_SEEDS = 40


def held_out(
    tasks: Sequence[str],
    tokenizer: Any,
    *,
    length: int,
    samples: int,
    seed: int,
    seen: Sequence[Prompt],
    number: int = 0,
) -> list[Prompt]:
    """Prompts of the tasks that no search with that seed looks at.

    Args:
        tasks: as profiling.prompts.parse_task reads them.
        tokenizer: the model's.
        length: in tokens.
        samples: prompts of each task.
        seed: the search's.
        seen: the prompts that the search looked at.
        number: of the set; sets of other numbers have other prompts, but for windows of a text that may overlap.

    Raises:
        HeadwiseError: a text is too short to have anything left that was not seen.
    """
    known = Pieces(seen)
    found: list[Prompt] = []
    for task in dict.fromkeys(tasks):
        for turn in range(_SEEDS):
            at = seed + SEED * (1 + number * _SEEDS + turn)
            made = make_prompts(task, tokenizer, length=length, samples=samples, seed=at)
            if not of_texts(task) or not any(map(known.overlaps, made)):
                found += made
                break
        else:
            raise HeadwiseError(
                f"{parse_task(task).name} is too short to hold prompts out: {samples} x {length} tokens that no search "
                "looks at are needed; take a longer text (text:FILE), a shorter --length or fewer --samples"
            )
    return found
