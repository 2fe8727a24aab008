"""The Triton kernel compiles for every target: no spills, shared memory that fits."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from kernels.attention.triton_launch import resident, serves
from tests.kernels.compiling import (
    TARGETS,
    VARIANTS,
    compile_choice,
    compile_estimate,
    compile_for,
    compile_scores,
    compile_tables,
    programs,
)
from tests.sampling import sampled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted in this process"
    ),
]
PAIRED, MIXED, SERVING = "diagonals, columns", "diagonals, lists, columns", "a serving engine"
BUILDS = [
    *[("sm_90", dim, PAIRED, torch.bfloat16) for dim in (64, 80, 96, 128, 256)],
    *[("sm_90", 128, name, torch.bfloat16) for name in VARIANTS if name != PAIRED],
    *[(target, 128, SERVING, torch.bfloat16) for target in ("sm_80", "sm_100", "gfx942")],
    ("sm_90", 128, PAIRED, torch.float16),
    ("sm_90", 64, "diagonals", torch.float32),
    *[
        (target, dim, PAIRED, torch.bfloat16)
        for target in ("sm_80", "sm_100", "gfx942")
        for dim in (64, 128, 256)
    ],
    *[(target, 128, MIXED, torch.float16) for target in ("sm_80", "sm_100", "gfx942")],
    *[("sm_89", dim, PAIRED, torch.bfloat16) for dim in (64, 128, 256)],
]
# Two NVIDIA GPUs and an AMD one, the build with the most in it.
KEPT = [(target, 128, SERVING, torch.bfloat16) for target in ("sm_80", "sm_90", "gfx942")]


@pytest.mark.parametrize(("target", "head_dim", "variant", "dtype"), sampled(BUILDS, *KEPT))
def test_kernel_compiles_without_spills(
    target: str, head_dim: int, variant: str, dtype: torch.dtype
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    _, built = compile_for(target, head_dim=head_dim, dtype=dtype, **VARIANTS[variant])
    assert built.fault(target, dtype) is None


WIDE = [
    *[(target, 512, torch.bfloat16) for target in TARGETS],
    *[(target, dim, torch.float32) for target in TARGETS for dim in (128, 256)],
]


@pytest.mark.parametrize(
    ("target", "head_dim", "dtype"), sampled(WIDE, ("gfx942", 512, torch.bfloat16))
)
def test_whatever_is_served_fits_the_device(target: str, head_dim: int, dtype: torch.dtype) -> None:
    """Beyond 256, and in float32, registers may spill."""
    pytest.importorskip("triton", reason="triton is not installed")
    _, built = compile_for(target, head_dim=head_dim, dtype=dtype, **VARIANTS[PAIRED])
    fits = built.shared <= TARGETS[target][1] and not built.empty
    assert fits == serves(target.replace("gfx942", "hip"), dim=head_dim, itemsize=dtype.itemsize)


PARTS = [
    ("sm_90", 128, {}),
    ("sm_90", 128, {"tail": True, "ragged": True, "page": 16}),
    *[("sm_90", dim, {}) for dim in (64, 256)],
    *[(target, 128, {}) for target in ("sm_80", "sm_89", "sm_100")],
]


@pytest.mark.parametrize(("target", "head_dim", "more"), sampled(PARTS, PARTS[1]))
def test_as_many_programs_as_keys_are_cut_for_fit(
    target: str, head_dim: int, more: dict[str, Any]
) -> None:
    """Two of four warps on a multiprocessor, where its shared memory is large enough for that."""
    pytest.importorskip("triton", reason="triton is not installed")
    launch, built = compile_for(
        target, head_dim=head_dim, dtype=torch.bfloat16, columns=True, splits=4, **more
    )
    shared = TARGETS[target][1] + 1024
    given = resident(launch, 4 * head_dim, 2 * head_dim, shared)
    assert given == (1 if launch.warps > 4 or target == "sm_89" else 2) <= programs(built, target)


@pytest.mark.exhaustive
def test_value_dim_may_differ() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    _, built = compile_for("sm_90", head_dim=192, v_dim=128, dtype=torch.bfloat16, columns=True)
    assert built.fault("sm_90", torch.bfloat16) is None


@pytest.mark.parametrize(
    ("target", "head_dim", "window", "page"),
    sampled(
        [
            *((target, 128, None, page) for target in TARGETS for page in (None, 64, 16)),
            *(
                ("sm_90", dim, window, page)
                for dim, window in ((256, None), (80, 9))
                for page in (None, 128, 16)
            ),
        ],
        ("sm_90", 80, 9, None),
        ("sm_90", 80, 9, 128),
    ),
)
def test_estimate_compiles_without_spills(
    target: str, head_dim: int, window: int | None, page: int | None
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    how: dict[str, Any] = {
        "head_dim": head_dim,
        "dtype": torch.bfloat16,
        "window": window,
        "page": page,
    }
    built = compile_estimate(target, **how)
    # Means are no products.
    assert built.pop("means").spilled == 0
    for name, one in built.items():
        assert one.fault(target, torch.bfloat16) is None, name


@pytest.mark.parametrize(
    ("target", "head_dim", "softcap"),
    sampled(
        [
            *((target, dim, None) for target in TARGETS for dim in (64, 80, 128, 256, 512)),
            ("sm_90", 128, 30.0),
        ],
        ("sm_90", 128, 30.0),
        ("gfx942", 512, None),
    ),
)
def test_scores_of_a_prompt_compile_without_spills(
    target: str, head_dim: int, softcap: float | None
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    built = compile_scores(target, head_dim=head_dim, dtype=torch.bfloat16, softcap=softcap)
    assert built.fault(target, torch.bfloat16) is None


@pytest.mark.parametrize(
    ("n", "target"),
    sampled([(n, target) for n in (129, 16_385) for target in TARGETS], (16_385, "sm_90")),
)
def test_choice_compiles_without_spills(target: str, n: int) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    assert (
        compile_choice(target, n=n).spilled == compile_choice(target, n=n, ragged=True).spilled == 0
    )


@pytest.mark.parametrize("target", sampled(list(TARGETS), "sm_90"))
def test_tables_compile_without_spills(target: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    assert compile_tables(target).spilled == 0
