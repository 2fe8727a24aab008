"""Memory that torch hands out uninitialised is NaN, also to native code."""

from __future__ import annotations

import torch


def test_empty_memory_is_nan() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.empty(1000, dtype=dtype).isnan().all()
    assert (torch.empty(1000, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
