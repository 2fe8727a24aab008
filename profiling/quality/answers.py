"""Quality of a model under whatever attention is applied to it: perplexity and greedy answers.

Shapes: S prompt length, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from profiling.progress import bar
from profiling.prompts.metrics import score
from profiling.prompts.prompt import Prompt
from profiling.quality.contexts import prefilled

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


def answer(
    model: Any, tokenizer: Any, prompt: Prompt, *, extra_tokens: int = 2, cache: Callable[[], Any] | None = None
) -> str:
    """The model's greedy continuation: as many tokens as the task allows, or as the expected answer has and a few more.

    `cache` makes the cache to decode with; transformers' own if None.
    """
    return answers(model, tokenizer, [prompt], label="", extra_tokens=extra_tokens, cache=cache)[0]


@torch.no_grad()
def answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    label: str,
    extra_tokens: int = 2,
    cache: Callable[[], Any] | None = None,
) -> list[str]:
    """The greedy answers to all prompts, with progress; each has a cache of its own, a shared context one prefill."""
    # Generation feeds the last token of a later turn itself.
    later = {number: prompt for number, prompt in enumerate(prompts) if prompt.turn}
    before = [replace(p, input_ids=p.input_ids[:-1], turn=p.turn - 1) for p in later.values()]
    turns = [(number, None) for number in range(len(prompts)) if number not in later]
    held = ((list(later)[one.number], one.cache) for one in prefilled(model, before, cache=cache))
    found: dict[int, str] = {}
    for number, own in bar(chain(turns, held), desc=label, total=len(prompts)):
        made = own if own is not None or cache is None else cache()
        found[number] = _generated(model, tokenizer, prompts[number], extra_tokens, made)
    return [found[number] for number in range(len(prompts))]


def _generated(model: Any, tokenizer: Any, prompt: Prompt, extra_tokens: int, cache: Any) -> str:
    ids = torch.tensor([prompt.input_ids], device=model.device)
    wanted = len(tokenizer(prompt.answer or "", add_special_tokens=False)["input_ids"])
    limit = max(prompt.new_tokens or 0, wanted + extra_tokens)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=limit,
        do_sample=False,
        past_key_values=cache,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    text: str = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return text.strip()


def is_right(prompt: Prompt, given: str) -> bool:
    """Whether an answer is fully right by the metric of its task; none is where no answer is known."""
    return prompt.answer is not None and score(prompt, given) == 1
