"""Builds of the Triton kernels for each kind of GPU, and the parts of few queries.

Shapes: B batch, H query heads, G KV heads, Q query length, E value dim, P parts.

Selected by the compiler's report (enough registers, enough shared memory) and by counting; on an
H100, at head dim 128, none of twelve others is faster by more than 2% (docs/gpu.md). A
multiprocessor of Hopper wants two warp groups at work, one in softmax, one multiplying. It reads a
tile of keys and values from the L2 cache for every `rows` * 64 queries: at rows = 1 that is 64
operations for each byte, for which the cache delivers a little over half of the matrix rate. With
128 keys a step the output is rescaled half as often as with 64, where registers and shared memory
suffice.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.index import TILE
from kernels.triton_calls import KernelCall, or_placeholder

# Triton reads the variable once, when a kernel is defined.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# With more waves of programs than this, the GPU idles for a negligible time in the last one.
_WAVES = 4
# Cost of a program and of its part of the result, in steps of 128 keys.
OVERHEAD = 4
_MOST = 64
# Parts that combine_kernel reads at a time.
_COMBINED = 16
_NARROWEST_VALUES = 64
# Bytes that the system takes of a multiprocessor's shared memory for each program.
_SHARED_OF_A_PROGRAM = 1024


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """A build: query tiles of a program, keys of a step, warps, and steps under way at once.

    A step of 128 keys is two tiles, wherever they lie. Two stages copy nothing ahead: a step's keys
    are waited for when the next one's are asked for.

    `registers` is a thread's limit; without one the compiler spills a few to fit another program on
    a multiprocessor.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    precision: str = "ieee"
    registers: int | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class KernelConfig:
    """Constants that are compiled into the attention kernel, no more than a call needs.

    d0 + d1 and e0 + e1 cover the head dim d and the value dim e (split, split_values). Fields that
    are not listed are those of a TileConfig, or flags for an argument of the call.

    Attributes:
        walk, tiles, columns: which entries some head of the launch has in addition to diagonal 0.
        page: tokens of a page, 0 for none.
        split: a program computes a part of its keys.
    """

    d: int
    d0: int
    d1: int
    e: int
    e0: int
    e1: int
    rows: int
    keys: int
    stages: int
    precision: str
    page: int
    walk: bool
    tiles: bool
    columns: bool
    tail: bool
    window: bool
    ragged: bool
    softcap: bool
    sinks: bool
    skip: bool
    subset: bool
    split: bool

    def __repr__(self) -> str:
        # Part of the names of compiled functions and of Triton's cache keys. Derived values are
        # included.
        return "_".join(str(value) for value in (*vars(self).values(), self.masked_keys))

    @property
    def plain(self) -> bool:
        """True for the least that is compiled: keys of a tensor by diagonals, whole rows."""
        more = (
            self.tiles,
            self.columns,
            self.tail,
            self.window,
            self.ragged,
            self.softcap,
            self.sinks,
            self.skip,
        )
        return not (self.page or self.subset or self.split or any(more))

    @property
    def masked_keys(self) -> int:
        """Keys of a step over columns or own tiles.

        Columns are looked up ahead in shared memory, too: in steps of 64 keys the parts would leave
        too little of it for a second program on a multiprocessor of Hopper.
        """
        limit = 64
        if self.split and self.columns and self.d0 > 64:
            limit = 32
        return min(limit, self.keys)


# Largest padded head dim -> the build with one query tile a program and, where it is expected to be
# faster, with two.
_Builds = dict[int, tuple[TileConfig, ...]]


def _one(keys: int, warps: int, stages: int, precision: str = "ieee", **more: Any) -> TileConfig:
    return TileConfig(rows=1, keys=keys, warps=warps, stages=stages, precision=precision, **more)


def _two(keys: int, warps: int, stages: int, **more: Any) -> TileConfig:
    return TileConfig(rows=2, keys=keys, warps=warps, stages=stages, registers=255, **more)


# Compute capability 9. Two tiles a program take eight warps, and one such program fills a
# multiprocessor; at small head dims three programs of one tile fit and hide each other's softmax,
# which saves more time than half the traffic.
_HOPPER_16: _Builds = {
    64: (_one(64, 4, 3),),
    128: (_one(64, 4, 3), _two(128, 8, 3)),
    256: (_one(32, 8, 3), _two(32, 8, 3)),
    512: (_one(16, 8, 2),),
}
# Every other one, 99 KiB in the smaller ones. The queries stay in registers: 32 keys a step leave
# room.
_OTHERS_16: _Builds = {128: (_one(32, 4, 3),), 256: (_one(32, 8, 2),), 512: (_one(16, 8, 2),)}
# float32 is for checking, not for speed, and may spill registers.
_CUDA_32: _Builds = {64: (_one(32, 8, 2),), 128: (_one(16, 4, 2),), 256: (_one(16, 8, 1),)}
# 64 KiB of shared memory.
_CDNA_16: _Builds = {128: (_one(32, 4, 2),), 256: (_one(16, 4, 2),), 512: (_one(16, 8, 1),)}
_CDNA_32: _Builds = {128: (_one(16, 4, 2),), 256: (_one(16, 4, 1),)}
# Small steps, so that an interpreted run makes more of them.
_INTERPRETER: _Builds = {512: (_one(32, 4, 1), _two(32, 4, 1))}


def unavailable(device: torch.device) -> str | None:
    """The reason why no Triton kernel runs on a device; None if one does.

    Looks for triton only if the device is a GPU.
    """
    if device.type != "cuda" and not _INTERPRETED:
        return f"it serves tensors on a GPU, not on {device.type}"
    return _missing(device)


@functools.cache
def _missing(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            return f"it needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    return None


def architecture(device: torch.device) -> str:
    """Architecture that a device's kernels are compiled for: "sm_90", "hip", "interpreter"."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip is not None:
        return "hip"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def dtype_unsupported(k: Tensor) -> str | None:
    """The reason why keys of this dtype cannot be read on their device; None where they can."""
    target = architecture(k.device)
    if k.dtype == torch.float8_e4m3fn and (
        target == "hip" or (target.startswith("sm_") and int(target[3:]) < 89)
    ):
        return f"float8_e4m3fn needs compute capability 8.9, this GPU is {target}"
    return None


def select_config(target: str, *, dim: int, itemsize: int, has_tiles: bool) -> TileConfig:
    """Build for an architecture and the larger head dim; with lists one query tile a program."""
    if target == "interpreter":
        builds = _INTERPRETER
    elif target == "hip" and itemsize == 4:
        builds = _CDNA_32
    elif target == "hip":
        builds = _CDNA_16
    elif itemsize == 4:
        builds = _CUDA_32
    elif target.startswith("sm_9"):
        builds = _HOPPER_16
    else:
        builds = _OTHERS_16
    config, *two = next(builds for widest, builds in builds.items() if dim <= widest)
    if two and not has_tiles:
        config = two[0]
    if itemsize == 4:
        config = replace(config, precision=precision_of_float32(target, dim))
    return config


def precision_of_float32(target: str, dim: int) -> str:
    """Precision of products of float32, as `tl.dot` names it.

    Three tf32 products are as exact as one of fp32, which Triton does without the matrix units;
    beyond a head dim of 128 they do not fit in shared memory. On an H100 Triton 3.6 multiplies tf32
    wrongly in some shapes, and reads beyond shared memory.
    """
    if target in ("hip", "interpreter") or target.startswith("sm_9") or dim > 128:
        return "ieee"
    return "tf32x3"


def serves(target: str, *, dim: int, itemsize: int) -> bool:
    """True if a build fits: all but float32 wider than 256.

    Blackwell's tensor memory does not hold logits and an output wider than 256: the compiler leaves
    a trap there.
    """
    if dim > 256 and target.startswith(("sm_10", "sm_11")):
        return False
    return itemsize == 2 or dim <= 256 or target == "interpreter"


def split(dim: int, widest: int = 256, narrowest: int = 16) -> tuple[int, int]:
    """Split a head dim into two power-of-two widths, the second 0 or at least `narrowest`.

    80 = 64 + 16.
    """
    whole = max(16, 1 << (dim - 1).bit_length())
    if dim <= 16:
        return whole, 0
    first = whole // 2
    second = max(narrowest, 1 << (dim - first - 1).bit_length())
    if whole > widest or first + second < whole:
        return first, second
    return whole, 0


def split_values(dim: int, widest: int = 256) -> tuple[int, int]:
    """Split a value dim; the second width is at least 64 (80 -> 128, 192 = 128 + 64).

    With 16 or 32 columns Triton 3.6 computes wrong values on an H100, or reads out of bounds.
    """
    return split(dim, widest, _NARROWEST_VALUES)


def build_options(config: TileConfig) -> dict[str, Any]:
    """Triton's own options; fused multiply-adds are named, since their default will change."""
    options: dict[str, Any] = {
        "num_warps": config.warps,
        "num_stages": config.stages,
        "enable_fp_fusion": True,
    }
    if config.registers is not None:
        options["maxnreg"] = config.registers
    return options


@functools.lru_cache(maxsize=1024)
def count(programs: int, steps: int, at_once: int) -> int:
    """Parts to cut the `steps` of each program into on a device that runs `at_once` programs.

    The time of a launch is taken to be that of its last wave: as many programs as run at once, one
    after the other.
    """
    if programs >= _WAVES * at_once:
        return 1
    limit = max(1, min(_MOST, steps // (2 * OVERHEAD)))
    return min(
        range(1, limit + 1),
        key=lambda parts: -(-programs * parts // at_once) * (-(-steps // parts) + OVERHEAD),
    )


def underfills(programs: int, device: torch.device) -> bool:
    """True if these programs, of four warps each, are too few for a GPU."""
    return device.type == "cuda" and programs < _WAVES * 2 * multiprocessors(device)


def concurrent_programs(
    build: TileConfig, key_bytes: int, query_bytes: int, device: torch.device
) -> int:
    """Programs that a device runs at a time.

    Args:
        build: the tile sizes and stages of a program.
        key_bytes: of a key and its value.
        query_bytes: of a query.
        device: where the programs run.
    """
    return multiprocessors(device) * occupancy(build, key_bytes, query_bytes, _shared(device))


def occupancy(build: TileConfig, key_bytes: int, query_bytes: int, shared: int | None) -> int:
    """Programs of a build that a multiprocessor holds; None: its shared memory is large enough.

    Registers suffice for two of four warps, or one of eight. Keys and values lie there stage by
    stage.
    """
    by_registers = max(1, 8 // build.warps)
    if shared is None:
        return by_registers
    held = build.rows * TILE * query_bytes + build.stages * build.keys * key_bytes
    return max(1, min(by_registers, shared // (held + _SHARED_OF_A_PROGRAM)))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; an interpreter has one."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _shared(device: torch.device) -> int | None:
    """Shared bytes of NVIDIA's multiprocessor; elsewhere Triton copies less ahead."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


def scratch(
    q: Tensor, num_kv_heads: int, v_dim: int, parts: int, *, holes: bool
) -> dict[str, Tensor]:
    """Maxima, sums and unnormalised outputs of each part of each query row, with holes or not."""
    batch, num_heads, q_len, _ = q.shape
    shape = (batch, num_kv_heads, parts, num_heads // num_kv_heads * q_len)
    tops, totals = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    partial = torch.empty(*shape, v_dim, dtype=torch.float32, device=q.device)
    if holes:
        totals.zero_()
    return {"tops": tops, "totals": totals, "partial": partial}


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
    """The launch that merges the parts of `rows` query rows of each KV head.

    Args:
        arguments: of the attention kernel; those of `scratch` among them.
        out: (B, H, Q, E), written to.
        lse: (B, H, Q) fp32, written to.
        sinks: (H,) fp32, learned sinks, None for none.
        rows: query rows of a KV head.
        splits: parts of each row.
        holes: some rows belong to nobody, and have been written.
    """
    names = ("tops", "totals", "partial", "num_kv_heads", "q_len")
    dim = out.shape[-1]
    return KernelCall(
        module=f"{__package__}.triton_small_kernels",
        kernel="combine_kernel",
        grid=(lse.numel(),),
        arguments={
            **{name: arguments[name] for name in names}, "out": out, "lse": lse,
            "sinks": or_placeholder(sinks, lse),
            "out_batch": out.stride(0), "out_head": out.stride(1), "out_row": out.stride(2),
            "rows": rows, "splits": splits,
        },
        constants={
            "E": dim, "BLOCK_E": max(16, 1 << (dim - 1).bit_length()), "SPLITS": _COMBINED,
            "SINKS": sinks is not None,
            "HOLES": holes,
        },
        options={"num_warps": 4},
    )  # fmt: skip
