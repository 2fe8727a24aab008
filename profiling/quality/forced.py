"""Teacher-forced answers: the loss of each token of a right answer, and if it was the likeliest.

Shapes: N tokens, A answer length, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from artifacts import HeadwiseError
from profiling.prompts.prompt import Prompt
from profiling.prompts.tokens import Encoder, Ids
from profiling.quality.contexts import Prefilled
from runtime.devices import execution_device

# Logits turned to fp32 at once: a vocabulary is large.
_ROWS = 128


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute -log p of targets (N) from the logits (N, V) before each of them, (N) fp32."""
    losses = []
    for rows, expected in zip(logits.split(_ROWS), targets.split(_ROWS), strict=True):
        scores = rows.float()
        losses.append(scores.logsumexp(-1) - scores.gather(1, expected[:, None])[:, 0])
    return torch.cat(losses)


@torch.no_grad()
def text_logits(model: Any, ids: Ids) -> Tensor:
    """Compute the logits (S - 1, V) before each of S tokens but the first, in one prefill."""
    tokens = torch.tensor([ids], device=execution_device(model), dtype=torch.long)
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits[0, :-1]
    return logits


@dataclass(frozen=True, kw_only=True)
class ForcedAnswer:
    """One answer, each token after the right ones before it.

    Attributes:
        nll: -log p of each token, in nats.
        hits: True for each that was the likeliest.
    """

    nll: tuple[float, ...]
    hits: tuple[bool, ...]

    @property
    def right(self) -> bool:
        """True if every token was the likeliest: the greedy answer then begins with this one."""
        return all(self.hits)

    @property
    def mean(self) -> float:
        """Mean -log p of a token, in nats."""
        return math.fsum(self.nll) / len(self.nll)

    @property
    def token_accuracy(self) -> float:
        """Fraction of its tokens that were the likeliest."""
        return sum(self.hits) / len(self.hits)


def forced(logits: Tensor, right: Ids) -> ForcedAnswer:
    """Score an answer of A ids by the logits (A, V) before each of them."""
    targets = torch.tensor(right, device=logits.device, dtype=torch.long)
    hits = logits.argmax(-1) == targets
    losses = token_losses(logits, targets)
    return ForcedAnswer(nll=tuple(losses.tolist()), hits=tuple(hits.tolist()))


def scored_answers(prompt: Prompt, start: Prefilled) -> tuple[ForcedAnswer, ...]:
    """Score the answer spans inside a prompt by its prefill."""
    sizes = [stop - first for first, stop in prompt.scored]
    if sizes:
        rows = start.scored.split(sizes)
    else:
        rows = ()
    spans = zip(prompt.scored, rows, strict=True)
    return tuple(forced(logits, prompt.context[first:stop]) for (first, stop), logits in spans)


def answer_ids(tokenizer: Any, prompt: Prompt) -> Ids:
    """Encode the right answer as it follows the prompt; tokenizers differ on a text's start."""
    text = prompt.continuation
    before = tokenizer.decode(prompt.input_ids[-1:])[-1:]
    if text is None or not text.strip():
        raise HeadwiseError("a prompt without an answer has none to compare with")
    if before.isspace():
        text = text.lstrip()
    encode = Encoder(tokenizer)
    anchor, whole = encode.each([before, before + text])
    if before and whole[: len(anchor)] == anchor:
        return whole[len(anchor) :]
    return encode(text)


def has_answer(prompt: Prompt) -> bool:
    """True if the prompt has an answer that follows its end."""
    return bool((prompt.continuation or "").strip())
