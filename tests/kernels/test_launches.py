"""Bars for the launches of a prefill and a decode step, counted in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels import launches
from tests.kernels.launches import counting

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", launches.__name__],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["counts"]
    return found


@pytest.mark.slow
def test_a_layer_launches_little_and_waits_for_nothing(counted: dict[str, Any]) -> None:
    bars = {
        "vertical-slash": (6, 16), "A-shape": (2, 0), "A-shape and dense": (2, 8),
        "block-sparse": (5, 21),
        "all three": (10, 48), "one by mass": (8, 124),
    }  # fmt: skip
    for name, counts in counted.items():
        if name.startswith("first"):
            # What is laid out for a new length is laid out on the host, which is where it is read.
            assert counts["waits"] in ([], ["_local_scalar_dense"]), name
            ours, torch = (10, 70) if "all three" in name else (2, 22)
            assert len(counts["ours"]) == ours and counts["torch"] <= torch, name
            continue
        assert counts["waits"] == [], name
        if name.startswith("ragged"):
            # An index for each sequence, in the launches that it would take alone.
            ours, torch = (7 + 7 + 3, 102) if "all three" in name else (2, 20)
            assert len(counts["ours"]) == ours and counts["torch"] <= torch, name
        elif name.startswith("prefill"):
            # Heads with lists of tiles have a launch of their own.
            kinds = 2 if any(part in name for part in ("all three", "by mass")) else 1
            assert counts["ours"][-1 - kinds :] == [
                "tables_kernel",
                *["sparse_attention_kernel"] * kinds,
            ]
            # Ours and torch's around them: no more than there are now.
            ours, torch = bars[name.split(", ")[1]]
            assert len(counts["ours"]) <= ours and counts["torch"] <= torch, name
        elif name.startswith("prompt"):
            assert counts["ours"] == [
                "tables_kernel",
                "sparse_attention_kernel",
                "column_sums_kernel",
            ]
            assert counts["torch"] == 0, name
        else:
            assert len(counts["ours"]) == (3 if "scores" in name else 2) and counts["torch"] == 0, (
                name
            )


@pytest.mark.slow
def test_nothing_is_allocated_that_grows_with_the_square_of_the_length(
    counted: dict[str, Any],
) -> None:
    short, long = launches.LENGTHS
    for name, counts in counted.items():
        if name.endswith(f", {short}"):
            longer = counted[name.removesuffix(str(short)) + str(long)]
            assert longer["largest"] <= counts["largest"] * long // short, name
            assert longer["ours"] == counts["ours"], name


def test_what_waits_and_what_is_made_is_counted() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    import torch

    with counting() as counts:
        x = torch.zeros(100)
        x.view(10, 10).T.add_(1)
        torch.empty(1000)
        float(x[0])
    assert counts.waits == ["_local_scalar_dense"] and counts.ours == []
    # zeros, add and the read; views and memory that nobody writes to launch nothing.
    assert counts.torch == 3 and counts.largest == 4000
