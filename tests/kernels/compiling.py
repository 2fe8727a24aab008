"""Cross-compile launches without a GPU, and read the binaries."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.triton_calls import KernelCall

# Architecture -> what Triton calls it and the shared memory a program may have there, in bytes.
TARGETS = {
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
    torch.float64: "*fp64",
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

    def excess(self, target: str, dtype: torch.dtype, spilled: int = 0) -> str | None:
        """What the device does not have, None if it suffices. float32, for checking, may spill."""
        limit = TARGETS[target][1]
        if self.empty:
            return "the compiler left only a trap"
        if self.shared > limit:
            return f"{self.shared} bytes of shared memory, the device has {limit}"
        if dtype != torch.float32 and self.spilled > spilled:
            return f"{self.spilled} bytes spilled at {self.registers} registers"
        return None

    def fault(self, target: str, dtype: torch.dtype) -> str | None:
        """The fault of a build that multiplies tiles of keys, None if it has none."""
        if reason := self.excess(target, dtype):
            return reason
        if MATRIX_UNIT[target] not in self.assembly and not (
            dtype == torch.float32 and "sm" in target
        ):
            return f"no {MATRIX_UNIT[target]}"
        return self.waits(target)

    def waits(self, target: str) -> str | None:
        """The fault where an NVIDIA GPU does not copy keys ahead."""
        if target.startswith("sm") and "cp.async" not in self.assembly:
            return "keys are not copied asynchronously"
        return None


def compiled(call: KernelCall, target: str) -> Build:
    """Compile a launch for a target: of its arguments only types and alignment count."""
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = triton.compile(
        _source(call), target=GPUTarget(*TARGETS[target][0]), options=call.options
    )
    if target.startswith("gfx"):
        assembly = kernel.asm["amdgcn"]
        registers = _number(r"\.vgpr_count:", assembly)
        spilled = _number(r"\.private_segment_fixed_size:", assembly)
        assert spilled or not _number(r"\.vgpr_spill_count:", assembly)
    else:
        assembly = kernel.asm["ptx"]
        usage = _resources(kernel.asm["cubin"])
        registers = _number("REG:", usage)
        spilled = _number("STACK:", usage) + _number("LOCAL:", usage)
    return Build(
        shared=kernel.metadata.shared, registers=registers, spilled=spilled, assembly=assembly
    )


def _source(call: KernelCall) -> Any:
    """The kernel with the types and the divisibility that Triton would find in the arguments."""
    from triton.compiler import ASTSource

    signature = {}
    attributes = {}
    for place, parameter in enumerate(call.function.params):
        name = parameter.name
        if name in call.constants:
            signature[name] = "constexpr"
            continue
        value = call.arguments[name]
        if isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
            aligned = True
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            divides = isinstance(value, int) and value % 16 == 0
            aligned = divides and not parameter.do_not_specialize
        if aligned:
            attributes[(place,)] = [["tt.divisibility", 16]]
    assert signature.keys() == {**call.arguments, **call.constants}.keys()
    return ASTSource(call.function, signature, call.constants, attributes)


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
    match = re.search(label + r"\s*(\d+)", text)
    assert match, f"{label} not in the compiler's report"
    return int(match[1])
