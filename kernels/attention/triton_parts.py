"""Few queries on many keys on the GPU: into how many parts their keys are cut, and what puts the results together.

Shapes: B batch, H query heads, G KV heads, Q query length, E value dim, P parts.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kernels.attention.triton_launch import Launch
from kernels.index import TILE
from kernels.triton_calls import KernelCall

# Beyond so many programs for each that runs at a time the last ones keep a GPU waiting for too little to matter.
_WAVES = 4
# What a program and its part of the result cost, in steps of 128 keys.
OVERHEAD = 4
_MOST = 64
# Parts that combine_kernel reads at a time.
_COMBINED = 16
# Bytes that the system takes of a multiprocessor's shared memory for each program.
_SHARED_OF_A_PROGRAM = 1024


@functools.lru_cache(maxsize=1024)
def count(programs: int, steps: int, at_once: int) -> int:
    """Into how many parts the `steps` of every program are cut, where a device runs so many programs `at_once`.

    The time of a launch is taken to be that of its last wave: as many programs as run at once, one after the other.
    """
    if programs >= _WAVES * at_once:
        return 1
    most = max(1, min(_MOST, steps // (2 * OVERHEAD)))
    return min(range(1, most + 1), key=lambda parts: -(-programs * parts // at_once) * (-(-steps // parts) + OVERHEAD))


def few(programs: int, device: torch.device) -> bool:
    """Whether so many programs of four warps are too few for a GPU."""
    return device.type == "cuda" and programs < _WAVES * 2 * multiprocessors(device)


def at_once(build: Launch, key_bytes: int, query_bytes: int, device: torch.device) -> int:
    """How many programs a device runs at a time.

    key_bytes: of a key and its value; query_bytes: of a query.
    """
    return multiprocessors(device) * resident(build, key_bytes, query_bytes, _shared(device))


def resident(build: Launch, key_bytes: int, query_bytes: int, shared: int | None) -> int:
    """How many programs of a build a multiprocessor holds whose shared memory is so large; None: large enough.

    Registers suffice for two of four warps, or one of eight. Keys and values lie there stage by stage.
    """
    by_registers = max(1, 8 // build.warps)
    if shared is None:
        return by_registers
    held = build.rows * TILE * query_bytes + build.stages * build.keys * key_bytes
    return max(1, min(by_registers, shared // (held + _SHARED_OF_A_PROGRAM)))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many a device has; an interpreter is one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def _shared(device: torch.device) -> int | None:
    """Bytes of a multiprocessor of NVIDIA's; Triton copies less ahead on others, so that it does not bind there."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


def scratch(q: Tensor, num_kv_heads: int, v_dim: int, parts: int, *, holes: bool) -> dict[str, Tensor]:
    """Memory for maximum, sum and unnormalised output of each part of each query row; holes: some have none."""
    batch, num_heads, q_len, _ = q.shape
    shape = (batch, num_kv_heads, parts, num_heads // num_kv_heads * q_len)
    tops, totals = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    partial = torch.empty(*shape, v_dim, dtype=torch.float32, device=q.device)
    return {"tops": tops, "totals": totals.zero_() if holes else totals, "partial": partial}


def combine(
    arguments: dict[str, Any],
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    *,
    rows: int,
    splits: int,
    holes: bool = False,
) -> KernelCall:
    """What puts the parts together that a launch with these arguments leaves, of `rows` query rows of each KV head.

    holes: some rows belong to nobody, and have been written.
    """
    names = ("tops", "totals", "partial", "num_kv_heads", "q_len")
    dim = out.shape[-1]
    return KernelCall(
        module=f"{__package__}.triton_kernel",
        kernel="combine_kernel",
        grid=(lse.numel(),),
        arguments={
            **{name: arguments[name] for name in names}, "out": out, "lse": lse,
            "sinks": lse if sinks is None else sinks.float().contiguous(),
            "out_batch": out.stride(0), "out_head": out.stride(1), "out_row": out.stride(2),
            "rows": rows, "splits": splits,
        },
        constants={
            "E": dim, "BLOCK_E": max(16, 1 << (dim - 1).bit_length()), "SPLITS": _COMBINED, "SINKS": sinks is not None,
            "HOLES": holes,
        },
        options={"num_warps": 4},
    )  # fmt: skip
