"""The answers of prompts under teacher forcing, one by one: what trials are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from profiling.prompts.prompt import Prompt
from profiling.quality.answers import ends, new_tokens
from profiling.quality.contexts import fed, prefilled
from profiling.quality.forced import ForcedAnswer, answer_ids, asks, forced, scored_answers
from profiling.quality.method import Method
from profiling.quality.trials import trials


@torch.no_grad()
def forced_answers(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt]
) -> list[tuple[ForcedAnswer, ...]]:
    """Answers of each prompt: those of its `scored` ranges, then the one after its end."""
    rights = [answer_ids(tokenizer, p) if asks(p) or not p.scored else () for p in prompts]
    found: dict[int, tuple[ForcedAnswer, ...]] = {}
    for one in prefilled(model, prompts):
        right = rights[one.number]
        found[one.number] = scored_answers(prompts[one.number], one)
        if right:
            after = [fed(model, right[:-1], one.cache)] if right[1:] else []
            found[one.number] += (forced(torch.cat([one.last[None], *after]), right),)
    return [found[number] for number in range(len(prompts))]


def trial(model: Any, tokenizer: Any, prompt: Prompt, method: Method) -> dict[str, Any]:
    """Run one trial of a prompt under a method that is applied to the model."""
    return next(trials(model, tokenizer, [prompt], method))[1]


def generated(
    model: Any, tokenizer: Any, prompt: Prompt, cache: Callable[[], Any] | None = None
) -> str:
    """The greedy answer by transformers' own generation."""
    ids = torch.tensor([prompt.input_ids], device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens(tokenizer, prompt),
        do_sample=False,
        past_key_values=cache() if cache else None,
        pad_token_id=0,
        eos_token_id=list(ends(model, tokenizer)),
    )
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)).strip()
