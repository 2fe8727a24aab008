"""One prompt under dense attention: its trial, and transformers' own answer and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from profiling.prompts.prompt import Prompt
from profiling.quality.answers import ends, new_tokens
from profiling.quality.forced import answer_ids, negative_log_likelihood
from profiling.quality.method import Method
from profiling.quality.trials import trials

DENSE = Method(
    name="dense", make=lambda: None, density=1.0, kept=1.0, identity="dense", evicts=False, sizes=""
)


def trial(model: Any, tokenizer: Any, prompt: Prompt, method: Method = DENSE) -> dict[str, Any]:
    """Run one trial of a prompt under a method that is applied to the model."""
    return next(trials(model, tokenizer, [prompt], method))[1]


def answer_losses(model: Any, tokenizer: Any, prompt: Prompt) -> Tensor:
    """-log p of each token of the right answer, by one pass over the prompt and the answer."""
    right = answer_ids(tokenizer, prompt)
    losses = negative_log_likelihood(model, Prompt(prompt.input_ids + right, None))
    return losses[-len(right) :]


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
