"""Quality of a model under whatever attention is applied to it: perplexity and answers.

Shapes: S prompt length, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tqdm import tqdm

from profiling.prompts import Prompt

# Logits turned to fp32 at once: V is large and the whole prompt's would be the biggest tensor of all.
_ROWS = 512


@torch.no_grad()
def negative_log_likelihood(model: Any, prompt: Prompt) -> torch.Tensor:
    """-log p of each token of the prompt given those before it, (S - 1) fp32, in one prefill."""
    ids = torch.tensor([prompt.input_ids], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    targets = ids[0, 1:]
    return torch.cat(
        [
            torch.nn.functional.cross_entropy(rows.float(), expected, reduction="none")
            for rows, expected in zip(logits.split(_ROWS), targets.split(_ROWS), strict=True)
        ]
    )


def perplexity(model: Any, prompts: Sequence[Prompt]) -> float:
    """exp of the mean negative log-likelihood over all tokens of all prompts."""
    return math.exp(torch.cat([negative_log_likelihood(model, prompt) for prompt in prompts]).mean().item())


@torch.no_grad()
def answer(
    model: Any, tokenizer: Any, prompt: Prompt, *, extra_tokens: int = 2, cache: Callable[[], Any] | None = None
) -> str:
    """The model's greedy continuation, as many tokens as the expected answer has and a few more.

    `cache` makes the cache to decode with; transformers' own if None.
    """
    ids = torch.tensor([prompt.input_ids], device=model.device)
    wanted = len(tokenizer(prompt.answer or "", add_special_tokens=False)["input_ids"])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=wanted + extra_tokens,
        do_sample=False,
        past_key_values=cache() if cache else None,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    text: str = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return text.strip()


def is_right(prompt: Prompt, given: str) -> bool:
    """Whether a continuation begins with the expected answer; one of several finds names them all in their order."""
    if prompt.answer is None or len(prompt.finds) < 2:
        return prompt.answer is not None and given.startswith(prompt.answer.strip())
    wanted = ".*?".join(re.escape(find.expected.strip()) for find in prompt.finds)
    return re.match(wanted, given, re.DOTALL) is not None


def answers(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], *, label: str, cache: Callable[[], Any] | None = None
) -> list[str]:
    """The greedy answers to all prompts, with progress; each with a cache of its own, as `answer` says."""
    turns = tqdm(prompts, desc=label, disable=None, leave=False)
    return [answer(model, tokenizer, prompt, cache=cache) for prompt in turns]
