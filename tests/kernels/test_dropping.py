"""Scores of a prompt, their ranks, and dropping the lowest token, by hand."""

from __future__ import annotations

import pytest
import torch

from kernels.decode.dropping import drop_lowest, ranks, serves

needs_native = pytest.mark.skipif(
    not serves(torch.empty(1)), reason="no native code on this machine"
)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_last_token_takes_the_row_of_the_lowest(dtype, backend):
    rows, room = 6, 9
    scores = torch.tensor([[3.0, 1.0, 2.0, 0.5, 9.0, 0.1], [0.2, 5.0, 0.3, 0.4, 0.0, 7.0]]).view(
        1, 2, rows
    )
    # Position 20 and on are the latest: the lowest score before them is in row 3 of the first head,
    # 0 of the second.
    positions = torch.tensor([[0, 4, 7, 9, 20, 21], [2, 5, 8, 11, 20, 21]], dtype=torch.int32).view(
        1, 2, rows
    )
    scores, positions = (torch.nn.functional.pad(x, (0, room - rows)) for x in (scores, positions))
    keys, values = torch.randn(1, 2, room, 8).to(dtype), torch.randn(1, 2, room, 4).to(dtype)
    right = [x.clone() for x in (keys, values, scores, positions)]
    for head, victim in enumerate((3, 0)):
        for x in right:
            x[0, head, victim] = x[0, head, rows - 1]
    drop_lowest(keys, values, scores, positions, rows=rows, latest=20, backend=backend)
    for found, one in zip((keys, values, scores, positions), right, strict=True):
        assert torch.equal(found, one)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_ranks_are_divided_by_how_many_queries_saw_a_token(backend):
    scores = torch.tensor([[[4.0, 3.0, 1.0, 0.1]]])
    positions = torch.tensor([[[0, 5, 8, 9]]], dtype=torch.int32)
    torch.testing.assert_close(
        ranks(scores, positions, latest=9, queries=10)[0, 0, :3], torch.tensor([0.4, 0.6, 0.5])
    )
    for queries, victim in ((10, 0), (None, 2)):
        held = [torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), scores.clone(), positions.clone()]
        drop_lowest(*held, rows=4, latest=9, queries=queries, backend=backend)
        assert held[3][0, 0, victim] == 9


@needs_native
def test_native_code_and_torch_drop_the_same():
    generator = torch.Generator().manual_seed(0)
    held = []
    for _ in range(2):
        generator.manual_seed(0)
        keys, values = (torch.randn(2, 3, 300, 16, generator=generator) for _ in range(2))
        scores = torch.rand(2, 3, 300, generator=generator)
        positions = torch.arange(300, dtype=torch.int32).expand(2, 3, -1).contiguous()
        held.append([keys, values, scores, positions])
    for rows in range(300, 100, -1):
        for tensors, backend in zip(held, ("cpu", "reference"), strict=True):
            drop_lowest(
                *tensors, rows=rows, latest=260, queries=300 if rows % 2 else None, backend=backend
            )
    for one, other in zip(*held, strict=True):
        assert torch.equal(one[:, :, :100], other[:, :, :100])
