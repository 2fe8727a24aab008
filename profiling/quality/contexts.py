"""Prompts prefilled under whatever is applied to a model: a shared context once, and what comes
after it densely.

Shapes: N new tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from profiling.prompts.prompt import Prompt
from profiling.prompts.tokens import Ids

# What is fed after a prefill comes in pieces so small that the runtime takes none for a chunk of a
# long prompt.
PIECE = 16


def by_context(prompts: Sequence[Prompt]) -> list[list[int]]:
    """The numbers of the prompts, those with the same context together, in the order of each one's
    first."""
    found: dict[Ids, list[int]] = {}
    for number, prompt in enumerate(prompts):
        found.setdefault(prompt.context, []).append(number)
    return list(found.values())


@torch.no_grad()
def fed(model: Any, ids: Ids, cache: Any) -> Tensor:
    """Logits (N, V) after each of some ids that follow what the cache holds, with dense
    attention."""
    parts = [ids[at : at + PIECE] for at in range(0, len(ids), PIECE)]
    rows = [_logits(model, part, cache) for part in parts]
    return torch.cat(rows)


def _logits(model: Any, ids: Ids, cache: Any) -> Tensor:
    found: Tensor = model(
        torch.tensor([ids], device=model.device), past_key_values=cache, use_cache=True
    ).logits[0]
    return found


class Prefilled(NamedTuple):
    """A prompt that was prefilled.

    number: which of the prompts.
    cache: its own, which holds all of it.
    scored: logits (N, V) before each token of its `scored` ranges.
    last: logits (V) after its last token.
    """

    number: int
    cache: Any
    scored: Tensor
    last: Tensor


@torch.no_grad()
def prefilled(
    model: Any, prompts: Sequence[Prompt], *, cache: Callable[[], Any] | None = None
) -> Iterator[Prefilled]:
    """Prefill prompts, a context that several share once: each goes on from a copy of its cache.

    They come in the order of by_context.

    Args:
        model: a causal model with logits_to_keep, with whatever is applied to it.
        prompts: of any lengths.
        cache: makes the cache of a context; the model's own if None.
    """
    for numbers in by_context(prompts):
        context = prompts[numbers[0]].context
        places = [scored_places(prompts[number]) for number in numbers]
        kept = torch.tensor([*chain.from_iterable(places), len(context) - 1], device=model.device)
        ids = torch.tensor([context], device=model.device)
        output = model(
            ids, past_key_values=cache() if cache else None, use_cache=True, logits_to_keep=kept
        )
        held = output.past_key_values
        rows = output.logits[0].split([*map(len, places), 1])
        for number, scored in zip(numbers, rows, strict=False):
            own = held if number == numbers[-1] else copy.deepcopy(held)
            turn = prompts[number].input_ids[len(context) :]
            yield Prefilled(number, own, scored, fed(model, turn, own)[-1] if turn else rows[-1][0])


def scored_places(prompt: Prompt) -> list[int]:
    """The tokens after each of which one of a `scored` range comes."""
    return [at for start, stop in prompt.scored for at in range(start - 1, stop - 1)]
