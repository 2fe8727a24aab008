"""Accumulator of one prompt's figures while it is decoded, for the similarity profile.

Shapes: L layers, N of them measured (those that see every key), H query heads, G KV heads, n query
heads of each, K keys, S prompt length, k top keys.

A layer's H x K probabilities are reduced at once to their mean and their largest over the heads. A
step keeps N x K means and N x k positions until its last layer is through: less than N x K x
H.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from profiling.inside.decode_capture import StepInputs
from profiling.inside.residual import ResidualStream
from profiling.prompts.prompt import Evidence
from profiling.similarities.config import TAIL
from profiling.similarities.mass import attention_output, span_coverage, top_key_mass

# Share of the prompt that is frozen for the variability (OmniKV, Figure 1c).
FROZEN = 0.25
# Share of a prompt's steps that are its worst.
WORST = 0.125


def worst_of(steps: int) -> int:
    """Return the number of worst steps among `steps`."""
    return math.ceil(WORST * steps)


class Accumulator:
    """The figures of one prompt, as sums over its steps; pass `visit` and `done` to capture_decode.

    Args:
        length: of the prompt.
        top_k: number of top keys of a layer.
        evidence: the evidence span of each step in the prompt, None if unknown.
        stream: of the model that decodes.

    Attributes:
        layers, sliding: the layers measured and those left out, in order.
        mass: S, summed over the steps, (N, N) fp64.
        error: how far the output of layer j's KV head g is off when it sees the top keys of layer
            i <= j alone, as ResidualStream.by_head, summed over the steps, (N, N, G) fp32, NaN for
            i > j.
        worst: the same over the worst steps, a `WORST` of all.
        hit: mean fraction of the evidence spans in the top keys, (N) fp64, None without spans.
        missed: for each step the attention on old tokens that were not frozen, (N).
    """

    def __init__(
        self,
        *,
        length: int,
        top_k: int,
        evidence: Sequence[Evidence | None],
        stream: ResidualStream,
    ) -> None:
        self.layers: list[int] = []
        self.sliding: list[int] = []
        self.mass = torch.zeros((), dtype=torch.float64, device="cpu")
        self._hits: list[Tensor] = []
        self.missed: list[Tensor] = []
        self._top_k = top_k
        self._evidence = evidence
        self._stream = stream
        self._changed: dict[int, Tensor] = {}
        # Of each layer (G, i): sums, and the errors of the worst steps so far, the worst first.
        self._errors: dict[int, Tensor] = {}
        self._worst: dict[int, Tensor] = {}
        # Positions from here on are recent: whatever evicts keeps them.
        self._old = length - 1 - TAIL
        self._before: dict[int, Tensor] = {}
        self._frozen: dict[int, Tensor] = {}
        self._means: list[Tensor] = []
        self._top_keys: list[Tensor] = []

    @property
    def hit(self) -> Tensor | None:
        """(N) fp64, None without evidence spans; see the class."""
        if self._hits:
            return torch.stack(self._hits).mean(0)
        return None

    @property
    def error(self) -> Tensor:
        """(N, N, G) fp32, summed over the steps; see the class."""
        return self._square(self._errors)

    @property
    def worst(self) -> Tensor:
        """(N, N, G) fp32, summed over the worst steps; see the class."""
        return self._square({layer: steps.sum(0) for layer, steps in self._worst.items()})

    def _square(self, by_layer: dict[int, Tensor]) -> Tensor:
        """Return (N, N, G) from the values (G, i) of each layer for the layers up to it."""
        size = len(self.layers)
        pad = torch.nn.functional.pad
        columns = [by_layer[layer].T for layer in self.layers]
        return torch.stack(
            [pad(c, (0, 0, 0, size - len(c)), value=math.nan) for c in columns], dim=1
        )

    def visit(self, step: int, inputs: StepInputs) -> None:
        """One layer of one step."""
        if inputs.sliding_window is not None:
            if step == 0:
                self.sliding.append(inputs.layer)
            return
        probabilities = inputs.probabilities
        largest = probabilities.amax(0)
        if step < 0:
            past = largest[: self._old]
            self._before[inputs.layer] = (
                self._before.get(inputs.layer, torch.zeros_like(past)) + past
            )
            return
        if step == 0:
            self.layers.append(inputs.layer)
            frozen = min(self._old, math.ceil(FROZEN * (self._old + TAIL + 1)))
            self._frozen[inputs.layer] = self._before.pop(inputs.layer).topk(frozen).indices
        mean = probabilities.mean(0)
        by_head = probabilities.unflatten(0, (inputs.k.shape[1], -1))
        self._means.append(mean)
        self._top_keys.append(largest.topk(self._top_k).indices)
        # One layer's top keys at a time: the values of all would be more than a layer of the cache.
        v = inputs.v[0]
        whole = attention_output(by_head, v)
        changes = torch.stack(
            [attention_output(by_head, v, keys) - whole for keys in self._top_keys], dim=1
        )
        self._changed[inputs.layer] = self._stream.by_head(
            inputs.layer, changes.flatten(2)[:, :, None], slice(-1, None)
        )

    def done(self, step: int) -> None:
        """The step's last layer is through."""
        if step < 0 or not self._means:
            return
        means = torch.stack(self._means)
        top_keys = torch.stack(self._top_keys)
        self.mass = self.mass + top_key_mass(means, top_keys)
        for layer, changed in self._changed.items():
            error = changed * self._stream.gain(layer)
            self._errors[layer] = self._errors.get(layer, 0) + error
            worst = torch.cat([self._worst.get(layer, error[None][:0]), error[None]])
            self._worst[layer] = worst.topk(
                min(len(worst), worst_of(len(self._evidence))), dim=0
            ).values
        evidence = self._evidence[step]
        if evidence is not None:
            self._hits.append(span_coverage(evidence.span, top_keys))
        old = means[:, : self._old].double().sum(1)
        frozen = torch.stack(
            [means[at, self._frozen[layer]].sum() for at, layer in enumerate(self.layers)]
        )
        self.missed.append(old - frozen)
        self._means.clear()
        self._top_keys.clear()
