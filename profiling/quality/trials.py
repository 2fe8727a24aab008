"""Trials: one prompt under one method, as its greedy answer or as the loss of a text.

Shapes: S prompt length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from profiling.prompts.metrics import score
from profiling.prompts.prompt import Prompt
from profiling.prompts.texts import far_copies
from profiling.quality.answers import decoded, ends, new_tokens, text_of
from profiling.quality.contexts import Prefilled, prefilled
from profiling.quality.forced import (
    answer_ids,
    asks,
    forced,
    negative_log_likelihood,
    scored_answers,
)
from profiling.quality.forced_decode import begin, forced_losses
from profiling.quality.method import Method

# Tokens of a text whose loss is kept as one number.
BLOCK = 256
# Last tokens of a text that are decoded one by one under caches that drop or choose.
FORCED = 128
# Far copies that a text must have for their loss to be a figure.
_COPIES = 8
# Raised where the same prompt under the same method would give another record.
VERSION = 7


def trials(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], method: Method
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Run prompts under a method that is applied to the model; yield numbers and plain records."""
    questions = [number for number, prompt in enumerate(prompts) if _is_question(prompt)]
    asked = [prompts[number] for number in questions]
    for start in prefilled(model, asked, cache=lambda: method.cache(model)):
        yield questions[start.number], _answered(model, tokenizer, asked[start.number], start)
    for number, prompt in enumerate(prompts):
        if not _is_question(prompt):
            yield number, _text_losses(model, prompt, method)


def _is_question(prompt: Prompt) -> bool:
    return prompt.answer is not None or bool(prompt.references or prompt.scored)


def _answered(model: Any, tokenizer: Any, prompt: Prompt, start: Prefilled) -> dict[str, Any]:
    """Score the greedy answer and, where it is known, the right one under teacher forcing.

    A prompt with answer spans is scored by these alone: the fraction that is right, and their
    means.
    """
    if prompt.scored:
        inside = scored_answers(prompt, start)
        return {
            "text": "",
            "score": fmean(answer.right for answer in inside),
            "token_accuracy": fmean(answer.token_accuracy for answer in inside),
            "nll": fmean(answer.mean for answer in inside),
        }
    if asks(prompt):
        right = answer_ids(tokenizer, prompt)
    else:
        right = ()
    limit = new_tokens(tokenizer, prompt)
    given, logits = decoded(model, tokenizer, prompt, start, limit, ends(model, tokenizer), right)
    text = text_of(tokenizer, given)
    record = {"text": text, "score": score(prompt, text)}
    if logits is None:
        return record | {"token_accuracy": None, "nll": None}
    fit = forced(logits, right)
    return record | {"token_accuracy": fit.token_accuracy, "nll": fit.mean}


@torch.no_grad()
def _text_losses(model: Any, prompt: Prompt, method: Method) -> dict[str, Any]:
    """Compute -log p of a text: means of blocks, of the last FORCED tokens, and of far copies.

    Under a method that evicts the last tokens are decoded one by one, which alone shows what such
    a cache does; the others are None.
    """
    last = min(FORCED, len(prompt.input_ids) // 2)
    if method.evicts:
        begun = begin(model, lambda: method.cache(model), [prompt], last)
        losses = forced_losses(model, begun, last)
        return {"blocks": None, "forced": float(losses.mean()), "copies": None}
    losses = negative_log_likelihood(model, prompt)
    # losses[i] is of token i + 1.
    copied = [position - 1 for position in far_copies(prompt.input_ids)]
    if len(copied) >= _COPIES:
        copies = float(losses[copied].mean())
    else:
        copies = None
    return {
        "blocks": _block_means(losses),
        "forced": float(losses[-last:].mean()),
        "copies": copies,
    }


def _block_means(losses: Tensor) -> list[float]:
    """Means of whole blocks of (S - 1) losses; the remainder belongs to the last."""
    blocks = max(1, len(losses) // BLOCK)
    edges = [number * BLOCK for number in range(blocks)] + [len(losses)]
    return [float(losses[start:stop].mean()) for start, stop in pairwise(edges)]
