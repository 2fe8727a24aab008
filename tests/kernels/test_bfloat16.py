"""Interpreted kernels round bfloat16 as a device does; their own cases would not show it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.bfloat16 import rounded, widened

ROOT = Path(__file__).parents[2]


def test_bits_are_rounded_to_nearest_and_ties_to_even() -> None:
    numbers = torch.tensor(
        [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -255.5, 3.4e38, float("inf")]
    )
    even = torch.tensor([1.0, 1 + 2**-6, 1 + 2**-7, -256.0, float("inf"), float("inf")])
    assert widened(rounded(numbers.numpy())).tolist() == even.tolist()


@pytest.mark.slow
def test_a_kernel_gives_what_torch_gives_to_the_bit() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.bfloat16_cases"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["device"] == {"products": 0, "sums": 0, "odd": 0}
    # The day that Triton does it itself, what stands in for it can go.
    assert all(found["interpreter"].values())
