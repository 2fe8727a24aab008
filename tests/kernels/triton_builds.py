"""Cross-compiles the Triton kernel without a GPU and reads what became of it; as a script it prints the whole matrix.

python tests/kernels/triton_builds.py [TARGET ...]    one line for each target, head dim, dtype and variant
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.attention import triton as backend
from kernels.attention.triton_launch import Launch, choose
from kernels.index import SparseIndex, num_tiles
from kernels.patterns import triton as builders
from kernels.ragged import Ragged

# Architecture -> what Triton calls it and the shared memory a program may have there, in bytes.
TARGETS: dict[str, tuple[tuple[str, int | str, int], int]] = {
    "sm_80": (("cuda", 80, 32), 163 * 1024),
    "sm_89": (("cuda", 89, 32), 99 * 1024),
    "sm_90": (("cuda", 90, 32), 227 * 1024),
    "sm_100": (("cuda", 100, 32), 227 * 1024),
    "gfx942": (("hip", "gfx942", 64), 64 * 1024),
}
HEAD_DIMS = (64, 80, 96, 128, 256)
# What an index has beside its own tiles, and how K and V lie. "lists" are served one query tile a program.
VARIANTS: dict[str, dict[str, Any]] = {
    "diagonals": {},
    "diagonals, columns": {"columns": True},
    "lists": {"diagonals": False, "tiles": True},
    "diagonals, lists, columns": {"tiles": True, "columns": True},
    "diagonals, columns, soft-cap": {"columns": True, "softcap": 30.0},
    "diagonals, columns, pages of 16": {"columns": True, "page": 16},
    "diagonals, columns, pages of 64": {"columns": True, "page": 64},
    "diagonals, columns, tail": {"columns": True, "tail": True},
    "lists, tail": {"diagonals": False, "tiles": True, "tail": True},
    "diagonals, columns, window": {"columns": True, "window": 100},
    "diagonals, columns, ragged": {"columns": True, "ragged": True},
    "a serving engine": {"columns": True, "tail": True, "ragged": True, "page": 16},
    "everything": {
        "tiles": True,
        "columns": True,
        "tail": True,
        "window": 100,
        "ragged": True,
        "page": 16,
        "softcap": 30.0,
    },
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
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


@dataclass(frozen=True, kw_only=True)
class Build:
    """What the compiler made: bytes of shared memory, registers and bytes spilled a thread, and the assembly."""

    shared: int
    registers: int
    spilled: int
    assembly: str

    def fault(self, target: str, dtype: torch.dtype) -> str | None:
        """What is wrong with it; None if nothing is.

        Four words spilled are let pass: compilers do that by choice, to fit another program on a multiprocessor, and
        which build it hits differs from one release to the next. float32 may spill more.
        """
        limit = TARGETS[target][1]
        if self.shared > limit:
            return f"{self.shared} bytes of shared memory, the device has {limit}"
        if dtype != torch.float32 and self.spilled > 16:
            return f"{self.spilled} bytes spilled at {self.registers} registers"
        if MATRIX_UNIT[target] not in self.assembly and not (dtype == torch.float32 and "sm" in target):
            return f"no {MATRIX_UNIT[target]}"
        if target.startswith("sm") and "cp.async" not in self.assembly:
            return "keys are not copied asynchronously"
        return None


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
) -> tuple[Launch, Build]:
    """Compile the launch that a call of this sort would make on the target."""
    from kernels.attention.triton_kernel import sparse_attention_kernel

    architecture = "hip" if target.startswith("gfx") else target
    v_dim = v_dim or head_dim
    launch = choose(architecture, dim=max(head_dim, v_dim), itemsize=dtype.itemsize, has_tiles=tiles)
    heads, kv_heads, length = 4, 2, 256
    entries = torch.arange(2, dtype=torch.int32)
    index = SparseIndex(
        q_len=length,
        k_len=length,
        diagonals=entries[: 2 if diagonals else 1].expand(1, heads, -1),
        tiles=torch.zeros(1, heads, num_tiles(length), int(tiles), dtype=torch.int32),
        columns=torch.zeros(1, heads, int(columns), dtype=torch.int32),
        dense_tail=(64,) * heads if tail else (),
        window=window,
        ragged=Ragged.left_padded([length], length, length) if ragged else None,
    )
    q = torch.empty(1, heads, length, head_dim, dtype=dtype)
    k, v = (torch.empty(1, kv_heads, length, dim, dtype=dtype) for dim in (head_dim, v_dim))
    table = None
    if page is not None:
        k, v = (x.reshape(length // page, page, kv_heads, -1) for x in (k, v))
        table = torch.zeros(1, length // page, dtype=torch.int32)
    call = backend.prepare(q, k, v, index, scale=1.0, softcap=softcap, block_table=table, launch=launch)
    return launch, _compile(
        sparse_attention_kernel, call.arguments, call.constants, backend.build_options(launch), target
    )


def compile_estimate(target: str, *, head_dim: int, dtype: torch.dtype, window: int | None = None) -> dict[str, Build]:
    """Compile the launches of vertical-slash's estimate for a layer on the target, by name."""
    from kernels.patterns import triton_kernels

    q, k = (torch.empty(1, heads, 256, head_dim, dtype=dtype) for heads in (4, 2))
    architecture = "hip" if target.startswith("gfx") else target
    heads, last = range(4), [128] * 4
    plan = builders.plan(q, k, heads, last, scale=1.0, window=window, target=architecture)
    some = torch.empty(1, 4, 256)
    launches = {
        "normalisers": plan.normalisers(some),
        "masses": plan.masses(0, some, some, some, some),
        "more masses": plan.masses(1, some, some, some, some),
    }
    return {
        name: _compile(getattr(triton_kernels, one.kernel), one.arguments, one.constants, one.options, target)
        for name, one in launches.items()
    }


def compile_choice(target: str, *, n: int) -> Build:
    """Compile the choice of the best out of n on the target."""
    from kernels.patterns import triton_kernels

    _, one = builders.choice(torch.empty(1, 4, 3, n), [50] * 4, forced=1)
    return _compile(triton_kernels.best_places_kernel, one.arguments, one.constants, one.options, target)


def _compile(
    function: Any, arguments: dict[str, Any], constants: dict[str, Any], options: dict[str, Any], target: str
) -> Build:
    import triton
    from triton.backends.compiler import GPUTarget

    source = _source(function, arguments, constants)
    kernel = triton.compile(source, target=GPUTarget(*TARGETS[target][0]), options=options)
    if target.startswith("gfx"):
        assembly = kernel.asm["amdgcn"]
        registers, spilled = _number(r"\.vgpr_count:", assembly), _number(r"\.private_segment_fixed_size:", assembly)
        assert spilled or not _number(r"\.vgpr_spill_count:", assembly)
    else:
        usage = _resource_usage(triton.__file__, kernel.asm["cubin"])
        registers, spilled = _number("REG:", usage), _number("STACK:", usage) + _number("LOCAL:", usage)
        assembly = kernel.asm["ptx"]
    return Build(shared=kernel.metadata.shared, registers=registers, spilled=spilled, assembly=assembly)


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


def _resource_usage(triton_file: str, cubin: bytes) -> str:
    tool = Path(triton_file).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True)
    return done.stdout + done.stderr


def _number(label: str, text: str) -> int:
    found = re.search(label + r"\s*(\d+)", text)
    assert found, f"{label} not in the compiler's report"
    return int(found[1])


def main(targets: list[str]) -> int:
    faults = 0
    print(f"{'target':8}{'D':>4}  {'dtype':9} {'rows':>4} {'keys':>4} {'warps':>5} {'shared':>7} {'regs':>4} spilled")
    for target in targets or TARGETS:
        for head_dim in HEAD_DIMS:
            for dtype in (torch.bfloat16, torch.float16):
                for name, variant in VARIANTS.items():
                    how, built = compile_for(target, head_dim=head_dim, dtype=dtype, **variant)
                    fault = built.fault(target, dtype)
                    faults += fault is not None
                    print(
                        f"{target:8}{head_dim:4}  {str(dtype)[6:]:9} {how.rows:4} {how.keys:4} {how.warps:5} "
                        f"{built.shared:7} {built.registers:4} {built.spilled:7}  {name} {fault or ''}",
                        flush=True,
                    )
                for name, built in compile_estimate(target, head_dim=head_dim, dtype=dtype).items():
                    fault = built.fault(target, dtype)
                    faults += fault is not None
                    print(
                        f"{target:8}{head_dim:4}  {str(dtype)[6:]:9} {'':14} "
                        f"{built.shared:7} {built.registers:4} {built.spilled:7}  {name} {fault or ''}",
                        flush=True,
                    )
    return faults


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
