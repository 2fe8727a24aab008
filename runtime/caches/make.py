"""Makes the cache that an artifact's decode and kv_cache sections want. Imports transformers where it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import artifacts
from artifacts import Artifact, HeadwiseError
from runtime.caches.rows import policy_layers
from runtime.layers import attention_layers, heads_of, sliding_layers, text_config
from runtime.omnikv.groups import Group, total
from runtime.omnikv.roles import roles_of
from runtime.refusals import caches_latents, check_sections
from runtime.sharding import shard_of

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import Cache
    from transformers.cache_utils import CacheLayerMixin

OFFLOADS = ("auto", "never", "packed", "brutal")


class LayerMemory(NamedTuple):
    """Bytes of one layer on the device, slots seen (padding included), and tokens kept: the most and the mean of heads.

    A layer in a context bank keeps all tokens there; its bytes are in the report's totals only.
    """

    layer: int
    device: int
    seen: int
    kept: int
    mean_kept: float


class MemoryReport(NamedTuple):
    """What a cache holds by layer, and bytes in all on the devices that compute and in CPU memory's context bank."""

    layers: tuple[LayerMemory, ...]
    device: int
    bank: int


class CacheBytes(NamedTuple):
    """Bytes of memory that a cache holds: on the devices that compute, and in the context bank in CPU memory."""

    device: int
    bank: int


def make_cache(artifact: Artifact, model: nn.Module, offload: str) -> Cache:
    """See Headwise.new_cache: what neither section speaks of grows, or slides as transformers' own does."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    if offload not in OFFLOADS:
        raise HeadwiseError(f"unknown offload {offload!r}; known: {', '.join(OFFLOADS)}")
    modules = attention_layers(model)
    check_sections(artifact, modules)
    sliding = sliding_layers(modules)
    cache = DynamicCache(config=text_config(model))
    section = None if artifact.decode is None else artifact.decode.omnikv
    # Only what is the plain growing cache is replaced by a better one. A bank is for keys, not for latents.
    plain = {
        number: _device(module)
        for number, module in modules.items()
        if number < len(cache.layers)
        and number not in sliding
        and type(cache.layers[number]) is DynamicLayer
        and (section is None or not caches_latents(module))
    }
    kv_heads = slice(0, 0)
    if plain and section is not None and section.head_map is not None:
        kv_heads = shard_of(model, modules[next(iter(plain))], *heads_of(model)).kv_heads
    made = _layers(section, plain, kv_heads, offload)
    if artifact.kv_cache is not None:
        made |= policy_layers(artifact.kv_cache, model, modules, choosing=section is not None)
    for number, layer in made.items():
        cache.layers[number] = layer
    return cache


def _layers(
    section: artifacts.OmniKV | None, plain: dict[int, torch.device], kv_heads: slice, offload: str
) -> dict[int, CacheLayerMixin]:
    """The cache layers of full-attention layers, by number and device."""
    from runtime.caches.growing import GrowingLayer
    from runtime.omnikv.layers import BankedLayer, BrutalFilterLayer, BrutalLayer, FilterLayer

    if section is None:
        return {number: GrowingLayer() for number in plain}
    roles, window = roles_of(section, plain, kv_heads), section.window
    layers: dict[int, CacheLayerMixin] = {}
    if offload == "brutal":
        groups = {device: Group(list(plain.values()).count(device), 0) for device in plain.values()}
        for place, (number, device) in enumerate(plain.items()):
            if roles[number].filters:
                layers[number] = BrutalFilterLayer(window, group=groups[device], place=place)
            else:
                layers[number] = BrutalLayer(groups[device], place)
        return layers
    served: dict[tuple[int, torch.device], list[int]] = {}
    for number, device in plain.items():
        chooser = roles[number].filter
        if chooser is not None and (offload == "packed" or (offload == "auto" and device.type == "cuda")):
            served.setdefault((chooser, device), []).append(number)
    keep = section.budget if isinstance(section.budget, int) else 0
    banked: dict[int, list[list[BankedLayer]]] = {}
    for (chooser, _), numbers in served.items():
        choices = [choices for number in numbers if (choices := roles[number].choices) is not None]
        group = Group(len(numbers), keep, choices or None)
        members = [BankedLayer(group, place) for place, _ in enumerate(numbers)]
        banked.setdefault(chooser, []).append(members)
        layers |= dict(zip(numbers, members, strict=True))
    for number in plain:
        if roles[number].filters:
            layers[number] = FilterLayer(window, banked.get(number, ()))
        elif number not in layers:
            layers[number] = GrowingLayer()
    return layers


def cache_bytes(cache: Cache) -> CacheBytes:
    """Bytes that any cache of transformers holds, room for new tokens included: what the allocator gave out for it."""
    held, groups = {}, {}
    for layer in cache.layers:
        for tensor in _tensors(layer):
            memory = tensor.untyped_storage()
            held[memory.data_ptr()] = memory.nbytes()
        group = getattr(layer, "group", None)
        if group is not None:
            groups[id(group)] = group
    slots, bank = total(list(groups.values()))
    return CacheBytes(sum(held.values()) + slots, bank)


def memory_report(cache: Cache) -> MemoryReport:
    """What a cache holds, layer by layer, and in all. See LayerMemory."""
    layers = []
    for number, layer in enumerate(cache.layers):
        seen = int(layer.get_seq_length())
        policies = getattr(layer, "policies", None)
        if policies is not None:
            kept = max((policy.kept for policy in policies), default=0)
            mean = layer.mean_kept
        else:
            keys = getattr(layer, "keys", None)
            kept = keys.shape[-2] if keys is not None and keys.numel() else seen if hasattr(layer, "group") else 0
            mean = float(kept)
        memories = {m.data_ptr(): m.nbytes() for m in (tensor.untyped_storage() for tensor in _tensors(layer))}
        layers.append(LayerMemory(number, sum(memories.values()), seen, kept, mean))
    return MemoryReport(tuple(layers), *cache_bytes(cache))


def _tensors(layer: CacheLayerMixin) -> list[torch.Tensor]:
    """The tensors that a cache layer holds on the device that computes."""
    if (policies := getattr(layer, "policies", None)) is not None:
        return [tensor for policy in policies for tensor in policy.tensors().values()] + layer.recorded
    found = (getattr(layer, name, None) for name in ("keys", "values", "history"))
    return [tensor for tensor in found if tensor is not None]


def _device(module: nn.Module) -> torch.device:
    import torch

    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device
