"""Cross-compiles a Triton kernel without a GPU, and reads what became of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from profiling.gpu.machine_code import hot_loops

# Architecture -> what Triton calls it and the shared memory a program may have there, in bytes.
TARGETS: dict[str, tuple[tuple[str, int | str, int], int]] = {
    "sm_80": (("cuda", 80, 32), 163 * 1024),
    "sm_89": (("cuda", 89, 32), 99 * 1024),
    "sm_90": (("cuda", 90, 32), 227 * 1024),
    "sm_100": (("cuda", 100, 32), 227 * 1024),
    "gfx942": (("hip", "gfx942", 64), 64 * 1024),
}
# Those whose copy engine reads tiles by descriptors.
DESCRIBED = ("sm_90", "sm_100")
# Those that read float8_e4m3fn.
EIGHT_BITS = ("sm_89", "sm_90", "sm_100")
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
    """What the compiler made: bytes of shared memory, registers and bytes spilled a thread, assembly, and warps.

    machine: the machine code as nvdisasm shows it; empty for other vendors' targets.
    """

    shared: int
    registers: int
    spilled: int
    assembly: str
    warps: int
    machine: str

    @property
    def empty(self) -> bool:
        """Whether nothing is left but a trap, as where tensor memory did not suffice."""
        return "trap;" in self.assembly and "ld." not in self.assembly

    def fault(self, target: str, dtype: torch.dtype) -> str | None:
        """What is wrong with it; None if nothing is. float32, for checking, may spill."""
        limit = TARGETS[target][1]
        if self.empty:
            return "the compiler left only a trap"
        if self.shared > limit:
            return f"{self.shared} bytes of shared memory, the device has {limit}"
        if dtype != torch.float32:
            if self.spilled:
                return f"{self.spilled} bytes spilled at {self.registers} registers"
            if any(loop.local for loop in hot_loops(self.machine)):
                return "a hot loop reads or writes local memory"
        if MATRIX_UNIT[target] not in self.assembly and not (dtype == torch.float32 and "sm" in target):
            return f"no {MATRIX_UNIT[target]}"
        if target.startswith("sm") and "cp.async" not in self.assembly:
            return "keys are not copied asynchronously"
        return None


def compile_kernel(
    function: Any, arguments: dict[str, Any], constants: dict[str, Any], options: dict[str, Any], target: str
) -> Build:
    """Compile a kernel for a target from the arguments of a launch, of which only types and alignment count."""
    import triton
    from triton.backends.compiler import GPUTarget

    source = _source(function, arguments, constants)
    kernel = triton.compile(source, target=GPUTarget(*TARGETS[target][0]), options=options)
    if target.startswith("gfx"):
        assembly = kernel.asm["amdgcn"]
        registers, spilled = _number(r"\.vgpr_count:", assembly), _number(r"\.private_segment_fixed_size:", assembly)
        assert spilled or not _number(r"\.vgpr_spill_count:", assembly)
    else:
        usage = _tool("cuobjdump", "-res-usage", cubin=kernel.asm["cubin"])
        registers, spilled = _number("REG:", usage), _number("STACK:", usage) + _number("LOCAL:", usage)
        assembly = kernel.asm["ptx"]
    return Build(
        shared=kernel.metadata.shared,
        registers=registers,
        spilled=spilled,
        assembly=assembly,
        warps=kernel.metadata.num_warps,
        machine="" if target.startswith("gfx") else _tool("nvdisasm", "-c", cubin=kernel.asm["cubin"]),
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


def _tool(name: str, option: str, *, cubin: bytes) -> str:
    """What a tool that comes with Triton says of a binary."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, option, file.name], check=True, capture_output=True, text=True)
    return done.stdout + done.stderr


def _number(label: str, text: str) -> int:
    found = re.search(label + r"\s*(\d+)", text)
    assert found, f"{label} not in the compiler's report"
    return int(found[1])
