"""The decode benchmark measures what it says, and a wrong result is never given a speed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

from artifacts import HeadwiseError
from kernels.decode import Decoded, decode_attention
from profiling.speed import decode_speed
from profiling.speed.config import Size
from profiling.speed.decode_speed import DECODE_HEADER, decode_cells, measure_decode

SIZE = Size(length=300, head_dim=64, heads=6, kv_heads=2, dtype="float32", device="cpu")


def test_a_line_of_the_table() -> None:
    speed = measure_decode(SIZE, chosen=100, repeats=1)
    assert speed.all_bytes == 3 * speed.chosen_bytes == 2 * 2 * 300 * 64 * 4
    assert all(value > 0 for value in asdict(speed).values())
    assert speed.dense_seconds <= speed.sdpa_seconds
    cells = decode_cells(SIZE, speed)
    assert len(cells) == len(DECODE_HEADER) and cells[:4] == ["300", "64", "6/2", "100"]


@pytest.mark.parametrize("wrong", ["", " in its scores"])
def test_a_wrong_result_gets_no_speed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def slightly_off(*tensors: Any, **options: Any) -> Decoded:
        out, lse, scores = decode_attention(*tensors, **options)
        if options.get("backend") == "reference":
            return Decoded(out, lse, scores)
        return Decoded(out, lse, scores * 1.5) if wrong else Decoded(out * 1.1, lse, scores)

    monkeypatch.setattr(decode_speed, "decode_attention", slightly_off)
    with pytest.raises(HeadwiseError, match=f"decode over all keys is wrong{wrong}: largest error"):
        measure_decode(SIZE, chosen=100, repeats=1)


def test_every_way_in_torch_is_the_same_attention() -> None:
    q, k, v = torch.randn(1, 6, 1, 64), torch.randn(1, 2, 50, 64), torch.randn(1, 2, 50, 64)
    found = [run().reshape(1, 6, 1, 64) for run in decode_speed._in_torch(q, k, v).values()]
    assert len(found) == 3
    for out in found:
        torch.testing.assert_close(out, decode_attention(q, k, v).out, atol=1e-5, rtol=1e-5)
