"""Cross-compile the launches of calls of every sort without a GPU, and read the binaries."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.attention import triton as backend
from kernels.decode import triton as decode
from kernels.index import SparseIndex, lists, num_tiles
from kernels.patterns import triton as builders
from kernels.patterns.paged import Keys, Paged
from kernels.ragged import Ragged
from kernels.triton_calls import KernelCall

# Architecture -> what Triton calls it and the shared memory a program may have there, in bytes.
TARGETS: dict[str, tuple[tuple[str, int | str, int], int]] = {
    "sm_80": (("cuda", 80, 32), 163 * 1024),
    "sm_89": (("cuda", 89, 32), 99 * 1024),
    "sm_90": (("cuda", 90, 32), 227 * 1024),
    "sm_100": (("cuda", 100, 32), 227 * 1024),
    "gfx942": (("hip", "gfx942", 64), 64 * 1024),
}
# The instruction that multiplies matrices on each target.
MATRIX_UNIT = {
    "sm_80": "mma.sync",
    "sm_89": "mma.sync",
    "sm_90": "wgmma.mma_async",
    "sm_100": "tcgen05.mma",
    "gfx942": "v_mfma",
}
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


@dataclass(frozen=True, kw_only=True)
class Build:
    """A binary: bytes of shared memory, registers and bytes spilled a thread, assembly."""

    shared: int
    registers: int
    spilled: int
    assembly: str

    @property
    def empty(self) -> bool:
        """True if nothing is left but a trap, as where tensor memory did not suffice."""
        return "trap;" in self.assembly and "ld." not in self.assembly

    def fault(self, target: str, dtype: torch.dtype) -> str | None:
        """The fault of a build, None if it has none. float32, for checking, may spill."""
        limit = TARGETS[target][1]
        if self.empty:
            return "the compiler left only a trap"
        if self.shared > limit:
            return f"{self.shared} bytes of shared memory, the device has {limit}"
        if dtype != torch.float32 and self.spilled:
            return f"{self.spilled} bytes spilled at {self.registers} registers"
        if MATRIX_UNIT[target] not in self.assembly and not (
            dtype == torch.float32 and "sm" in target
        ):
            return f"no {MATRIX_UNIT[target]}"
        if target.startswith("sm") and "cp.async" not in self.assembly:
            return "keys are not copied asynchronously"
        return None


def compile_kernel(
    function: Any,
    arguments: dict[str, Any],
    constants: dict[str, Any],
    options: dict[str, Any],
    target: str,
) -> Build:
    """Compile a kernel for a target from a launch's arguments: only types and alignment count."""
    import triton
    from triton.backends.compiler import GPUTarget

    source = _source(function, arguments, constants)
    kernel = triton.compile(source, target=GPUTarget(*TARGETS[target][0]), options=options)
    if target.startswith("gfx"):
        assembly = kernel.asm["amdgcn"]
        registers, spilled = (
            _number(r"\.vgpr_count:", assembly),
            _number(r"\.private_segment_fixed_size:", assembly),
        )
        assert spilled or not _number(r"\.vgpr_spill_count:", assembly)
    else:
        usage = _resources(kernel.asm["cubin"])
        registers, spilled = (
            _number("REG:", usage),
            _number("STACK:", usage) + _number("LOCAL:", usage),
        )
        assembly = kernel.asm["ptx"]
    return Build(
        shared=kernel.metadata.shared,
        registers=registers,
        spilled=spilled,
        assembly=assembly,
    )


def _source(function: Any, arguments: dict[str, Any], constants: dict[str, Any]) -> Any:
    """The kernel with the types and the divisibility that Triton would find in the arguments."""
    from triton.compiler import ASTSource

    signature, attributes = {}, {}
    for place, parameter in enumerate(function.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
            continue
        value = arguments[name]
        if isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (
            isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
        ):
            attributes[(place,)] = [["tt.divisibility", 16]]
    assert signature.keys() == {**arguments, **constants}.keys()
    return ASTSource(function, signature, constants, attributes)


def _resources(cubin: bytes) -> str:
    """Resources of a binary, as the tool that comes with Triton prints them."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [tool, "-res-usage", file.name], check=True, capture_output=True, text=True
        )
    return done.stdout + done.stderr


def _number(label: str, text: str) -> int:
    found = re.search(label + r"\s*(\d+)", text)
    assert found, f"{label} not in the compiler's report"
    return int(found[1])


HEAD_DIMS = (64, 80, 96, 128, 256)
_SERVING: dict[str, Any] = {"columns": True, "tail": True, "ragged": True, "page": 16}
# What an index has beside its own tiles, and how K and V lie. "lists" are served one query tile a
# program.
VARIANTS: dict[str, dict[str, Any]] = {
    "diagonals": {},
    "diagonals, columns": {"columns": True},
    "lists": {"diagonals": False, "tiles": True},
    "diagonals, lists, columns": {"tiles": True, "columns": True},
    "diagonals, columns, pages of 64": {"columns": True, "page": 64},
    "lists, tail": {"diagonals": False, "tiles": True, "tail": True},
    "diagonals, columns, window": {"columns": True, "window": 100},
    "diagonals, columns, ragged": {"columns": True, "ragged": True},
    "skipping": {"skip": True},
    "parts of the keys": {"columns": True, "splits": 4},
    "a serving engine": _SERVING,
    "a serving engine, skipping": {**_SERVING, "skip": True},
    "a serving engine, fp8": {**_SERVING, "cache": torch.float8_e4m3fn},
    "everything": {**_SERVING, "tiles": True, "window": 100, "softcap": 30.0},
}
DECODE_VARIANTS: dict[str, dict[str, Any]] = {
    "all keys": {},
    "tokens, scores": {"tokens": True, "scores": "sum"},
    "tokens, pages of 16, bounds, window, soft-cap, scores": {
        "tokens": True,
        "page": 16,
        "bounds": True,
        "window": 100,
        "softcap": 30.0,
        "scores": "max",
    },
    "pages of 64, bounds": {"page": 64, "bounds": True},
    "64 rows": {"q_len": 16},
    "64 rows, tokens, pages of 16, scores": {
        "q_len": 16,
        "tokens": True,
        "page": 16,
        "scores": "sum",
    },
}


def compile_for(
    target: str,
    *,
    head_dim: int,
    dtype: torch.dtype,
    v_dim: int | None = None,
    diagonals: bool = True,
    tiles: bool = False,
    columns: bool = False,
    softcap: float | None = None,
    page: int | None = None,
    tail: bool = False,
    window: int | None = None,
    ragged: bool = False,
    skip: bool = False,
    splits: int = 1,
    cache: torch.dtype | None = None,
) -> Build:
    """Compile the launch that a call of this sort would make on the target.

    cache: the number format of keys and values, that of the queries where there is none.
    """
    architecture = "hip" if target.startswith("gfx") else target
    v_dim = v_dim or head_dim
    heads, kv_heads, length = 4, 2, 256
    entries = torch.arange(2, dtype=torch.int32)
    index = SparseIndex(
        q_len=length,
        k_len=length,
        diagonals=entries[: 2 if diagonals else 1].expand(1, heads, -1),
        **lists(torch.zeros(1, heads, num_tiles(length), int(tiles), dtype=torch.int32)),
        columns=torch.zeros(1, heads, int(columns), dtype=torch.int32),
        dense_tail=(64,) * heads if tail else (),
        window=window,
        skip=torch.zeros(1, heads) if skip else None,
        ragged=Ragged.left_padded([length], length, length) if ragged else None,
    )
    q = torch.empty(1, heads, length, head_dim, dtype=dtype)
    k, v = (
        torch.empty(1, kv_heads, length, dim, dtype=cache or dtype) for dim in (head_dim, v_dim)
    )
    table = None
    if page is not None:
        k, v = (x.reshape(length // page, page, kv_heads, -1) for x in (k, v))
        table = torch.zeros(1, length // page, dtype=torch.int32)
    how: dict[str, Any] = {"scale": 1.0, "softcap": softcap, "block_table": table}
    how["splits"] = splits
    call = backend.prepare(q, k, v, index, **how, target=architecture)[1]
    return _compile(call, target)


def _compile(call: KernelCall, target: str) -> Build:
    return compile_kernel(call.function, call.arguments, call.constants, call.options, target)


def compile_tables(target: str) -> Build:
    """Compile the launch that makes the attention kernel's tables; some heads have lists."""
    entries = torch.zeros(1, 4, 2, dtype=torch.int32)
    tiles = lists(torch.zeros(1, 4, 4, 1, dtype=torch.int32))
    index = SparseIndex(q_len=256, k_len=256, diagonals=entries, **tiles, columns=entries)
    return _compile(backend.tables(index, 2, None, alone=(1,)), target)


def compile_estimate(
    target: str,
    *,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None = None,
    page: int | None = None,
) -> dict[str, Build]:
    """Compile the launches that read queries and keys for a layer's index, by name."""
    q, k = (torch.empty(1, heads, 256, head_dim, dtype=dtype) for heads in (4, 2))
    where: Keys = k
    if page is not None:
        cache, table = (
            k.reshape(256 // page, page, 2, head_dim),
            torch.zeros(1, 256 // page, dtype=torch.int32),
        )
        where = Paged.of(cache, table, [256], dtype)
    architecture = "hip" if target.startswith("gfx") else target
    heads = range(4)
    plan, blocks = (
        builders.plan(q, where, heads, [last] * 4, scale=1.0, window=window, target=architecture)
        for last in (64, 128)
    )
    some = torch.empty(1, 4, 256)
    launches = {
        "means": builders.means(where, [0, 0, 1, 1], lead=0)[1],
        "normalisers": plan.normalisers(some),
        "masses": plan.masses(some, some, some, some),
        "normalisers of 128 queries": blocks.normalisers(some),
        "masses of 128 queries": blocks.masses(some, some, some, some),
    }
    return {name: _compile(one, target) for name, one in launches.items()}


def compile_pools(target: str, *, head_dim: int) -> dict[str, Build]:
    """Compile what chooses tiles by means of 16 positions on the target, by name."""
    x = torch.empty(1, 4, 256, head_dim, dtype=torch.bfloat16)
    means, call = builders.means(x, range(4), lead=0, pool=16)
    _, masses = builders.weighing(
        means,
        means,
        slice(0, 4),
        slice(0, 4),
        parts=4,
        present=range(16),
        first=0,
        reach=4,
        scale=1.0,
    )
    return {"means": _compile(call, target), "masses": _compile(masses, target)}


def compile_choice(target: str, *, n: int, ragged: bool = False) -> Build:
    """Compile the choice of the best out of n; ragged: sequences with ends and counts."""
    each = torch.empty(1, dtype=torch.int32) if ragged else None
    _, one = builders.choice(torch.empty(1, 4, 3, n), [50] * 4, forced=1, ends=each, counts=each)
    return _compile(one, target)


def compile_scores(
    target: str, *, head_dim: int, dtype: torch.dtype, softcap: float | None = None
) -> Build:
    """Compile the launch that adds up a prompt's probabilities on the target."""
    q, k = (torch.empty(1, heads, 256, head_dim, dtype=dtype) for heads in (4, 2))
    architecture = "hip" if target.startswith("gfx") else target
    call, _ = decode.prepare_sums(
        q, k, torch.empty(1, 4, 256), scale=1.0, softcap=softcap, target=architecture
    )
    return _compile(call, target)


def compile_decode(
    target: str,
    *,
    head_dim: int,
    dtype: torch.dtype,
    v_dim: int | None = None,
    q_len: int = 1,
    tokens: bool = False,
    page: int | None = None,
    bounds: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    scores: str = "none",
) -> dict[str, Build]:
    """Compile the launches that a call of this sort would make on the target, by name."""
    heads, kv_heads, length = 8, 2, 2048
    q = torch.empty(1, heads, q_len, head_dim, dtype=dtype)
    k, v = (
        torch.empty(1, kv_heads, length, dim, dtype=dtype) for dim in (head_dim, v_dim or head_dim)
    )
    table = None
    if page is not None:
        k, v = (x.reshape(length // page, page, kv_heads, -1) for x in (k, v))
        table = torch.zeros(1, length // page, dtype=torch.int32)
    ends = torch.ones(1, dtype=torch.int32) if bounds else None
    launches, *_ = decode.prepare(
        q,
        k,
        v,
        tokens=torch.zeros(1, 512, dtype=torch.int32) if tokens else None,
        starts=ends,
        ends=ends,
        window=window,
        scale=1.0,
        softcap=softcap,
        scores=scores,
        block_table=table,
        splits=4,
        target="hip" if target.startswith("gfx") else target,
    )
    return {one.kernel: _compile(one, target) for one in launches}
