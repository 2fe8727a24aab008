"""Decode's Triton kernels compile for every target: no spills, shared memory that fits."""

from __future__ import annotations

import os

import pytest
import torch

from kernels.decode import triton as backend
from tests.kernels.compiling import DECODE_VARIANTS, TARGETS, Build, compile_decode, programs
from tests.sampling import sampled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted in this process"
    ),
]


def faults(built: dict[str, Build], target: str, dtype: torch.dtype) -> list[str]:
    """Faults of builds; four words spilled are the compiler's choice, float32 may spill."""
    found = []
    for name, build in built.items():
        if build.shared > TARGETS[target][1]:
            found.append(
                f"{name}: {build.shared} bytes of shared memory, the device has "
                f"{TARGETS[target][1]}"
            )
        if build.spilled > 16 and dtype != torch.float32:
            found.append(f"{name}: {build.spilled} bytes spilled at {build.registers} registers")
    split = built["split_kernel"].assembly
    if (
        not any(unit in split for unit in ("mma.sync", "wgmma", "tcgen05.mma", "v_mfma"))
        and dtype != torch.float32
    ):
        found.append("no matrix unit")
    if target.startswith("sm") and "cp.async" not in split:
        found.append("keys are not copied asynchronously")
    return found


SCORED, WIDEST = list(DECODE_VARIANTS)[2], list(DECODE_VARIANTS)[-1]
BUILDS = [
    *[("sm_90", 128, name, torch.bfloat16) for name in DECODE_VARIANTS],
    *[(target, 128, SCORED, torch.float16) for target in ("sm_80", "sm_100", "gfx942")],
    *[(target, 256, WIDEST, torch.bfloat16) for target in TARGETS],
    ("sm_80", 64, WIDEST, torch.bfloat16),
    ("sm_90", 80, SCORED, torch.bfloat16),
    ("sm_90", 64, "all keys", torch.float32),
]
# An NVIDIA and an AMD GPU, the build with the most in it.
KEPT = [("sm_90", 128, SCORED, torch.bfloat16), ("gfx942", 128, SCORED, torch.float16)]


@pytest.mark.parametrize(("target", "head_dim", "variant", "dtype"), sampled(BUILDS, *KEPT))
def test_kernels_compile_without_spills(
    target: str, head_dim: int, variant: str, dtype: torch.dtype
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    assert (
        faults(
            compile_decode(target, head_dim=head_dim, dtype=dtype, **DECODE_VARIANTS[variant]),
            target,
            dtype,
        )
        == []
    )


@pytest.mark.parametrize(
    ("head_dim", "variant"),
    sampled(
        [(dim, name) for dim in (64, 128, 256) for name in DECODE_VARIANTS],
        (128, SCORED),
        (128, "all keys"),
    ),
)
def test_as_many_programs_as_keys_are_cut_for_fit(head_dim: int, variant: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    how = DECODE_VARIANTS[variant]
    built = compile_decode("sm_90", head_dim=head_dim, dtype=torch.bfloat16, **how)["split_kernel"]
    build = backend.choose("sm_90", dim=head_dim, itemsize=2, rows=4 * how.get("q_len", 1))
    given = backend.resident(build, dim=head_dim, tokens="tokens" in how, paged="page" in how)
    # One after the other is as good as side by side, if all come as often.
    assert given % min(given, programs(built, "sm_90")) == 0


@pytest.mark.exhaustive
def test_value_dim_may_differ() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    built = compile_decode("sm_90", head_dim=192, v_dim=128, dtype=torch.bfloat16)
    assert faults(built, "sm_90", torch.bfloat16) == []


def test_a_growing_cache_compiles_nothing_new() -> None:
    """Sizes that change from step to step are neither constants nor looked at for divisibility."""
    pytest.importorskip("triton", reason="triton is not installed")

    def launches(length: int, chosen: int) -> list[backend.Launch]:
        q = torch.empty(2, 6, 1, 64)
        k = torch.empty(2, 2, length, 64)
        tokens = torch.zeros(2, chosen, dtype=torch.int32)
        rest = dict.fromkeys(("starts", "ends", "softcap", "block_table"))
        return backend.prepare(
            q, k, k, tokens=tokens, window=length, scale=1.0, scores="sum", **rest
        )[0]  # type: ignore[arg-type]

    for before, after in zip(launches(1024, 512), launches(4097, 701), strict=True):
        assert before.constants == after.constants and before.options == after.options
        for parameter in before.function.params:
            values = [launch.arguments.get(parameter.name) for launch in (before, after)]
            if (
                isinstance(values[0], int)
                and values[0] != values[1]
                and not parameter.do_not_specialize
            ):
                assert all(value % 16 == 0 for value in values), parameter.name
