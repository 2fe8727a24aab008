"""Which heads of a layer this process has: transformers' tensor parallelism shards them (torchrun, DistributedConfig).

A model that is not parallel has all of them. The artifact counts heads globally; what a process plans and keeps is for
its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from artifacts import HeadwiseError
from runtime.layers import heads_of


@dataclass(frozen=True)
class Shard:
    """Which of all query heads and of all KV heads; `group`: the processes that share them, None for one."""

    heads: slice
    kv_heads: slice
    group: Any = None

    @property
    def num_kv_heads(self) -> int:
        return int(self.kv_heads.stop - self.kv_heads.start)


def size_of(model: Any) -> int:
    """Over how many processes a model's heads are sharded."""
    size = getattr(model, "tp_size", None)
    if size is None and getattr(model, "_device_mesh", None) is not None:
        # transformers 5.16 says so only where it was asked for.
        size = getattr(getattr(model.config, "distributed_config", None), "tp_size", None)
    return int(size or 1)


def shard_of(model: Any, module: nn.Module) -> Shard:
    """The heads of an attention layer in this process.

    Raises:
        HeadwiseError: heads do not divide among the processes, or the layer is sharded in another way.
    """
    size, (num_heads, num_kv_heads) = size_of(model), heads_of(model)
    if size == 1:
        return Shard(slice(0, num_heads), slice(0, num_kv_heads))
    if num_heads % size or num_kv_heads % size:
        raise HeadwiseError(
            f"{num_heads} query and {num_kv_heads} KV heads do not divide among {size} processes: "
            "use a number that divides both"
        )
    q, k = (getattr(getattr(module, name, None), "weight", None) for name in ("q_proj", "k_proj"))
    if q is None or k is None or not all(is_sharded(w) and any(p.is_shard(0) for p in w.placements) for w in (q, k)):
        raise HeadwiseError(
            f"{type(module).__name__} is not sharded by q_proj and k_proj over its heads: "
            "tensor parallelism is served where transformers' plan does that"
        )
    return Shard(_rows(q, num_heads, size), _rows(k, num_kv_heads, size), q.device_mesh.get_group())


def agreed(scores: Tensor, group: Any) -> Tensor:
    """The largest of each score over the processes of a group; the same where there is no group."""
    if group is not None:
        scores = scores.contiguous()
        torch.distributed.all_reduce(scores, op=torch.distributed.ReduceOp.MAX, group=group)
    return scores


def is_sharded(weight: Any) -> bool:
    """Whether a parameter is a DTensor, parts of which may be elsewhere."""
    return hasattr(weight, "device_mesh") and hasattr(weight, "to_local")


def local_elements(weight: Any, at: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Of a DTensor's elements at these indices (n) each: those that this process answers for, and which they are.

    An element that several processes hold is answered for by one of them.
    """
    shape, offset = _here(weight)
    first = all(
        placement.is_shard() or weight.device_mesh.get_local_rank(axis) == 0
        for axis, placement in enumerate(weight.placements)
    )
    inside = torch.full_like(at[0], first, dtype=torch.bool)
    for dim, index in enumerate(at):
        inside &= (index >= offset[dim]) & (index < offset[dim] + shape[dim])
    places = tuple(index[inside] - offset[dim] for dim, index in enumerate(at))
    return weight.to_local()[places], inside


def _here(weight: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of a DTensor the part in this process: its shape, and where it begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)


def _rows(weight: Any, heads: int, size: int) -> slice:
    """Heads whose rows of the projection are here."""
    shape, offset = _here(weight)
    dim = weight.shape[0] // heads
    if shape[0] * size != weight.shape[0] or offset[0] % dim:
        raise HeadwiseError(f"a projection of {tuple(weight.shape)} is not sharded by whole heads")
    return slice(offset[0] // dim, (offset[0] + shape[0]) // dim)
