"""One prompt under one method: the greedy answer and how near the right one was, or how well a text
was foreseen.

Shapes: S prompt length, A answer length, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from profiling.prompts.metrics import score
from profiling.prompts.prompt import Prompt
from profiling.prompts.texts import far_copies
from profiling.quality.answers import ends, negative_log_likelihood, new_tokens
from profiling.quality.contexts import Prefilled, fed, prefilled
from profiling.quality.forced import answer_ids, asks, compared, forced, scored_answers
from profiling.quality.forced_decode import begin, forced_losses
from profiling.quality.method import Method

# Tokens of a text whose loss is kept as one number.
BLOCK = 256
# Last tokens of a text that are decoded one by one under caches that drop or choose.
FORCED = 128
# Tokens that copy something far back which a text must have for their loss to be a figure.
_COPIES = 8
# Raised where the same prompt under the same method would give another record.
VERSION = 5


def trials(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], method: Method
) -> Iterator[tuple[int, dict[str, Any]]]:
    """What the method, which has to be applied to the model, makes of prompts: the number of each,
    and plain data.

    Contexts that prompts share are prefilled once.
    """
    asked = [number for number, prompt in enumerate(prompts) if _asks(prompt)]
    some = [prompts[number] for number in asked]
    for one in prefilled(model, some, cache=lambda: method.cache(model)):
        yield asked[one.number], answered(model, tokenizer, some[one.number], one)
    for number, prompt in enumerate(prompts):
        if not _asks(prompt):
            yield number, foreseen(model, prompt, method)


def _asks(prompt: Prompt) -> bool:
    return prompt.answer is not None or bool(prompt.references or prompt.scored)


@torch.no_grad()
def answered(model: Any, tokenizer: Any, prompt: Prompt, start: Prefilled) -> dict[str, Any]:
    """The greedy answer and its score, and, where right answers are known, how near the model was
    to them.

    Two sequences go on from the prefill side by side: the model's own choices, and, where it is
    known, the right answer's tokens, each after the right ones before it (teacher forcing). A
    prompt with `scored` ranges has the share of these that are right for its score, and their
    means; what follows its end is left out. Where a prompt has wrong answers beside the right one,
    `choice` is whether this is the likeliest of them, a token on average."""
    if prompt.scored:
        inside = scored_answers(prompt, start)
        return {
            "text": "",
            "score": _mean([one.right for one in inside]),
            "token_accuracy": _mean([one.token_accuracy for one in inside]),
            "nll": _mean([one.mean for one in inside]),
        }
    cache = start.cache
    logits = start.last[None]
    right = answer_ids(tokenizer, prompt) if asks(prompt) else ()
    wrong = wrong_answers(model, tokenizer, prompt, start) if right else []
    limit = new_tokens(tokenizer, prompt)
    stops = ends(model, tokenizer)
    if right:
        cache.batch_repeat_interleave(2)
        logits = logits.expand(2, -1)
    given: list[int] = []
    losses: list[float] = []
    hits: list[bool] = []
    while True:
        step = logits.float()
        best = step.argmax(-1)
        if len(losses) < len(right):
            expected = right[len(losses)]
            losses.append(-float(step[1].log_softmax(-1)[expected]))
            hits.append(int(best[1]) == expected)
        if len(given) < limit and not (given and given[-1] in stops):
            given.append(int(best[0]))
        ended = len(given) >= limit or given[-1] in stops
        if ended and len(losses) >= len(right):
            break
        forced = [[right[len(losses) - 1]]] if right else []
        tokens = torch.tensor([[given[-1]], *forced], device=model.device)
        logits = model(tokens, past_key_values=cache, use_cache=True).logits[:, -1]
    text = tokenizer.decode(given, skip_special_tokens=True).strip()
    return {
        "text": text,
        "score": score(prompt, text),
        "token_accuracy": _mean(hits) if hits else None,
        "nll": _mean(losses) if losses else None,
        "choice": float(_mean(losses) < min(wrong)) if wrong else None,
    }


def wrong_answers(model: Any, tokenizer: Any, prompt: Prompt, start: Prefilled) -> list[float]:
    """-log p of a token, on average, of each wrong answer among a prompt's choices; the prefill's
    cache stays."""
    found = []
    for choice in [choice for choice in compared(prompt) if choice != prompt.answer]:
        ids = answer_ids(tokenizer, replace(prompt, answer=choice, finds=()))
        after = [fed(model, ids[:-1], copy.deepcopy(start.cache))] if ids[1:] else []
        found.append(forced(torch.cat([start.last[None], *after]), ids).mean)
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@torch.no_grad()
def foreseen(model: Any, prompt: Prompt, method: Method) -> dict[str, Any]:
    """-log p of a text's tokens: of its blocks in one prefill, its last FORCED tokens, and its
    copies from far back.

    Under a cache of its own a method decodes the last ones one by one, for what such a cache does
    shows in decode only; the others are None."""
    forced = min(FORCED, len(prompt.input_ids) // 2)
    if method.evicts:
        losses = forced_losses(
            model, begin(model, lambda: method.cache(model), [prompt], forced), forced
        )
        return {"blocks": None, "forced": float(losses.mean()), "copies": None}
    losses = negative_log_likelihood(model, prompt)
    return {
        "blocks": _means(losses),
        "forced": float(losses[-forced:].mean()),
        "copies": _copies_of(losses, prompt),
    }


def _copies_of(losses: Tensor, prompt: Prompt) -> float | None:
    """The mean loss of a text's tokens that copy something far back, of (S - 1) losses; None where
    these are few."""
    copied = [at - 1 for at in far_copies(prompt.input_ids)]
    return float(losses[copied].mean()) if len(copied) >= _COPIES else None


def _means(losses: Tensor) -> list[float]:
    """The mean of each whole block; what is left at the end belongs to the last."""
    blocks = max(1, len(losses) // BLOCK)
    edges = [at * BLOCK for at in range(blocks)] + [len(losses)]
    return [float(losses[a:b].mean()) for a, b in pairwise(edges)]
