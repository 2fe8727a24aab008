"""The Triton kernels of decode compile for every target without a GPU: no spilled registers, shared memory that fits.

python tests/kernels/test_decode_compile.py [TARGET ...]    the whole matrix, a line for each build
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

from kernels.decode import triton as backend
from tests.kernels.triton_builds import HEAD_DIMS, TARGETS, Build, _compile
from tests.sampling import sampled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted in this process"),
]
VARIANTS: dict[str, dict[str, Any]] = {
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
    "64 rows, tokens, pages of 16, scores": {"q_len": 16, "tokens": True, "page": 16, "scores": "sum"},
}


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
    from kernels.decode import triton_kernel

    heads, kv_heads, length = 8, 2, 2048
    q = torch.empty(1, heads, q_len, head_dim, dtype=dtype)
    k, v = (torch.empty(1, kv_heads, length, dim, dtype=dtype) for dim in (head_dim, v_dim or head_dim))
    table = None
    if page is not None:
        k, v = (x.reshape(length // page, page, kv_heads, -1) for x in (k, v))
        table = torch.zeros(1, length // page, dtype=torch.int32)
    ends = torch.ones(1, dtype=torch.int32) if bounds else None
    launches, *_ = backend.prepare(
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
    return {
        one.kernel: _compile(
            getattr(triton_kernel, one.kernel), one.arguments, one.constants, one.options, target
        )
        for one in launches
    }  # fmt: skip


def faults(built: dict[str, Build], target: str, dtype: torch.dtype) -> list[str]:
    """What is wrong with the builds; four words spilled are the compiler's choice, float32, for checking, may spill."""
    found = []
    for name, build in built.items():
        if build.shared > TARGETS[target][1]:
            found.append(f"{name}: {build.shared} bytes of shared memory, the device has {TARGETS[target][1]}")
        if build.spilled > 16 and dtype != torch.float32:
            found.append(f"{name}: {build.spilled} bytes spilled at {build.registers} registers")
    split = built["split_kernel"].assembly
    if not any(unit in split for unit in ("mma.sync", "wgmma", "tcgen05.mma", "v_mfma")) and dtype != torch.float32:
        found.append("no matrix unit")
    if target.startswith("sm") and "cp.async" not in split:
        found.append("keys are not copied asynchronously")
    return found


SCORED, WIDEST = list(VARIANTS)[2], list(VARIANTS)[-1]
BUILDS = [
    *[("sm_90", 128, name, torch.bfloat16) for name in VARIANTS],
    *[(target, 128, SCORED, torch.float16) for target in ("sm_80", "sm_100", "gfx942")],
    *[(target, 256, WIDEST, torch.bfloat16) for target in TARGETS],
    ("sm_80", 64, WIDEST, torch.bfloat16),
    ("sm_90", 80, SCORED, torch.bfloat16),
    ("sm_90", 64, "all keys", torch.float32),
]
# An NVIDIA and an AMD GPU, the build with the most in it.
KEPT = [("sm_90", 128, SCORED, torch.bfloat16), ("gfx942", 128, SCORED, torch.float16)]


@pytest.mark.parametrize(("target", "head_dim", "variant", "dtype"), sampled(BUILDS, *KEPT))
def test_kernels_compile_without_spills(target: str, head_dim: int, variant: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    assert faults(compile_decode(target, head_dim=head_dim, dtype=dtype, **VARIANTS[variant]), target, dtype) == []


@pytest.mark.exhaustive
def test_value_dim_may_differ() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    built = compile_decode("sm_90", head_dim=192, v_dim=128, dtype=torch.bfloat16)
    assert faults(built, "sm_90", torch.bfloat16) == []


def test_a_growing_cache_compiles_nothing_new() -> None:
    """What changes from step to step is neither compiled in nor looked at for divisibility."""
    pytest.importorskip("triton", reason="triton is not installed")
    from kernels.decode import triton_kernel

    def launches(length: int, chosen: int) -> list[backend.Launch]:
        q = torch.empty(2, 6, 1, 64)
        k = torch.empty(2, 2, length, 64)
        tokens = torch.zeros(2, chosen, dtype=torch.int32)
        rest = dict.fromkeys(("starts", "ends", "softcap", "block_table"))
        return backend.prepare(q, k, k, tokens=tokens, window=length, scale=1.0, scores="sum", **rest)[0]  # type: ignore[arg-type]

    for before, after in zip(launches(1024, 512), launches(4097, 701), strict=True):
        assert before.constants == after.constants and before.options == after.options
        for parameter in getattr(triton_kernel, before.kernel).params:
            values = [launch.arguments.get(parameter.name) for launch in (before, after)]
            if isinstance(values[0], int) and values[0] != values[1] and not parameter.do_not_specialize:
                assert all(value % 16 == 0 for value in values), parameter.name


def main(targets: list[str]) -> int:
    wrong = 0
    for target in targets or TARGETS:
        for dtype in (torch.bfloat16, torch.float32):
            for head_dim in HEAD_DIMS:
                for name, variant in VARIANTS.items():
                    built = compile_decode(target, head_dim=head_dim, dtype=dtype, **variant)
                    fault = faults(built, target, dtype)
                    wrong += bool(fault)
                    sizes = "; ".join(
                        f"{kernel} {one.shared} B shared, {one.registers} registers, {one.spilled} B spilled"
                        for kernel, one in built.items()
                    )
                    print(f"{target:8}{head_dim:4} {str(dtype)[6:]:9} {name}: {sizes} {fault or ''}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
