"""Bars for the launches of a prefill and a decode step, counted in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import launches
from tests.kernels.launches import counting
from tests.processes import interpret

# Ours and torch's around them: no more than there are now.
BARS = {
    "first": (10, 70),
    "prefill": (10, 48),
    "decode, chosen keys": (2, 0),
    "decode, all keys, scores": (3, 0),
    "prompt, scores": (3, 0),
}


@pytest.mark.slow
def test_a_call_launches_little_waits_for_nothing_and_allocates_no_square() -> None:
    counted = interpret(launches.__name__)
    short, long = launches.LENGTHS
    for name, (ours, others) in BARS.items():
        counts, longer = (counted[f"{name}, {length}"] for length in launches.LENGTHS)
        for found in (counts, longer):
            assert len(found["ours"]) <= ours and found["torch"] <= others, (name, found)
            # What is laid out for a new length is laid out on the host, where it is read.
            at_first = (["_local_scalar_dense"],) if name.startswith("first") else ()
            assert found["waits"] in ([], *at_first), name
        assert longer["largest"] <= counts["largest"] * long // short, name
        assert longer["ours"] == counts["ours"], name
    # Heads with lists of tiles have a launch of their own.
    kernels = ["tables_kernel", *["sparse_attention_kernel"] * 2]
    assert counted[f"prefill, {short}"]["ours"][-3:] == kernels
    assert counted[f"prompt, scores, {short}"]["ours"] == [*kernels[:2], "column_sums_kernel"]


def test_what_waits_and_what_is_made_is_counted() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    with counting() as counts:
        x = torch.zeros(100)
        x.view(10, 10).T.add_(1)
        torch.empty(1000)
        float(x[0])
    assert counts.waits == ["_local_scalar_dense"] and counts.ours == []
    # zeros, add and the read; views and memory that nobody writes to launch nothing.
    assert counts.torch == 3 and counts.largest == 4000
