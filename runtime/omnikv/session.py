"""Passes the cache layer of a filter layer from its update to the attention that follows.

transformers calls an attention function with keys and values, not with their cache, and a model may
compute with the keys in between. But an attention module updates its cache and then calls its
attention function, in one thread: the cache of a filter layer announces itself in update(), and the
attention function of that layer takes it.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from torch import Tensor

from artifacts import HeadwiseError


class FilterCache(Protocol):
    """Cache of a filter layer, as its attention uses it (runtime.caches.growing.FilterLayer).

    Attributes:
        number: the layer's number.
        keys: (B, G, K, D).
    """

    number: int
    keys: Tensor

    def remember(self, scores: Tensor) -> Tensor:
        """Add scores (B, K) of the newest query; returns those of the window (B, at most W, K)."""

    def fetch(self, tokens: Tensor, past: int) -> None:
        """Start fetching tokens (B, C) of those before `past` for the layers in banks."""


class _Announced(threading.local):
    """Cache of the latest update in this thread that no attention has taken."""

    cache: weakref.ref[FilterCache] | None = None


_announced = _Announced()


def announce(cache: FilterCache) -> None:
    """Announce the cache that an attention module has just updated."""
    _announced.cache = weakref.ref(cache)


def clear() -> None:
    """Drop an announcement of another forward, of a model to which nothing is applied."""
    _announced.cache = None


def take(layer: int, batch: int, k_len: int) -> FilterCache | None:
    """Return the cache of a filter layer's call; None if it is not one of new_cache().

    Args:
        layer: the layer's number.
        batch: sequences of the call.
        k_len: keys of the call.

    Raises:
        HeadwiseError: the keys are not those of the cache that was updated last.
    """
    reference = _announced.cache
    if reference is None:
        return None
    _announced.cache = None
    cache = reference()
    if cache is None:
        return None
    keys = cache.keys.shape
    if (cache.number, keys[0], keys[2]) != (layer, batch, k_len):
        raise HeadwiseError(
            f"filter layer {layer} must attend to the keys of its own cache, got {batch} sequences "
            f"of {k_len} keys after an update of layer {cache.number} with {keys[0]} of {keys[2]}"
        )
    return cache
