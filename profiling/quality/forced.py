"""Right answers under teacher forcing: the loss of each of their tokens, and whether all of them
are the likeliest.

Shapes: A answer length, V vocabulary.
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

# Choices that are compared of those that a prompt has, the right one among them.
CHOICES = 8


@dataclass(frozen=True, kw_only=True)
class ForcedAnswer:
    """One answer, each token after the right ones before it.

    nll: -log p of each token, in nats.
    hits: whether each was the likeliest.
    """

    nll: tuple[float, ...]
    hits: tuple[bool, ...]

    @property
    def right(self) -> bool:
        """Whether every token was the likeliest: the greedy answer then begins with this one, found
        in one forward."""
        return all(self.hits)

    @property
    def mean(self) -> float:
        """-log p of a token of it on average, in nats."""
        return math.fsum(self.nll) / len(self.nll)

    @property
    def token_accuracy(self) -> float:
        """The share of its tokens that were the likeliest."""
        return sum(self.hits) / len(self.hits)


def scored_answers(prompt: Prompt, start: Prefilled) -> tuple[ForcedAnswer, ...]:
    """What a prefill made of the prompt's `scored` ranges."""
    sizes = [stop - first for first, stop in prompt.scored]
    rows = start.scored.split(sizes) if sizes else ()
    spans = zip(prompt.scored, rows, strict=True)
    return tuple(forced(some, prompt.context[first:stop]) for (first, stop), some in spans)


def forced(logits: Tensor, right: Ids) -> ForcedAnswer:
    """An answer of A ids from the logits (A, V) before each of them."""
    targets = torch.tensor(right, device=logits.device)
    losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    return ForcedAnswer(
        nll=tuple(losses.tolist()), hits=tuple((logits.argmax(-1) == targets).tolist())
    )


def answer_ids(tokenizer: Any, prompt: Prompt) -> Ids:
    """The ids of the right answer as they follow the prompt's: tokenizers differ on what the start
    of a text is."""
    text = prompt.continuation
    before = tokenizer.decode(prompt.input_ids[-1:])[-1:]
    if text is None or not text.strip():
        raise HeadwiseError("a prompt without an answer has none to compare with")
    if before.isspace():
        text = text.lstrip()
    encode = Encoder(tokenizer)
    anchor, whole = encode.each([before, before + text])
    return whole[len(anchor) :] if before and whole[: len(anchor)] == anchor else encode(text)


def asks(prompt: Prompt) -> bool:
    """Whether a prompt says an answer that follows its end."""
    return bool((prompt.continuation or "").strip())


def compared(prompt: Prompt) -> tuple[str, ...]:
    """The answers that a forced choice compares, in the prompt's order: the right one and CHOICES -
    1 at most.

    None where the right one is not among its choices.
    """
    if prompt.answer not in prompt.choices:
        return ()
    wrong = [choice for choice in prompt.choices if choice != prompt.answer][: CHOICES - 1]
    return tuple(choice for choice in prompt.choices if choice == prompt.answer or choice in wrong)
