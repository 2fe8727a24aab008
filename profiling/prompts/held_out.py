"""Prompts that a search has not seen: of its tasks, from seeds of their own, and out of other parts of texts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from artifacts import Artifact, HeadwiseError
from profiling.prompts.prompt import Prompt, make_prompts, parse_task
from profiling.prompts.unseen import SEED, Pieces, of_texts

# Sets that a search may come to judge by, one after the other.
SETS = 3
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
        tasks: as profiling.prompts.prompt.parse_task reads them.
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


def seen_by_searches(artifacts: Sequence[Artifact], tasks: Sequence[str], tokenizer: Any) -> list[Prompt]:
    """The prompts out of texts that searches looked at, of those among these tasks that they were given.

    Those of calibration, and the first that were held out: by them a search with one budget for the model chooses.
    """
    found: list[Prompt] = []
    for artifact in artifacts:
        search = artifact.search
        if search is None:
            continue
        calibration, seed = search.calibration, search.seed
        for task in dict.fromkeys(tasks):
            if parse_task(task).name not in calibration.tasks or not of_texts(task):
                continue
            how: dict[str, Any] = {"samples": calibration.samples, "seed": seed}
            seen = [p for length in calibration.lengths for p in make_prompts(task, tokenizer, length=length, **how)]
            if search.allocation == "model":
                longest = max(calibration.lengths)
                # A text that was too short for that is none that the search was made with.
                with suppress(HeadwiseError):
                    seen += held_out([task], tokenizer, length=longest, **how, seen=seen)
            found += seen
    return found
