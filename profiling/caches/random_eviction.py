"""Random eviction: of a prompt its start, its end, and tokens that each KV head draws (baseline of
arXiv 2609.03430).

Shapes: B batch, G KV heads, n tokens held, W window.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import artifacts
from runtime.caches.policy import Step
from runtime.caches.snapkv import SnapKV

# First tokens that are kept, as StreamingLLM keeps them.
SINKS = 4


class RandomEviction(SnapKV):
    """SnapKV's budget and window without its votes: beside them the first SINKS tokens stay, all
    others by lot."""

    def __init__(self, record: artifacts.SnapKV, seed: int) -> None:
        super().__init__(record)
        self._seed = seed

    def _votes(self, call: Step) -> Tensor:
        """(B, G, n - W): uniform in [0, 1), the first tokens above all; the same for the same seed
        and n."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.kept)
        votes = torch.rand(*call.k.shape[:2], self.kept - self.record.window, generator=generator)
        votes[:, :, :SINKS] = 1
        return votes.to(call.k.device)


def drawing(cache: Any, record: artifacts.SnapKV, *, seed: int = 0) -> Any:
    """A new cache whose layers under policies draw instead, each by a seed of its own; layers that
    slide stay."""
    from runtime.caches.layer import PolicyLayer

    for number, layer in enumerate(cache.layers):
        if isinstance(layer, PolicyLayer) and not layer.is_sliding:
            make = partial(RandomEviction, record, seed * 1_009 + number)
            layer.groups = tuple(replace(group, make=make) for group in layer.groups)
    return cache
