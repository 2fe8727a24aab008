"""Texts decoded token by token: losses of the last tokens, divergence from a full cache.

Shapes: T texts, of which B are decoded together, S tokens of each, F forced ones at their end, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from profiling.finite import check_finite
from profiling.progress import bar
from profiling.prompts.prompt import Prompt
from profiling.quality.forced import token_losses
from profiling.quality.sequences import kl_divergence, log_probabilities
from runtime.devices import execution_device

# Texts that are decoded together: a step reads the weights once for all of them.
_TOGETHER = 8


class PrefilledTexts(NamedTuple):
    """Texts (B, S) prefilled but for their forced tokens; logits (B, V) before these."""

    ids: Tensor
    cache: Any
    logits: Tensor


@torch.no_grad()
def prefill_texts(
    model: Any, cache: Callable[[], Any], texts: Sequence[Prompt], forced: int
) -> Iterator[PrefilledTexts]:
    """Prefill texts of one length, several at a time, by the attention that is applied."""
    for start in range(0, len(texts), _TOGETHER):
        together = [text.input_ids for text in texts[start : start + _TOGETHER]]
        ids = torch.tensor(together, device=execution_device(model), dtype=torch.long)
        filled = cache()
        output = model(ids[:, :-forced], past_key_values=filled, use_cache=True, logits_to_keep=1)
        yield PrefilledTexts(ids, filled, output.logits[:, -1])


@torch.no_grad()
def steps(model: Any, prefilled: PrefilledTexts, forced: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each forced token (B) and the logits (B, V) before it; the cache grows."""
    ids, cache, logits = prefilled
    start = ids.shape[1] - forced
    for at in bar(range(start, ids.shape[1]), desc="forced decode"):
        if at > start:
            logits = model(ids[:, at - 1 : at], past_key_values=cache, use_cache=True).logits[:, -1]
        yield ids[:, at], logits


def forced_losses(model: Any, prefilled: Iterable[PrefilledTexts], forced: int) -> Tensor:
    """Compute -log p of the last `forced` tokens of each text (T, F), decoded one by one.

    Args:
        model: the model, with the method applied.
        prefilled: of `prefill_texts`; their caches grow.
        forced: number of tokens.
    """
    losses = []
    for batch in prefilled:
        by_step = [token_losses(logits, tokens) for tokens, logits in steps(model, batch, forced)]
        losses.append(torch.stack(by_step, dim=1))
    return torch.cat(losses)


@dataclass(frozen=True, eq=False, kw_only=True)
class Divergence:
    """Divergence of a cache from a full one at each forced token, prompt by prompt (prompts * F).

    Attributes:
        kl: KL(full || cache) in nats.
        loss, full_loss: -log p of the tokens under each.
    """

    kl: np.ndarray
    loss: np.ndarray
    full_loss: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Join the divergences of several prompts."""
        return cls(
            kl=np.concatenate([part.kl for part in parts]),
            loss=np.concatenate([part.loss for part in parts]),
            full_loss=np.concatenate([part.full_loss for part in parts]),
        )

    @property
    def mean_kl(self) -> float:
        """Mean KL divergence over all tokens, in nats."""
        return float(self.kl.mean())

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the cache over that of the full one."""
        return float(np.exp((self.loss - self.full_loss).mean()))


def divergence(
    model: Any, full: Callable[[], Any], method: Callable[[], Any], prompt: Prompt, forced: int
) -> Divergence:
    """Compute a method's divergence from `full` on a prompt; both make a cache.

    Raises:
        HeadwiseError: a loss is not finite.
    """
    full_texts = next(prefill_texts(model, full, [prompt], forced))
    own_texts = next(prefill_texts(model, method, [prompt], forced))
    rows = []
    for (token, full_logits), (_, own_logits) in zip(
        steps(model, full_texts, forced), steps(model, own_texts, forced), strict=True
    ):
        expected = log_probabilities(full_logits[0])
        log_probs = log_probabilities(own_logits[0])
        kl = kl_divergence(expected, log_probs)
        rows.append(torch.stack((kl, -log_probs[token[0]], -expected[token[0]])))
    kl, loss, full_loss = torch.stack(rows, dim=1).cpu().numpy()
    check_finite(full_loss, f"{prompt.task}: losses of a full cache are", model)
    check_finite((kl, loss), f"{prompt.task}: losses of the cache under its policies are", model)
    return Divergence(kl=kl, loss=loss, full_loss=full_loss)
