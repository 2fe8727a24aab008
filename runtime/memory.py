"""What a cache holds, in bytes and in tokens: any of transformers' caches, and those that Headwise
makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Cache
    from transformers.cache_utils import CacheLayerMixin

# Where a new cache keeps keys and values that are not chosen.
OFFLOADS = ("auto", "never", "packed")


class LayerMemory(NamedTuple):
    """Bytes of one layer on the device, slots seen (padding included), and tokens kept: the most
    and the mean of heads.

    A layer in a context bank keeps all tokens there; its bytes are in the report's totals only.
    """

    layer: int
    device: int
    seen: int
    kept: int
    mean_kept: float


class MemoryReport(NamedTuple):
    """What a cache holds by layer, and bytes in all on the devices that compute and in CPU memory's
    context bank."""

    layers: tuple[LayerMemory, ...]
    device: int
    bank: int


class CacheBytes(NamedTuple):
    """Bytes of memory that a cache holds: on the devices that compute, and in the context bank in
    CPU memory."""

    device: int
    bank: int


def cache_bytes(cache: Cache) -> CacheBytes:
    """Bytes that any cache of transformers holds, room for new tokens included: what the allocator
    gave out for it."""
    banks = {
        id(bank): bank
        for layer in cache.layers
        if (bank := getattr(layer, "bank", None)) is not None
    }
    slots = sum(bank.slots.nbytes for bank in banks.values() if bank.slots is not None)
    return CacheBytes(_held(*cache.layers) + slots, sum(bank.nbytes for bank in banks.values()))


def memory_report(cache: Cache) -> MemoryReport:
    """What a cache holds: for each layer bytes, slots seen (padding included) and tokens kept, and
    bytes in all.

    Any cache of transformers does; bytes count the room for new tokens, as the allocator does.
    """
    layers = []
    for number, layer in enumerate(cache.layers):
        seen = int(layer.get_seq_length())
        policies = getattr(layer, "policies", None)
        if policies is not None:
            kept = max((policy.kept for policy in policies), default=0)
            mean = layer.mean_kept
        else:
            keys = getattr(layer, "keys", None)
            kept = (
                keys.shape[-2]
                if keys is not None and keys.numel()
                else seen
                if hasattr(layer, "bank")
                else 0
            )
            mean = float(kept)
        layers.append(LayerMemory(number, _held(layer), seen, kept, mean))
    return MemoryReport(tuple(layers), *cache_bytes(cache))


def _held(*layers: CacheLayerMixin) -> int:
    """Bytes that these layers hold on the device that computes; tensors may share them."""
    found: list[Tensor | None] = []
    for layer in layers:
        if (policies := getattr(layer, "policies", None)) is None:
            found += [getattr(layer, name, None) for name in ("keys", "values", "history")]
        else:
            found += [tensor for policy in policies for tensor in policy.tensors().values()]
    memories = [tensor.untyped_storage() for tensor in found if tensor is not None]
    return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())
