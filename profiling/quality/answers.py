"""Greedy answers of a model under whatever is applied to it.

Shapes: A answer length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from profiling.finite import not_finite
from profiling.prompts.metrics import is_final, score
from profiling.prompts.prompt import Prompt
from profiling.prompts.tokens import Ids
from profiling.quality.contexts import Prefilled, prefilled
from runtime.devices import execution_device

# Tokens that an answer may have beyond the right one's.
_EXTRA = 2


def answer(
    model: Any, tokenizer: Any, prompt: Prompt, *, cache: Callable[[], Any] | None = None
) -> str:
    """Answer one prompt greedily.

    Args:
        model: a causal model, with whatever is applied to it.
        tokenizer: of the model.
        prompt: the prompt to answer.
        cache: makes the cache; transformers' own if None.
    """
    (start,) = prefilled(model, [prompt], cache=cache)
    limit = new_tokens(tokenizer, prompt)
    output, _ = decoded(model, tokenizer, prompt, start, limit, ends(model, tokenizer))
    return text_of(tokenizer, output)


@torch.no_grad()
def decoded(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    start: Prefilled,
    limit: int,
    stops: set[int],
    right: Ids = (),
) -> tuple[list[int], Tensor | None]:
    """Decode greedily and, in a second sequence, feed the right answer (teacher forcing).

    Both continue from the prefill and share its cache, which is used up.

    Returns:
        The model's own tokens, `limit` at most, up to one of `stops` or to where the answer's score
        is final; and the logits (A, V) before each token of the right answer, None without one.

    Raises:
        HeadwiseError: a logit is NaN.
    """

    def ended() -> bool:
        if not output:
            return limit == 0
        if len(output) >= limit or output[-1] in stops:
            return True
        return is_final(prompt, text_of(tokenizer, output))

    cache = start.cache
    logits = start.last[None]
    if bool(logits.isnan().any()):
        raise not_finite(f"{prompt.task}: logits after the prompt are", model)
    if right:
        cache.batch_repeat_interleave(2)
        logits = logits.expand(2, -1)
    output: list[int] = []
    forced: list[Tensor] = []
    is_ended = ended()
    while True:
        if not is_ended:
            output.append(int(logits[0].argmax()))
            is_ended = ended()
        if len(forced) < len(right):
            forced.append(logits[1])
        if is_ended and len(forced) == len(right):
            break
        tokens = [[output[-1]]]
        if right:
            tokens.append([right[len(forced) - 1]])
        ids = torch.tensor(tokens, device=execution_device(model), dtype=torch.long)
        logits = model(ids, past_key_values=cache, use_cache=True).logits[:, -1]
    if right:
        stacked = torch.stack(forced)
    else:
        stacked = None
    return output, stacked


def text_of(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Decode an answer's tokens to its text."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
    return text.strip()


def new_tokens(tokenizer: Any, prompt: Prompt) -> int:
    """Limit of an answer in tokens: the task's, or a few more than the right answer's."""
    if prompt.new_tokens:
        return prompt.new_tokens
    right = tokenizer(prompt.answer or "", add_special_tokens=False)["input_ids"]
    return len(right) + _EXTRA


def ends(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end an answer."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if not isinstance(configured, list):
        configured = [configured]
    return {token for token in (*configured, tokenizer.eos_token_id) if token is not None}


def is_right(prompt: Prompt, text: str) -> bool:
    """True if an answer is fully right by the metric of its task; False where none is known."""
    return prompt.answer is not None and score(prompt, text) == 1
