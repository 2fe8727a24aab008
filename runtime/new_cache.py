"""Makes the cache that an artifact's decode and kv_cache sections want. Imports transformers where
it is used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, assert_never

import torch

import artifacts
from artifacts import Artifact, HeadwiseError, KVCache
from runtime.caches.h2o import H2O
from runtime.caches.policy import Full, Policy
from runtime.caches.rotation import Rotation
from runtime.caches.snapkv import SnapKV
from runtime.caches.window import Window
from runtime.layers import (
    attention_layers,
    caches_latents,
    check_sections,
    sliding_layers,
    text_config,
    window_of,
)
from runtime.omnikv.bank import Bank
from runtime.omnikv.roles import roles_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import Cache
    from transformers.cache_utils import CacheLayerMixin

OFFLOADS = ("auto", "never", "packed")
# By the kind of its record.
POLICIES: dict[str, type[Policy]] = {
    "full": Full,
    "streaming": Window,
    "h2o": H2O,
    "snapkv": SnapKV,
}


def make_cache(artifact: Artifact | None, model: nn.Module, offload: str) -> Cache:
    """See Headwise.new_cache: what neither section speaks of grows, or slides as transformers' own
    does."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    if offload not in OFFLOADS:
        raise HeadwiseError(f"unknown offload {offload!r}; known: {', '.join(OFFLOADS)}")
    modules = attention_layers(model)
    decode, kept = (None, None) if artifact is None else (artifact.decode, artifact.kv_cache)
    if artifact is not None:
        check_sections(artifact, modules)
    sliding = sliding_layers(modules)
    cache = DynamicCache(config=text_config(model))
    section = None if decode is None else decode.omnikv
    # Only what is the plain growing cache is replaced by a better one. A bank is for keys, not for
    # latents.
    plain = {
        number: next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        for number, module in modules.items()
        if number < len(cache.layers)
        and number not in sliding
        and type(cache.layers[number]) is DynamicLayer
        and (section is None or not caches_latents(module))
    }
    made = _layers(section, plain, offload)
    if kept is not None:
        made |= policy_layers(kept, model, modules, choosing=section is not None)
    for number, layer in made.items():
        cache.layers[number] = layer
    return cache


def _layers(
    section: artifacts.OmniKV | None, plain: dict[int, torch.device], offload: str
) -> dict[int, CacheLayerMixin]:
    """The cache layers of full-attention layers, by number and device."""
    from runtime.caches.banked import BankedLayer, FilterLayer
    from runtime.caches.growing import GrowingLayer

    if section is None:
        return {number: GrowingLayer() for number in plain}
    roles = roles_of(section, plain)
    window = section.window
    layers: dict[int, CacheLayerMixin] = {}
    served: dict[tuple[int, torch.device], list[int]] = {}
    for number, device in plain.items():
        chooser = roles[number].filter
        if chooser is not None and (
            offload == "packed" or (offload == "auto" and device.type == "cuda")
        ):
            served.setdefault((chooser, device), []).append(number)
    keep = section.budget if isinstance(section.budget, int) else 0
    banked: dict[int, list[list[BankedLayer]]] = {}
    for (chooser, _), numbers in served.items():
        bank = Bank(len(numbers), keep)
        members = [BankedLayer(bank, place) for place in range(len(numbers))]
        banked.setdefault(chooser, []).append(members)
        layers |= dict(zip(numbers, members, strict=True))
    for number in plain:
        if roles[number].filters:
            layers[number] = FilterLayer(window, banked.get(number, ()))
        elif number not in layers:
            layers[number] = GrowingLayer()
    return layers


def check_rows(section: KVCache, modules: dict[int, nn.Module]) -> None:
    """Rows are for full-attention layers, and for all of those.

    Raises:
        HeadwiseError: a layer that slides has a row, or one that does not has none.
    """
    sliding = sliding_layers(modules)
    for number in modules:
        row = section.layers[number] if number < len(section.layers) else None
        if number in sliding and row is not None:
            raise HeadwiseError(
                f"kv_cache.layers[{number}] must be null: the layer slides over a window already"
            )
        if number not in sliding and row is None:
            raise HeadwiseError(
                f"kv_cache.layers[{number}] must name a policy, such as full: the layer sees every "
                f"token"
            )


def policy_layers(
    section: KVCache, model: nn.Module, modules: dict[int, nn.Module], *, choosing: bool
) -> dict[int, CacheLayerMixin]:
    """The cache layers of all layers, by number: rolling buffers for those that slide.

    choosing: the artifact has a decode section, which has caches of its own for layers that are
    full.

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
            group = KVHeads(None, partial(Window, 0, window_of(module)))
            made[number] = PolicyLayer([group], sliding=True)
            continue
        row = section.layers[number]
        names = (row,) if isinstance(row, str) else row or ()
        if choosing and all(section.policies[name].kind == "full" for name in names):
            continue
        groups = []
        for name in dict.fromkeys(names):
            key = (name, str(getattr(module, "layer_type", "")))
            if key not in makers:
                makers[key] = maker(section.policies[name], model, module)
            heads = tuple(head for head, other in enumerate(names) if other == name)
            groups.append(KVHeads(None if len(set(names)) == 1 else heads, makers[key]))
        made[number] = PolicyLayer(groups)
    return made


def maker(
    policy: artifacts.Full | artifacts.Streaming | artifacts.H2O | artifacts.SnapKV,
    model: nn.Module,
    module: nn.Module,
) -> Callable[[], Policy]:
    """What makes a policy's state for one layer of a model."""
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
