"""Memory of a cache in bytes and tokens: any of transformers' caches, and Headwise's."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Cache
    from transformers.cache_utils import CacheLayerMixin

# Where a new cache keeps the keys and values of sparse layers.
OFFLOADS = ("auto", "never", "packed")


class LayerMemory(NamedTuple):
    """Memory of one layer.

    Attributes:
        device: bytes on the device.
        seen: slots, padding included.
        cached: cached tokens, the most of any head.
        mean_cached: the mean. A layer in a context bank keeps all tokens there; its bytes are in
            the report's totals only.
    """

    layer: int
    device: int
    seen: int
    cached: int
    mean_cached: float


class MemoryReport(NamedTuple):
    """Memory of a cache by layer, and bytes in all on the device and in the context bank."""

    layers: tuple[LayerMemory, ...]
    device: int
    bank: int


class CacheBytes(NamedTuple):
    """Bytes of a cache on the devices that compute, and in the context bank in CPU memory."""

    device: int
    bank: int


def cache_bytes(cache: Cache) -> CacheBytes:
    """Count the bytes allocated by any cache of transformers.

    Headroom for new tokens is included.
    """
    banks = {
        id(bank): bank
        for layer in cache.layers
        if (bank := getattr(layer, "bank", None)) is not None
    }
    slots = sum(bank.slots.nbytes for bank in banks.values() if bank.slots is not None)
    return CacheBytes(_held(*cache.layers) + slots, sum(bank.nbytes for bank in banks.values()))


def memory_report(cache: Cache) -> MemoryReport:
    """Report the memory of any cache of transformers, by layer and in total.

    Headroom for new tokens is included in bytes, padding in slots seen.
    """
    layers = []
    for number, layer in enumerate(cache.layers):
        seen = int(layer.get_seq_length())
        cached, mean = _cached(layer, seen)
        layers.append(LayerMemory(number, _held(layer), seen, cached, mean))
    return MemoryReport(tuple(layers), *cache_bytes(cache))


def _cached(layer: CacheLayerMixin, seen: int) -> tuple[int, float]:
    """Tokens that a layer caches: the most of any head, and the mean."""
    policies = getattr(layer, "policies", None)
    if policies is not None:
        return max((max(policy.cached) for policy in policies), default=0), layer.mean_cached
    if hasattr(layer, "tensors"):
        # It keeps every token.
        return seen, float(seen)
    keys = getattr(layer, "keys", None)
    count = 0
    if keys is not None and keys.numel():
        count = keys.shape[-2]
    return count, float(count)


def _held(*layers: CacheLayerMixin) -> int:
    """Bytes that these layers hold on the device that computes; tensors may share them."""
    tensors: list[Tensor | None] = []
    for layer in layers:
        policies = getattr(layer, "policies", None)
        if policies is not None:
            tensors += [tensor for policy in policies for tensor in policy.tensors().values()]
        elif hasattr(layer, "tensors"):
            tensors += layer.tensors()
        else:
            tensors += [getattr(layer, name, None) for name in ("keys", "values")]
    memories = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())
