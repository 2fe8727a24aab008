"""Caches under a policy without a search: artifacts made in memory, and random eviction.

Shapes: B batch, G KV heads, n tokens held, W window.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

import artifacts
from artifacts import Artifact, HeadwiseError, KVCache, Prefill
from artifacts.schema.kv_cache import Policy
from artifacts.schema.validation import explain
from profiling.caches.parsing import SINKS
from profiling.models.loading import LoadedModel
from runtime import LoadedArtifact
from runtime.caches.snapkv import SnapKV
from runtime.caches.step import Step
from runtime.fingerprint import fingerprint
from runtime.layers import attention_layers, full_layers, text_config

_NAME = "policy"


def everywhere(loaded: LoadedModel, policy: Policy) -> KVCache:
    """A section with one policy for all layers but sliding-window layers.

    Raises:
        HeadwiseError: no layer of the model sees every token, so that none can have a policy.
    """
    free = full_layers(attention_layers(loaded.model))
    if not free:
        raise HeadwiseError(f"no layer of {loaded.name} sees every token: none can have a policy")
    layers = range(text_config(loaded.model).num_hidden_layers)
    rows = tuple(_NAME if layer in free else None for layer in layers)
    return KVCache(policies={_NAME: policy}, layers=rows)


def with_policy(loaded: LoadedModel, policy: Policy | None) -> LoadedArtifact:
    """Dense prefill, and one policy wherever there can be one; None is a cache that keeps all."""
    return with_section(loaded, None if policy is None else everywhere(loaded, policy))


def with_section(loaded: LoadedModel, section: KVCache | None) -> LoadedArtifact:
    """Dense prefill with a kv_cache section, as if an artifact with it had been loaded.

    Raises:
        HeadwiseError: the section does not fit the model.
    """
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    # Layers without patterns are left alone: dense.
    prefill = Prefill(dense_below=0, layers=(None,) * model.num_layers)
    try:
        return LoadedArtifact(
            Artifact(model=model, search=None, patterns={}, prefill=prefill, kv_cache=section)
        )
    except ValidationError as error:
        raise HeadwiseError(explain(error)) from None


class RandomEviction(SnapKV):
    """SnapKV's budget and window without its votes: SINKS first tokens, others at random."""

    def __init__(self, record: artifacts.SnapKV, seed: int) -> None:
        super().__init__(record)
        self._seed = seed

    def _votes(self, call: Step) -> Tensor:
        """Draw votes (B, G, n - W), uniform in [0, 1); the first tokens come above all.

        Equal seeds and n yield equal votes.
        """
        tokens = self.cached[0]
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + tokens)
        votes = torch.rand(
            *call.k.shape[:2],
            tokens - self.record.window,
            generator=generator,
            dtype=torch.float32,
            device="cpu",
        )
        votes[:, :, :SINKS] = 1
        return votes.to(call.k.device)


def drawing(cache: Any, record: artifacts.SnapKV, *, seed: int = 0) -> Any:
    """Make the policy layers of a new cache evict at random, each with a separate seed."""
    from runtime.caches.layer import PolicyLayer

    for number, layer in enumerate(cache.layers):
        if isinstance(layer, PolicyLayer) and not layer.is_sliding:
            make = partial(RandomEviction, record, seed * 1_009 + number)
            layer.groups = tuple(replace(group, make=make) for group in layer.groups)
    return cache
