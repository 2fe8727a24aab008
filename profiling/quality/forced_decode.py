"""Texts decoded token by token as they stand: what each token loses, and how far a cache leads away
from a full one.

Shapes: T texts, of which B are decoded together, S tokens of each, F forced ones at their end, V
vocabulary."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from profiling.progress import bar
from profiling.prompts.prompt import Prompt
from profiling.quality.answers import negative_log_likelihood
from profiling.quality.sequences import kl_divergence

# Texts that are decoded together: a step reads the weights once for all of them.
_TOGETHER = 8


class Begun(NamedTuple):
    """Texts (B, S) whose cache has all but their forced tokens, and the logits of the first of
    these (B, V)."""

    ids: Tensor
    cache: Any
    logits: Tensor


@torch.no_grad()
def begin(
    model: Any, cache: Callable[[], Any], texts: Sequence[Prompt], forced: int
) -> Iterator[Begun]:
    """Prefill texts of one length, some together, by the attention that is applied."""
    for start in range(0, len(texts), _TOGETHER):
        ids = torch.tensor(
            [text.input_ids for text in texts[start : start + _TOGETHER]], device=model.device
        )
        made = cache()
        first = model(
            ids[:, :-forced], past_key_values=made, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        yield Begun(ids, made, first)


@torch.no_grad()
def steps(model: Any, begun: Begun, forced: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each forced token (B), with log p of every token where it stands (B, V) fp32; the cache takes
    them in."""
    ids, cache, logits = begun
    start = ids.shape[1] - forced
    for at in bar(range(start, ids.shape[1]), desc="forced decode"):
        if at > start:
            logits = model(ids[:, at - 1 : at], past_key_values=cache, use_cache=True).logits[:, -1]
        yield ids[:, at], logits.float().log_softmax(-1)


def forced_losses(model: Any, begun: Iterator[Begun] | Sequence[Begun], forced: int) -> Tensor:
    """-log p of the last `forced` tokens of each text (T, F), decoded one by one.

    begun: of `begin`; if it is a sequence its caches are copied and serve again.
    """
    found = []
    for some in begun:
        own = (
            some._replace(cache=copy.deepcopy(some.cache)) if isinstance(begun, Sequence) else some
        )
        losses = [
            -log_probs.gather(1, tokens[:, None])[:, 0]
            for tokens, log_probs in steps(model, own, forced)
        ]
        found.append(torch.stack(losses, dim=1))
    return torch.cat(found)


def dense_losses(model: Any, texts: Sequence[Prompt], forced: int) -> Tensor:
    """The same by the attention that is applied in one prefill, which is what a cache that keeps
    everything gives."""
    return torch.stack([negative_log_likelihood(model, text)[-forced:] for text in texts])


@dataclass(frozen=True, eq=False, kw_only=True)
class Divergence:
    """Of each forced token, prompt by prompt (prompts * F): KL(full || cache) in nats, and the loss
    of each of them."""

    kl: np.ndarray
    loss: np.ndarray
    full_loss: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Those of several prompts as one."""
        return cls(
            **{
                name: np.concatenate([asdict(part)[name] for part in parts])
                for name in asdict(parts[0])
            }
        )

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean())

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the cache over that of the full one."""
        return float(np.exp((self.loss - self.full_loss).mean()))


def divergence(
    model: Any, full: Callable[[], Any], method: Callable[[], Any], prompt: Prompt, forced: int
) -> Divergence:
    """A method's divergence from `full` on a prompt; both make a cache and are called under what
    serves it."""
    both = [
        steps(model, next(begin(model, cache, [prompt], forced)), forced)
        for cache in (full, method)
    ]
    rows = [
        torch.stack((kl_divergence(full, own)[0], -own[0, token[0]], -full[0, token[0]]))
        for (token, full), (_, own) in zip(*both, strict=True)
    ]
    kl, loss, full_loss = torch.stack(rows, dim=1).cpu().numpy()
    return Divergence(kl=kl, loss=loss, full_loss=full_loss)
