"""How far attention leads a model's predictions away from dense attention's on whole prompts.

Shapes: P places of a prompt that are looked at, S prompt length, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence, Set
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from artifacts import HeadwiseError
from profiling.prompts.prompt import Prompt

# Dense log-probabilities are held in half precision, so many numbers for a prompt: 128 MiB.
_HELD = 1 << 26
_MOST_PLACES = 512
# Turned to fp32 at once.
_ROWS = 128
# What a model forbids altogether, such as tokens of pictures, has a log-probability that half precision cannot hold.
_LEAST = -1e4


@dataclass(frozen=True, eq=False, kw_only=True)
class Drift:
    """Of each place that was looked at, prompt by prompt: KL(dense || found) in nats, and both losses, NaN at the end.

    Places are spread evenly over a prompt and include its last token.
    """

    kl: np.ndarray
    loss: np.ndarray
    dense_loss: np.ndarray

    @classmethod
    def joined(cls, drifts: Sequence[Self]) -> Self:
        """Of all their prompts, one after the other."""
        return cls(**{f.name: np.concatenate([getattr(one, f.name) for one in drifts]) for f in fields(cls)})

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean())

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity over that of dense attention."""
        return float(np.exp(np.nanmean(self.loss - self.dense_loss)))


class DenseLogits:
    """What a model predicts on prompts as it is, to compare with what it predicts under something else."""

    def __init__(
        self, model: Any, prompts: Sequence[Prompt], *, places: int | None = None, at_once: bool = True
    ) -> None:
        """Run the model over each prompt once.

        Args:
            model: any transformers causal model with logits_to_keep, with nothing applied to it.
            prompts: of any lengths; of those with a later turn the context.
            places: how many places of a prompt are compared; None for as many as 128 MiB hold, from 16 to 512.
            at_once: False where `learn` is to run it, prompt by prompt.

        Raises:
            HeadwiseError: the model computes all logits or none.
        """
        check_logits(model)
        self._model = model
        vocabulary = model.get_output_embeddings().weight.shape[0]
        most = places or max(16, min(_MOST_PLACES, _HELD // vocabulary))
        self._ids = [torch.tensor([prompt.context], device=model.device) for prompt in prompts]
        lengths = [ids.shape[1] for ids in self._ids]
        self._places = [torch.linspace(0, n - 1, min(most, n), device=model.device).long() for n in lengths]
        self._dense: dict[int, Tensor] = {}
        while at_once and self.learn():
            pass

    @property
    def known(self) -> Set[int]:
        """The prompts that the model ran over."""
        return self._dense.keys()

    def learn(self, i: int | None = None) -> bool:
        """Run the model, with nothing applied to it, over a prompt, or the first that it did not run over yet.

        Returns:
            Whether there was one.
        """
        if i is None:
            i = next((i for i in range(len(self._ids)) if i not in self._dense), None)
        if i is None or i in self._dense:
            return False
        self._dense[i] = self._log_probs(i).half()
        return True

    def drift(self, which: Sequence[int] | None = None) -> Drift:
        """Run the model over some prompts that are known, or over all, as it is now, and compare."""
        return Drift.joined([self._drift(i) for i in (range(len(self._ids)) if which is None else which)])

    def _drift(self, i: int) -> Drift:
        dense, found, places = self._dense[i], self._log_probs(i), self._places[i]
        targets = self._ids[i][0, (places + 1).clamp_max(self._ids[i].shape[1] - 1)]
        pieces = []
        for rows, other in zip(dense.split(_ROWS), found.split(_ROWS), strict=True):
            wide = rows.float()
            pieces.append((wide.exp() * (wide - other)).sum(-1))
        losses = []
        for of in (found, dense):
            one = -of.gather(1, targets[:, None])[:, 0].float()
            # Nothing comes after the last token.
            one[places == self._ids[i].shape[1] - 1] = float("nan")
            losses.append(one.cpu().numpy())
        return Drift(kl=torch.cat(pieces).clamp_min(0).cpu().numpy(), loss=losses[0], dense_loss=losses[1])

    @torch.no_grad()
    def _log_probs(self, i: int) -> Tensor:
        """(P, V) fp32 of a prompt's places."""
        output = self._model(input_ids=self._ids[i], use_cache=False, logits_to_keep=self._places[i])
        logits: Tensor = output.logits[0].float()
        return logits.log_softmax(-1).clamp_min_(_LEAST)


def check_logits(model: Any) -> None:
    """Raise HeadwiseError where a model computes the logits of all tokens or none."""
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise HeadwiseError(f"{type(model).__name__} has no logits_to_keep: logits of long prompts do not fit")
