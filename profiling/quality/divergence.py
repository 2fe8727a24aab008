"""How far a cache leads decode away from one that keeps everything: divergence and loss on forced tokens.

Shapes: F forced tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from profiling.prompts.prompt import Prompt


@dataclass(frozen=True, eq=False, kw_only=True)
class Divergence:
    """Of each forced token, prompt by prompt (prompts * F): KL(full || cache) in nats, and the loss of each of them."""

    kl: np.ndarray
    loss: np.ndarray
    full_loss: np.ndarray

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
    for at in tqdm(range(start, ids.shape[1] - 1), desc="forced decode", disable=None, leave=False):
        rows.append(model(ids[:, at : at + 1], past_key_values=cache, use_cache=True).logits[0, -1])
    return torch.stack(rows).float().log_softmax(-1)


def divergences(
    model: Any,
    full: Callable[[], Any],
    methods: Sequence[Callable[[], Any]],
    prompts: Sequence[Prompt],
    forced: int,
) -> list[Divergence]:
    """Each method's divergence from `full`; all of them make a cache and are called under what serves it."""
    kl: list[list[Tensor]] = [[] for _ in methods]
    loss: list[list[Tensor]] = [[] for _ in methods]
    full_loss = []
    for prompt in prompts:
        expected = forced_log_probs(model, full(), prompt, forced)
        tokens = torch.tensor(prompt.input_ids[-forced:], device=expected.device)[:, None]
        full_loss.append(-expected.gather(1, tokens)[:, 0])
        for at, method in enumerate(methods):
            found = forced_log_probs(model, method(), prompt, forced)
            kl[at].append((expected.exp() * (expected - found)).sum(-1))
            loss[at].append(-found.gather(1, tokens)[:, 0])
    whole = torch.cat(full_loss).cpu().numpy()
    return [
        Divergence(kl=torch.cat(k).cpu().numpy(), loss=torch.cat(one).cpu().numpy(), full_loss=whole)
        for k, one in zip(kl, loss, strict=True)
    ]
