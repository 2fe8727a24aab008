"""Makes the cache for an artifact's decode and kv_cache sections.

transformers is imported where it is used.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import artifacts
from artifacts import Artifact, HeadwiseError, KVCache
from runtime.caches.h2o import H2O
from runtime.caches.policy import Full, Policy
from runtime.caches.rehearsal import rehearsed
from runtime.caches.snapkv import SnapKV
from runtime.caches.window import Window
from runtime.devices import execution_device
from runtime.layers import (
    attention_layers,
    caches_latents,
    check_sections,
    full_layers,
    inner_model,
    layer_kinds,
    text_config,
    window_of,
)
from runtime.memory import OFFLOADS
from runtime.omnikv.bank import Bank
from runtime.omnikv.select import Role, roles_of
from runtime.omnikv.selection import Selection

if TYPE_CHECKING:
    from torch import nn
    from transformers import Cache
    from transformers.cache_utils import CacheLayerMixin

# Every policy, by the kind of its record in artifacts/schema/kv_cache.py.
POLICIES: dict[str, type[Policy]] = {
    "full": Full,
    "streaming": Window,
    "h2o": H2O,
    "snapkv": SnapKV,
}


def make_cache(artifact: Artifact | None, model: nn.Module, offload: str) -> Cache:
    """Make an empty cache; see LoadedArtifact.new_cache.

    Layers that neither section names grow, or slide as those of transformers do.

    Raises:
        HeadwiseError: `offload` is unknown, the model takes no cache of transformers, or a section
            does not fit the model.
    """
    from transformers import DynamicCache

    if offload not in OFFLOADS:
        raise HeadwiseError(f"offload must be one of {', '.join(OFFLOADS)}, got {offload!r}")
    model = inner_model(model)
    modules = attention_layers(model)
    check_takes_cache(model)
    decode = None
    section = None
    if artifact is not None:
        check_sections(artifact, modules)
        decode = artifact.decode
        section = artifact.kv_cache
    cache = DynamicCache(config=text_config(model))
    plain = _plain_layers(cache, model, modules)
    if decode is None:
        layers = _growing_layers(plain)
    else:
        _check_filter_layers(decode.omnikv, plain, modules)
        # A bank is for keys, not for latents.
        keyed = {number for number in plain if not caches_latents(modules[number])}
        layers, selections = _omnikv_layers(decode.omnikv, plain, keyed, offload)
        # On the cache, since users may replace its layers. An attribute of our own on transformers'
        # class, which reaches attention with each call. Copies and pickles keep it (tests).
        cache.selections = selections
    if section is not None:
        layers |= policy_layers(section, model, modules, has_decode=decode is not None)
    for number, layer in layers.items():
        cache.layers[number] = layer
    return cache


def check_takes_cache(model: Any) -> None:
    """Raise HeadwiseError for a model that takes no cache of transformers' own classes."""
    from transformers import Cache, PreTrainedModel

    config = text_config(model)
    parts = [model, model.base_model]
    parts += [each for each in model.modules() if getattr(each, "config", None) is config]
    forwards = [
        inspect.unwrap(type(part).forward)
        for part in dict.fromkeys(parts)
        if isinstance(part, PreTrainedModel)
    ]
    why = None
    if not any("past_key_values" in inspect.signature(each).parameters for each in forwards):
        why = "its forward takes no past_key_values"
    for forward in forwards:
        for name in forward.__code__.co_names:
            cls = forward.__globals__.get(name)
            if not isinstance(cls, type) or not issubclass(cls, Cache):
                continue
            if cls.__module__ != Cache.__module__:
                why = f"it takes a cache class of its own ({cls.__name__})"
    if why is not None:
        raise HeadwiseError(
            f"there is no cache for {type(model).__name__}: {why}; leave past_key_values out, and "
            "the model makes its own"
        )


def _plain_layers(
    cache: Cache, model: nn.Module, modules: dict[int, nn.Module]
) -> dict[int, torch.device]:
    """Devices of the layers with a plain growing cache, which ours can replace."""
    from transformers.cache_utils import DynamicLayer

    plain = {}
    for number in full_layers(modules):
        if number < len(cache.layers) and type(cache.layers[number]) is DynamicLayer:
            plain[number] = execution_device(model, modules[number])
    return plain


def _growing_layers(plain: dict[int, torch.device]) -> dict[int, CacheLayerMixin]:
    from runtime.caches.growing import GrowingLayer

    return {number: GrowingLayer() for number in plain}


def _check_filter_layers(
    section: artifacts.OmniKV, plain: dict[int, torch.device], modules: dict[int, nn.Module]
) -> None:
    """Raise HeadwiseError for a filter layer whose cache cannot keep scores of earlier queries."""
    if section.selector == "last":
        return
    for number in section.filter_layers:
        if number not in plain:
            raise HeadwiseError(
                f"decode.omnikv.selector must be 'last', got {section.selector!r}: filter layer "
                f"{number} ({type(modules[number]).__name__}) caches more than its keys and values"
            )


def _omnikv_layers(
    section: artifacts.OmniKV, plain: dict[int, torch.device], keyed: set[int], offload: str
) -> tuple[dict[int, CacheLayerMixin], dict[int, Selection]]:
    """Make the cache layers of a decode section, with a bank for each filter layer and device.

    Args:
        section: the decode section.
        plain: devices of the layers with a plain growing cache.
        keyed: those of them that cache keys and values, which a bank can hold.
        offload: as in make_cache.

    Returns:
        The cache layers, and the selection of each filter layer.
    """
    from runtime.caches.growing import BankedLayer, FilterLayer

    roles = roles_of(section, plain)
    selections = {number: Selection() for number in section.filter_layers}
    layers = _growing_layers(plain)
    keep = section.budget if isinstance(section.budget, int) else 0
    devices = {number: device for number, device in plain.items() if number in keyed}
    for (filter_layer, _), numbers in _offloaded(roles, devices, offload).items():
        bank = Bank(len(numbers), keep)
        selections[filter_layer].banks.append(bank)
        layers |= {number: BankedLayer(bank, place) for place, number in enumerate(numbers)}
    layers |= {number: FilterLayer(section.window) for number in plain if roles[number].is_filter}
    return layers, selections


def _offloaded(
    roles: dict[int, Role], plain: dict[int, torch.device], offload: str
) -> dict[tuple[int, torch.device], list[int]]:
    """Layers whose keys and values go to a bank, by their filter layer and device."""
    groups: dict[tuple[int, torch.device], list[int]] = {}
    for number, device in plain.items():
        filter_layer = roles[number].served_by
        packed = offload == "packed" or (offload == "auto" and device.type == "cuda")
        if filter_layer is not None and packed:
            groups.setdefault((filter_layer, device), []).append(number)
    return groups


def check_cache_layers(model: nn.Module, modules: dict[int, nn.Module]) -> None:
    """Check that transformers caches keys and values alone in the layers that policies serve.

    Raises:
        HeadwiseError: a layer has no cache, or caches something else than its keys and values.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    layers = DynamicCache(config=text_config(model)).layers
    kinds = layer_kinds(modules)
    for number, module in modules.items():
        if kinds[number] == "other":
            continue
        kind = type(layers[number]) if number < len(layers) else None
        if kind not in (DynamicLayer, DynamicSlidingWindowLayer):
            name = "no cache" if kind is None else kind.__name__
            raise HeadwiseError(
                f"layer {number} ({type(module).__name__}) has {name} in transformers: the "
                f"kv_cache section serves only caches of a layer's own keys and values"
            )


def policy_layers(
    section: KVCache, model: nn.Module, modules: dict[int, nn.Module], *, has_decode: bool
) -> dict[int, CacheLayerMixin]:
    """Make the cache layers by layer number.

    Layers that see every token get policies, and sliding-window layers rolling buffers. Other
    layers keep transformers' own.

    Args:
        section: the artifact's section on caches.
        model: the model that the caches are for.
        modules: the model's attention modules by layer number.
        has_decode: the artifact has a decode section, whose caches serve the full layers.

    Raises:
        HeadwiseError: the model computes with keys between cache and attention; positions cannot be
            counted inside the cache of this model.
    """
    from runtime.caches.layer import KVHeads, PolicyLayer

    rehearsal = rehearsed(model)
    if rehearsal is not None and rehearsal.failure is not None:
        raise HeadwiseError(rehearsal.failure)
    kinds = layer_kinds(modules)
    layers: dict[int, CacheLayerMixin] = {}
    for number, module in modules.items():
        if kinds[number] == "other":
            continue
        if kinds[number] == "sliding":
            rolling = KVHeads(None, partial(Window, 0, window_of(module)))
            layers[number] = PolicyLayer([rolling], sliding=True)
            continue
        row = section.layers[number]
        assert row is not None
        names = (row,) if isinstance(row, str) else row
        if has_decode and all(section.policies[name].kind == "full" for name in names):
            continue
        groups = []
        for name in dict.fromkeys(names):
            record = section.policies[name]
            heads = None
            if len(set(names)) > 1:
                heads = tuple(head for head, other in enumerate(names) if other == name)
            groups.append(KVHeads(heads, POLICIES[record.kind].maker(record, model, module)))
        layers[number] = PolicyLayer(groups)
    return layers
