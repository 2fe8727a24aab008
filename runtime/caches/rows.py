"""From an artifact's kv_cache section, which is data, to the cache layers of a model.

Only imports transformers where layers are made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, assert_never

from torch import nn

import artifacts
from artifacts import HeadwiseError, KVCache
from runtime.caches.policy import Full, Policy
from runtime.layers import heads_of, sliding_layers, window_of
from runtime.sharding import shard_of

if TYPE_CHECKING:
    from transformers.cache_utils import CacheLayerMixin


def check_rows(section: KVCache, modules: dict[int, nn.Module]) -> None:
    """Rows are for full-attention layers, and for all of those.

    Raises:
        HeadwiseError: a layer that slides has a row, or one that does not has none.
    """
    sliding = sliding_layers(modules)
    for number in modules:
        row = section.layers[number] if number < len(section.layers) else None
        if number in sliding and row is not None:
            raise HeadwiseError(f"kv_cache.layers[{number}] must be null: the layer slides over a window already")
        if number not in sliding and row is None:
            raise HeadwiseError(
                f"kv_cache.layers[{number}] must name a policy, such as full: the layer sees every token"
            )


def policy_layers(
    section: KVCache, model: nn.Module, modules: dict[int, nn.Module], *, choosing: bool
) -> dict[int, CacheLayerMixin]:
    """The cache layers of all layers, by number: rolling buffers for those that slide.

    choosing: the artifact has a decode section, which has caches of its own for layers that are full.

    Raises:
        HeadwiseError: see check_rows; positions cannot be counted inside the cache of this model.
    """
    from runtime.caches.layer import KVHeads, PolicyLayer

    check_rows(section, modules)
    sliding = sliding_layers(modules)
    made: dict[int, CacheLayerMixin] = {}
    makers: dict[tuple[str, str], Callable[[], Policy]] = {}
    for number, module in modules.items():
        if number in sliding:
            group = KVHeads(None, partial(_rolling, window_of(module)), "rolling")
            made[number] = PolicyLayer([group], sliding=True)
            continue
        row = section.layers[number]
        names = (row,) if isinstance(row, str) else row or ()
        if len(names) > 1:
            names = names[shard_of(model, module, *heads_of(model)).kv_heads]
        if choosing and all(section.policies[name].kind == "full" for name in names):
            continue
        groups = []
        for name in dict.fromkeys(names):
            key = (name, str(getattr(module, "layer_type", "")))
            if key not in makers:
                makers[key] = maker(section.policies[name], model, module)
            heads = tuple(head for head, other in enumerate(names) if other == name)
            groups.append(KVHeads(None if len(set(names)) == 1 else heads, makers[key], name))
        made[number] = PolicyLayer(groups)
    return made


def maker(
    policy: artifacts.Full | artifacts.Streaming | artifacts.H2O | artifacts.SnapKV, model: nn.Module, module: nn.Module
) -> Callable[[], Policy]:
    """What makes a policy's state for one layer of a model."""
    from runtime.caches.h2o import H2O
    from runtime.caches.rotation import Rotation
    from runtime.caches.snapkv import SnapKV
    from runtime.caches.window import Window

    if isinstance(policy, artifacts.Full):
        return Full
    if isinstance(policy, artifacts.Streaming):
        rotation = Rotation(model, module) if policy.positions == "cache" and policy.sinks else None
        return partial(Window, policy.sinks, policy.window, rotation)
    if isinstance(policy, artifacts.H2O):
        return partial(H2O, policy)
    if isinstance(policy, artifacts.SnapKV):
        return partial(SnapKV, policy)
    assert_never(policy)


def _rolling(window: int) -> Policy:
    from runtime.caches.window import Window

    return Window(0, window)
