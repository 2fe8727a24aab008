"""How fast a build of the attention kernel can be at most: its hot loop against the limits of the device.

A step of one program multiplies `queries` x `keys` twice, takes an exponential of each logit, issues the instructions
of its loop once a warp, reads its keys and values from the L2 cache, writes them to shared memory and reads what it
multiplies from there. Programs on one multiprocessor overlap; within a program Triton runs products and softmax one
after the other. The model knows no latency but one: a loop that does not copy its keys and values ahead waits for them
twice a step. It bounds from above. Limits of Blackwell and the MI300 are left out: not all of them have a source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kernels.attention import triton_parts
from kernels.index import TILE, num_tiles
from profiling.gpu.compiled import TARGETS, Build
from profiling.gpu.machine_code import Code

_REGISTERS, _WARPS, _SHARED_OF_A_PROGRAM = 65_536, 64, 1024
# Cycles until the L2 cache answers, on the A100 and the H100 (Luo et al. 2024, "Benchmarking and Dissecting the Nvidia
# Hopper GPU Architecture", table IV).
_L2_LATENCY = 262


@dataclass(frozen=True, kw_only=True)
class Device:
    """Limits a cycle and multiprocessor, and dense bf16 operations a second of the whole device.

    From NVIDIA's papers on the A100 and H100; the L2 cache's 5,120 bytes a cycle are the A100's, for both. Shared
    memory has 32 banks of 4 bytes (CUDA C++ Programming Guide, compute capability 9.0).

    product: what torch's product of 8192 x 8192 bf16 matrices of normal numbers reached on such a device (python -m
    profiling.gpu_report --steps device); None where none was there. A device that multiplies all the time does not
    keep the clock that `flops` is named for, and the units of its multiprocessors share one.
    """

    flops: float
    multiprocessors: int
    flops_a_cycle: int
    exponentials_a_cycle: int = 16
    instructions_a_cycle: int = 4
    l2_bytes_a_cycle: float = 5120.0
    memory_bytes: float = 3.35e12
    shared_bytes_a_cycle: int = 128
    product: float | None = None


DEVICES = {
    "sm_80": Device(flops=312e12, multiprocessors=108, flops_a_cycle=2048, memory_bytes=1.555e12),
    "sm_90": Device(flops=989e12, multiprocessors=132, flops_a_cycle=4096, product=798e12),
}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Operations a second at most, what bounds them, and the cycles a step that each limit asks for."""

    flops: float
    bound: str
    cycles: dict[str, float]


def programs(build: Build, target: str) -> int:
    """How many programs fit a multiprocessor of an NVIDIA device."""
    registers = -(-build.registers // 8) * 8 * 32 * build.warps
    # What one program may have is all but the kilobyte that the system takes.
    shared = TARGETS[target][1] + _SHARED_OF_A_PROGRAM
    return min(_REGISTERS // registers, _WARPS // build.warps, shared // (build.shared + _SHARED_OF_A_PROGRAM))


def predict(
    loop: Code, build: Build, target: str, *, queries: int, keys: int, dim: int, itemsize: int = 2
) -> Prediction:
    """What the build reaches at most on the device of that target (DEVICES); itemsize: bytes of a key's number."""
    device, resident = DEVICES[target], programs(build, target)
    work = 4.0 * queries * keys * dim
    tensor = work / device.flops_a_cycle
    read = 2.0 * keys * dim * itemsize
    issue = loop.instructions * build.warps / device.instructions_a_cycle
    cycles = {
        "tensor cores": tensor,
        "issue": issue,
        "exponentials": queries * keys / device.exponentials_a_cycle,
        "L2": read / (device.l2_bytes_a_cycle / device.multiprocessors),
        "shared memory": (loop.shared_bytes * build.warps / 4 + read) / device.shared_bytes_a_cycle,
        "products, then softmax": (tensor + issue) / resident,
    }
    if loop.async_copies and not loop.under_way:
        cycles["waiting for copies"] = (tensor + issue + 2 * _L2_LATENCY + cycles["L2"]) / resident
    bound = max(cycles, key=lambda name: cycles[name])
    return Prediction(flops=device.flops * tensor / cycles[bound], bound=bound, cycles=cycles)


def short_queries(cycles: float, *, at_once: int, rows: int, dim: int, target: str) -> Iterator[dict[str, Any]]:
    """What a few new tokens on a long past take at most, dense, of 32 query heads on 8, in one part and in several.

    cycles: of 128 keys of one program while the others of its multiprocessor run; at_once: programs of the device. Time
    is that of the waves of programs, or of reading keys and values once; parts are also written, read and put together.
    """
    device, heads, kv_heads = DEVICES[target], 32, 8
    clock = device.flops / (device.multiprocessors * device.flops_a_cycle)
    for new, past in ((64, 32_768), (64, 131_072), (512, 131_072), (1000, 131_072), (64, 1 << 20), (1000, 1 << 20)):
        programs, steps = heads * -(-num_tiles(new) // rows), (past + new) // (2 * TILE)
        found = {}
        for parts in (1, triton_parts.count(programs, steps, at_once)):
            waves = -(-programs * parts // at_once) * (-(-steps // parts) + triton_parts.OVERHEAD)
            scratch = 0 if parts == 1 else 2 * 4 * heads * parts * new * (dim + 2)
            read = 2 * 2 * kv_heads * (past + new) * dim
            found[parts] = max(waves * cycles / clock, read / device.memory_bytes) + scratch / device.memory_bytes
        yield {"new": new, "past": past, "programs": programs, "parts": parts, "one": found[1], "seconds": found[parts]}
