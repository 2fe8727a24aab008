"""Makes the cache that an artifact's decode section wants. Imports transformers where it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import artifacts
from artifacts import Artifact, HeadwiseError
from runtime.decode import role_of
from runtime.groups import Group, total
from runtime.layers import attention_layers, sliding_layers, text_config

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import Cache
    from transformers.cache_utils import CacheLayerMixin

OFFLOADS = ("auto", "never", "packed", "brutal")


class CacheBytes(NamedTuple):
    """Bytes of memory that a cache holds: on the devices that compute, and in the context bank in CPU memory."""

    device: int
    bank: int


def make_cache(artifact: Artifact, model: nn.Module, offload: str) -> Cache:
    """See Headwise.cache: filter layers remember scores, sliding and other layers are transformers' own."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    if offload not in OFFLOADS:
        raise HeadwiseError(f"unknown offload {offload!r}; known: {', '.join(OFFLOADS)}")
    if artifact.decode is None:
        raise HeadwiseError("the artifact has no decode section: python -m search.filters writes one")
    modules = attention_layers(model)
    sliding = sliding_layers(modules)
    cache = DynamicCache(config=text_config(model))
    # Only what is the plain growing cache is replaced by a better one.
    plain = {
        number: _device(module)
        for number, module in modules.items()
        if number < len(cache.layers) and number not in sliding and type(cache.layers[number]) is DynamicLayer
    }
    for number, layer in _layers(artifact.decode.omnikv, plain, offload).items():
        cache.layers[number] = layer
    return cache


def _layers(section: artifacts.OmniKV, plain: dict[int, torch.device], offload: str) -> dict[int, CacheLayerMixin]:
    """The cache layers of full-attention layers, by number and device."""
    from runtime.cache_layers import BankedLayer, BrutalFilterLayer, BrutalLayer, FilterLayer, GrowingLayer

    filters, window = section.filter_layers, section.window
    layers: dict[int, CacheLayerMixin] = {}
    if offload == "brutal":
        groups = {device: Group(list(plain.values()).count(device), 0) for device in plain.values()}
        for place, (number, device) in enumerate(plain.items()):
            if number in filters:
                layers[number] = BrutalFilterLayer(window, group=groups[device], place=place)
            else:
                layers[number] = BrutalLayer(groups[device], place)
        return layers
    served: dict[tuple[int, torch.device], list[int]] = {}
    for number, device in plain.items():
        chooser = role_of(number, filters, section.dense_layers).filter
        if chooser is not None and (offload == "packed" or (offload == "auto" and device.type == "cuda")):
            served.setdefault((chooser, device), []).append(number)
    keep = section.budget if isinstance(section.budget, int) else 0
    banked: dict[int, list[list[BankedLayer]]] = {}
    for (chooser, _), numbers in served.items():
        group = Group(len(numbers), keep)
        members = [BankedLayer(group, place) for place, _ in enumerate(numbers)]
        banked.setdefault(chooser, []).append(members)
        layers |= dict(zip(numbers, members, strict=True))
    for number in plain:
        if number in filters:
            layers[number] = FilterLayer(window, banked.get(number, ()))
        elif number not in layers:
            layers[number] = GrowingLayer()
    return layers


def cache_bytes(cache: Cache) -> CacheBytes:
    """Bytes that any cache of transformers holds, room for new tokens included: what the allocator gave out for it."""
    held, groups = {}, {}
    for layer in cache.layers:
        for tensor in (getattr(layer, name, None) for name in ("keys", "values", "history")):
            if tensor is not None:
                memory = tensor.untyped_storage()
                held[memory.data_ptr()] = memory.nbytes()
        group = getattr(layer, "group", None)
        if group is not None:
            groups[id(group)] = group
    slots, bank = total(list(groups.values()))
    return CacheBytes(sum(held.values()) + slots, bank)


def _device(module: nn.Module) -> torch.device:
    import torch

    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device
