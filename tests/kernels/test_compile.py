"""Triton's kernels compile for every target: no spills, shared memory that fits."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from kernels.attention.triton_launch import serves
from kernels.decode import triton as decode
from tests.kernels.compiling import (
    DECODE_VARIANTS,
    TARGETS,
    VARIANTS,
    Build,
    compile_choice,
    compile_decode,
    compile_estimate,
    compile_for,
    compile_scores,
    compile_tables,
)
from tests.sampling import sampled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted in this process"
    ),
]
HALF = torch.bfloat16
PAIRED = "diagonals, columns"
SERVING = "a serving engine"
BUILDS = [
    *[("sm_90", dim, PAIRED, HALF) for dim in (64, 80, 96, 128, 256)],
    *[("sm_90", 128, name, HALF) for name in VARIANTS if name != PAIRED],
    *[(target, 128, SERVING, HALF) for target in ("sm_80", "sm_100", "gfx942")],
    *[(target, dim, PAIRED, HALF) for target in TARGETS if target != "sm_90" for dim in (64, 256)],
    ("sm_90", 128, PAIRED, torch.float16),
    ("sm_90", 64, "diagonals", torch.float32),
]
# An NVIDIA and an AMD GPU, on one of them the build with the most in it.
KEPT = [("sm_90", 64, PAIRED, HALF), ("gfx942", 128, SERVING, HALF)]


@pytest.fixture(autouse=True)
def triton() -> None:
    pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize(("target", "head_dim", "variant", "dtype"), sampled(BUILDS, *KEPT))
def test_attention(target: str, head_dim: int, variant: str, dtype: torch.dtype) -> None:
    built = compile_for(target, head_dim=head_dim, dtype=dtype, **VARIANTS[variant])
    assert built.fault(target, dtype) is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(512, HALF), (128, torch.float32), (256, torch.float32)]
)
def test_whatever_is_served_fits_the_device(target: str, head_dim: int, dtype: torch.dtype) -> None:
    """Beyond 256, and in float32, registers may spill."""
    built = compile_for(target, head_dim=head_dim, dtype=dtype, **VARIANTS[PAIRED])
    fits = built.shared <= TARGETS[target][1] and not built.empty
    assert fits == serves(target.replace("gfx942", "hip"), dim=head_dim, itemsize=dtype.itemsize)


@pytest.mark.parametrize(
    ("target", "head_dim", "window", "page"),
    sampled(
        [
            *((target, 128, None, page) for target in TARGETS for page in (None, 64, 16)),
            *(("sm_90", 256, None, page) for page in (None, 16)),
            *(("sm_90", 80, 9, page) for page in (None, 128)),
        ],
        ("sm_90", 80, 9, 128),
    ),
)
def test_estimate(target: str, head_dim: int, window: int | None, page: int | None) -> None:
    built = compile_estimate(target, head_dim=head_dim, dtype=HALF, window=window, page=page)
    # Means are no products.
    assert built.pop("means").spilled == 0
    for name, one in built.items():
        assert one.fault(target, HALF) is None, name


@pytest.mark.parametrize(
    ("target", "head_dim", "softcap"),
    sampled(
        [
            *((target, dim, None) for target in TARGETS for dim in (64, 80, 128, 256, 512)),
            ("sm_90", 128, 30.0),
        ],
        ("sm_90", 128, 30.0),
    ),
)
def test_scores_of_a_prompt(target: str, head_dim: int, softcap: float | None) -> None:
    built = compile_scores(target, head_dim=head_dim, dtype=HALF, softcap=softcap)
    assert built.fault(target, HALF) is None


@pytest.mark.parametrize("target", sampled(list(TARGETS), "sm_90"))
def test_choice_and_tables(target: str) -> None:
    for n, ragged in ((16_385, False), (16_385, True), (129, False)):
        assert compile_choice(target, n=n, ragged=ragged).spilled == 0
    assert compile_tables(target).spilled == 0


def decode_faults(built: dict[str, Build], target: str, dtype: torch.dtype) -> list[str]:
    """Faults of builds; four words spilled are the compiler's choice, float32 may spill."""
    found = []
    for name, build in built.items():
        if build.shared > TARGETS[target][1]:
            found.append(f"{name}: {build.shared} of {TARGETS[target][1]} bytes of shared memory")
        if build.spilled > 16 and dtype != torch.float32:
            found.append(f"{name}: {build.spilled} bytes spilled at {build.registers} registers")
    split = built["split_kernel"].assembly
    units = ("mma.sync", "wgmma", "tcgen05.mma", "v_mfma")
    if dtype != torch.float32 and not any(unit in split for unit in units):
        found.append("no matrix unit")
    if target.startswith("sm") and "cp.async" not in split:
        found.append("keys are not copied asynchronously")
    return found


SCORED, WIDEST = list(DECODE_VARIANTS)[2], list(DECODE_VARIANTS)[-1]
DECODE_BUILDS = [
    *[("sm_90", 128, name, HALF) for name in DECODE_VARIANTS],
    *[(target, 128, SCORED, torch.float16) for target in ("sm_80", "sm_100", "gfx942")],
    *[(target, 256, WIDEST, HALF) for target in TARGETS],
    ("sm_80", 64, WIDEST, HALF),
    ("sm_90", 80, SCORED, HALF),
    ("sm_90", 64, "all keys", torch.float32),
]


@pytest.mark.parametrize(
    ("target", "head_dim", "variant", "dtype"),
    sampled(DECODE_BUILDS, ("sm_90", 128, SCORED, HALF)),
)
def test_decode(target: str, head_dim: int, variant: str, dtype: torch.dtype) -> None:
    built = compile_decode(target, head_dim=head_dim, dtype=dtype, **DECODE_VARIANTS[variant])
    assert decode_faults(built, target, dtype) == []


@pytest.mark.exhaustive
def test_value_dim_may_differ() -> None:
    sizes: dict[str, Any] = {"head_dim": 192, "v_dim": 128, "dtype": HALF}
    built = compile_for("sm_90", **sizes, columns=True)
    assert built.fault("sm_90", HALF) is None
    assert decode_faults(compile_decode("sm_90", **sizes), "sm_90", HALF) == []


def test_a_growing_cache_compiles_nothing_new() -> None:
    """Sizes that change from step to step are neither constants nor looked at for divisibility."""

    def launches(length: int, chosen: int) -> list[decode.Launch]:
        q = torch.empty(2, 6, 1, 64)
        k = torch.empty(2, 2, length, 64)
        tokens = torch.zeros(2, chosen, dtype=torch.int32)
        rest: Any = dict.fromkeys(("starts", "ends", "softcap", "block_table"))
        rest |= {"window": length, "scale": 1.0, "scores": "sum"}
        return decode.prepare(q, k, k, tokens=tokens, **rest)[0]

    for before, after in zip(launches(1024, 512), launches(4097, 701), strict=True):
        assert before.constants == after.constants and before.options == after.options
        for parameter in before.function.params:
            values = [launch.arguments.get(parameter.name) for launch in (before, after)]
            changes = isinstance(values[0], int) and values[0] != values[1]
            if changes and not parameter.do_not_specialize:
                assert all(value % 16 == 0 for value in values), parameter.name
