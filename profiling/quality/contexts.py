"""Prompts prefilled under whatever is applied to a model; a shared context is prefilled once.

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
from runtime.devices import execution_device

# Tokens after a prefill that are fed at a time: so few that the runtime attends densely.
TURN_CHUNK = 16


def by_context(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Group the numbers of prompts by context, in the order of each context's first prompt."""
    groups: dict[Ids, list[int]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault(prompt.context, []).append(number)
    return list(groups.values())


def spread_positions(length: int, count: int) -> Tensor:
    """Choose `count` positions, at most, spread over a context of `length` tokens.

    The last one is none of them: a later turn follows it, or an answer, which counts for itself.
    """
    last = length - 1
    return torch.linspace(0, last - 1, min(count, last), dtype=torch.float32, device="cpu").long()


@torch.no_grad()
def fed(model: Any, ids: Ids, cache: Any) -> Tensor:
    """Feed ids that follow the cached tokens, densely; return the logits (N, V) after each."""
    tokens = torch.tensor([ids], device=execution_device(model), dtype=torch.long)
    rows = [
        model(chunk, past_key_values=cache, use_cache=True).logits[0]
        for chunk in tokens.split(TURN_CHUNK, dim=1)
    ]
    return torch.cat(rows)


class Prefilled(NamedTuple):
    """A prompt that was prefilled.

    Attributes:
        number: which of the prompts.
        cache: its own, which holds all of it.
        scored: logits (N, V) before each token of its answer spans.
        spread: logits (P, V) at spread_positions of its context.
        last: logits (V) after its last token.
    """

    number: int
    cache: Any
    scored: Tensor
    spread: Tensor
    last: Tensor


@torch.no_grad()
def prefilled(
    model: Any,
    prompts: Sequence[Prompt],
    *,
    cache: Callable[[], Any] | None = None,
    spread: int = 0,
) -> Iterator[Prefilled]:
    """Prefill prompts in the order of by_context; each continues a copy of its context's cache.

    Args:
        model: a causal model with logits_to_keep, with whatever is applied to it.
        prompts: of any lengths.
        cache: makes the cache of a context; the model's own if None.
        spread: how many positions of a context to return the logits of, at most.
    """
    for numbers in by_context(prompts):
        context = prompts[numbers[0]].context
        positions = [_before_scored(prompts[number]) for number in numbers]
        positions.append(spread_positions(len(context), spread).tolist())
        logit_positions = [*chain.from_iterable(positions), len(context) - 1]
        if cache:
            past = cache()
        else:
            past = None
        logits, held = _prefill(model, context, logit_positions, past)
        rows = logits.split([*map(len, positions), 1])
        for number, scored in zip(numbers, rows, strict=False):
            if number == numbers[-1]:
                own = held
            else:
                own = copy.deepcopy(held)
            last = rows[-1][0]
            if turn := prompts[number].input_ids[len(context) :]:
                last = fed(model, turn, own)[-1]
            yield Prefilled(number, own, scored, rows[-2], last)


def _prefill(
    model: Any, context: Ids, logit_positions: list[int], cache: Any
) -> tuple[Tensor, Any]:
    """Prefill a context; return the logits (N, V) at `logit_positions`, and the cache."""
    ids = torch.tensor([context], device=execution_device(model), dtype=torch.long)
    positions = torch.tensor(logit_positions, device=execution_device(model), dtype=torch.long)
    output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=positions)
    return output.logits[0], output.past_key_values


def _before_scored(prompt: Prompt) -> list[int]:
    """Positions that predict the tokens of a prompt's answer spans."""
    return [at for start, stop in prompt.scored for at in range(start - 1, stop - 1)]
