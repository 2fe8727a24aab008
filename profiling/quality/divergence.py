"""How far a cache leads decode away from one that keeps everything: divergence and loss on forced tokens.

Shapes: F forced tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from profiling.progress import bar
from profiling.prompts.prompt import Prompt


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


@torch.no_grad()
def forced_log_probs(model: Any, cache: Any, prompt: Prompt, forced: int) -> Tensor:
    """log p of every token (F, V) fp32 where the prompt's last `forced` tokens are decoded one by one after a prefill.

    Row i is the prediction of the i-th of them.
    """
    ids = torch.tensor([prompt.input_ids], device=model.device)
    start = ids.shape[1] - forced
    rows = [model(ids[:, :start], past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]]
    for at in bar(range(start, ids.shape[1] - 1), desc="forced decode"):
        rows.append(model(ids[:, at : at + 1], past_key_values=cache, use_cache=True).logits[0, -1])
    return torch.stack(rows).float().log_softmax(-1)


def divergence(
    model: Any, full: Callable[[], Any], method: Callable[[], Any], prompt: Prompt, forced: int
) -> Divergence:
    """A method's divergence from `full` on a prompt; both make a cache and are called under what serves it."""
    expected = forced_log_probs(model, full(), prompt, forced)
    tokens = torch.tensor(prompt.input_ids[-forced:], device=expected.device)[:, None]
    found = forced_log_probs(model, method(), prompt, forced)
    return Divergence(
        kl=(expected.exp() * (expected - found)).sum(-1).cpu().numpy(),
        loss=-found.gather(1, tokens)[:, 0].cpu().numpy(),
        full_loss=-expected.gather(1, tokens)[:, 0].cpu().numpy(),
    )
