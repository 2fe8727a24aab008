"""How far a cache leads decode away from one that keeps everything: divergence and loss on forced tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import torch

from profiling.prompts.prompt import Prompt
from profiling.quality.forced_decode import begin, steps


@dataclass(frozen=True, eq=False, kw_only=True)
class Divergence:
    """Of each forced token, prompt by prompt (prompts * F): KL(full || cache) in nats, and the loss of each of them."""

    kl: np.ndarray
    loss: np.ndarray
    full_loss: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Those of several prompts as one."""
        return cls(**{name: np.concatenate([asdict(part)[name] for part in parts]) for name in asdict(parts[0])})

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
    """A method's divergence from `full` on a prompt; both make a cache and are called under what serves it."""
    both = [steps(model, next(begin(model, cache, [prompt], forced)), forced) for cache in (full, method)]
    rows = [
        torch.stack(((full.exp() * (full - own)).sum(-1)[0], -own[0, token[0]], -full[0, token[0]]))
        for (token, full), (_, own) in zip(*both, strict=True)
    ]
    kl, loss, full_loss = torch.stack(rows, dim=1).cpu().numpy()
    return Divergence(kl=kl, loss=loss, full_loss=full_loss)
