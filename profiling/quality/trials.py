"""One prompt under one method: the greedy answer and how near the right one was, or how well a text was foreseen.

Shapes: S prompt length, A answer length, V vocabulary.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from profiling.evaluation.methods import Method
from profiling.prompts.metrics import score
from profiling.prompts.prompt import Prompt
from profiling.quality.answers import answer_ids, negative_log_likelihood
from profiling.quality.divergence import forced_log_probs

# Tokens of a text whose loss is kept as one number.
BLOCK = 256
# Last tokens of a text that are decoded one by one under caches that drop or choose.
FORCED = 128
# Tokens that an answer may have beside the right one's.
_EXTRA = 2
# Raised where the same prompt under the same method would give another record.
VERSION = 1


def trial(model: Any, tokenizer: Any, prompt: Prompt, method: Method) -> dict[str, Any]:
    """What the method, which has to be applied to the model, makes of a prompt: plain data for a journal."""
    asks = prompt.answer is not None or prompt.references
    return answered(model, tokenizer, prompt, method) if asks else foreseen(model, prompt, method)


@torch.no_grad()
def answered(model: Any, tokenizer: Any, prompt: Prompt, method: Method) -> dict[str, Any]:
    """The greedy answer and its score, and, where one right answer is known, how near the model was to it.

    The prompt is prefilled once. Then two sequences go on from it side by side: the model's own choices, and, where it
    is known, the right answer's tokens, each after the right ones before it (teacher forcing).
    """
    right = answer_ids(tokenizer, prompt) if (prompt.continuation or "").strip() else ()
    wanted = len(tokenizer(prompt.answer or "", add_special_tokens=False)["input_ids"])
    limit = prompt.new_tokens or wanted + _EXTRA
    ends = _ends(model, tokenizer)
    cache = method.cache(model)
    ids = torch.tensor([prompt.input_ids], device=model.device)
    logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
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
        if len(given) < limit and not (given and given[-1] in ends):
            given.append(int(best[0]))
        ended = len(given) >= limit or given[-1] in ends
        if ended and len(losses) >= len(right):
            break
        forced = [[right[len(losses) - 1]]] if right else []
        tokens = torch.tensor([[given[-1]], *forced], device=model.device)
        logits = model(tokens, past_key_values=cache, use_cache=True).logits[:, -1]
    text = tokenizer.decode(given, skip_special_tokens=True).strip()
    return {
        "text": text,
        "score": score(prompt, text),
        "token_accuracy": sum(hits) / len(hits) if hits else None,
        "nll": sum(losses) / len(losses) if losses else None,
    }


def _ends(model: Any, tokenizer: Any) -> set[int]:
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = configured if isinstance(configured, list) else [configured]
    return {token for token in (*found, tokenizer.eos_token_id) if token is not None}


@torch.no_grad()
def foreseen(model: Any, prompt: Prompt, method: Method) -> dict[str, Any]:
    """-log p of a text's tokens: of its blocks in one prefill, and of its last FORCED tokens.

    Under a cache of its own a method decodes these one by one, for what such a cache does shows in decode only; its
    blocks are None.
    """
    forced = min(FORCED, len(prompt.input_ids) // 2)
    if method.evicts:
        log_probs = forced_log_probs(model, method.cache(model), prompt, forced)
        tokens = torch.tensor(prompt.input_ids[-forced:], device=log_probs.device)[:, None]
        return {"blocks": None, "forced": -float(log_probs.gather(1, tokens).mean())}
    losses = negative_log_likelihood(model, prompt)
    return {"blocks": _means(losses), "forced": float(losses[-forced:].mean())}


def _means(losses: Tensor) -> list[float]:
    """The mean of each whole block; what is left at the end belongs to the last."""
    blocks = max(1, len(losses) // BLOCK)
    edges = [at * BLOCK for at in range(blocks)] + [len(losses)]
    return [float(losses[a:b].mean()) for a, b in pairwise(edges)]
