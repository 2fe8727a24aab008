"""Makes the cache that an artifact's decode section wants. Imports transformers where it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from artifacts import Artifact, HeadwiseError
from runtime.layers import attention_layers, sliding_layers, text_config

if TYPE_CHECKING:
    from torch import nn
    from transformers import Cache


def make_cache(artifact: Artifact, model: nn.Module) -> Cache:
    """See Headwise.cache: filter layers remember scores, sliding and other layers are transformers' own."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    from runtime.cache_layers import FilterLayer, GrowingLayer

    if artifact.decode is None:
        raise HeadwiseError("the artifact has no decode section: python -m search.filters writes one")
    omnikv = artifact.decode.omnikv
    modules = attention_layers(model)
    sliding = sliding_layers(modules)
    cache = DynamicCache(config=text_config(model))
    for number in modules:
        # Only what is the plain growing cache is replaced by a better one.
        if number < len(cache.layers) and number not in sliding and type(cache.layers[number]) is DynamicLayer:
            filters = number in omnikv.filter_layers
            cache.layers[number] = FilterLayer(omnikv.window) if filters else GrowingLayer()
    return cache


def cache_bytes(cache: Cache) -> int:
    """Bytes of memory that the cache holds, room for new tokens included: what the allocator gave out for it."""
    tensors = (x for layer in cache.layers for x in (layer.keys, layer.values) if x is not None)
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())
