"""Trials: one prompt under one method, as its greedy answer or as the loss of a text.

Shapes: S prompt length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from profiling.prompts.metrics import score
from profiling.prompts.prompt import Prompt
from profiling.prompts.tokens import Ids
from profiling.quality.answers import decoded, ends, new_tokens, text_of
from profiling.quality.contexts import Prefilled, prefilled, spread_positions
from profiling.quality.forced import (
    answer_ids,
    forced,
    has_answer,
    scored_answers,
    text_logits,
    token_losses,
)
from profiling.quality.forced_decode import forced_losses, prefill_texts
from profiling.quality.method import Method
from profiling.quality.sequences import log_probabilities
from runtime.devices import execution_device

# Tokens of a block of a text; the last block has the remainder too.
BLOCK = 256
# Last tokens of a text that are decoded one by one under caches that drop or choose.
FORCED = 128
# Positions of a context whose predictions are compared with dense attention's.
POSITIONS = 64
# Increment if the same prompt under the same method would yield another record.
VERSION = 8


class Trial(NamedTuple):
    """One prompt under one method.

    Attributes:
        number: of the prompt.
        record: measurements as plain data.
        log_probs: log-probabilities (P, V) at POSITIONS positions of its context; None where the
            method's cache evicts.
    """

    number: int
    record: dict[str, Any]
    log_probs: Tensor | None


def trials(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], method: Method
) -> Iterator[Trial]:
    """Run prompts under a method that is applied to the model."""
    questions = [number for number, prompt in enumerate(prompts) if _is_question(prompt)]
    selected = [prompts[number] for number in questions]
    starts = prefilled(model, selected, cache=lambda: method.cache(model), spread=POSITIONS)
    for start in starts:
        record = _answered(model, tokenizer, selected[start.number], start)
        log_probs = None
        if not method.evicts:
            log_probs = log_probabilities(start.spread)
        yield Trial(questions[start.number], record, log_probs)
    for number, prompt in enumerate(prompts):
        if not _is_question(prompt):
            yield Trial(number, *_text_losses(model, prompt, method))


@torch.no_grad()
def context_log_probs(model: Any, context: Ids) -> Tensor:
    """Compute a trial's log-probabilities (P, V) alone, in one prefill of the context."""
    positions = spread_positions(len(context), POSITIONS).to(execution_device(model))
    ids = torch.tensor([context], device=execution_device(model), dtype=torch.long)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=positions).logits[0]
    return log_probabilities(logits)


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
    if has_answer(prompt):
        right = answer_ids(tokenizer, prompt)
    else:
        right = ()
    limit = new_tokens(tokenizer, prompt)
    token_ids, logits = decoded(
        model, tokenizer, prompt, start, limit, ends(model, tokenizer), right
    )
    text = text_of(tokenizer, token_ids)
    record = {"text": text, "score": score(prompt, text)}
    if logits is None:
        return record | {"token_accuracy": None, "nll": None}
    fit = forced(logits, right)
    return record | {"token_accuracy": fit.token_accuracy, "nll": fit.mean}


def _text_losses(
    model: Any, prompt: Prompt, method: Method
) -> tuple[dict[str, Any], Tensor | None]:
    """Compute -log p of a text: means of blocks, and of the last FORCED tokens.

    Under a method that evicts the last tokens are decoded one by one, which alone shows what such
    a cache does; blocks, their numbers of tokens and log-probabilities are None.
    """
    last = min(FORCED, len(prompt.input_ids) // 2)
    if method.evicts:
        texts = prefill_texts(model, lambda: method.cache(model), [prompt], last)
        losses = forced_losses(model, texts, last)
        return {"blocks": None, "block_tokens": None, "forced": float(losses.mean())}, None
    logits = text_logits(model, prompt.input_ids)
    losses = token_losses(
        logits, torch.tensor(prompt.input_ids[1:], device=logits.device, dtype=torch.long)
    )
    blocks = _blocks(losses)
    record = {
        "blocks": [float(block.mean()) for block in blocks],
        "block_tokens": [len(block) for block in blocks],
        "forced": float(losses[-last:].mean()),
    }
    at = spread_positions(len(prompt.input_ids), POSITIONS).to(logits.device)
    return record, log_probabilities(logits[at])


def _blocks(losses: Tensor) -> list[Tensor]:
    """Split (S - 1) losses into whole blocks; the remainder belongs to the last."""
    blocks = max(1, len(losses) // BLOCK)
    edges = [number * BLOCK for number in range(blocks)] + [len(losses)]
    return [losses[start:stop] for start, stop in pairwise(edges)]
