"""Attention with sums for any number of queries, and dropping the lowest token, against the reference and by hand."""

from __future__ import annotations

import pytest
import torch

from kernels.decode import MAX_QUERIES, reference
from kernels.scored import cpu, drop_lowest, ranks, scored_attention

needs_native = pytest.mark.skipif(not cpu.serves(torch.empty(1)), reason="no native code on this machine")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# B, H, G, Q, K, D, E
SIZES = [
    (2, 4, 2, 1, 70, 64, 64),
    (1, 4, 1, MAX_QUERIES, MAX_QUERIES, 16, 16),
    (2, 4, 2, 70, 70, 64, 64),
    (1, 9, 3, 100, 333, 64, 64),
    (1, 4, 1, 17, 65, 24, 40),
    (2, 2, 2, 600, 1201, 80, 80),
    (1, 4, 2, 64, 64, 16, 16),
    (1, 2, 1, 129, 640, 128, 64),
]


def inputs(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    batch, heads, kv_heads, q_len, k_len, dim, value_dim = sizes
    generator = torch.Generator().manual_seed(sum(sizes))
    shapes = ((batch, heads, q_len, dim), (batch, kv_heads, k_len, dim), (batch, kv_heads, k_len, value_dim))
    return tuple((torch.randn(*shape, generator=generator) * 1.5).to(dtype) for shape in shapes)


def expected(q, k, v, softcap=None):
    how = {"tokens": None, "starts": None, "ends": None, "window": None, "block_table": None}
    scale = q.shape[3] ** -0.5
    return reference.decode_attention(
        q.float(), k.float(), v.float(), scale=scale, softcap=softcap, scores="sum", **how
    )


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_out_lse_and_sums_are_those_of_full_attention(sizes, backend, dtype, softcap):
    if backend == "cpu" and not cpu.serves(torch.empty(1)):
        pytest.skip("no native code on this machine")
    q, k, v = inputs(sizes, dtype)
    for found, right in zip(
        scored_attention(q, k, v, softcap=softcap, backend=backend), expected(q, k, v, softcap), strict=True
    ):
        torch.testing.assert_close(found.float(), right, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@needs_native
@pytest.mark.parametrize("sizes", SIZES[2:], ids=str)
def test_every_engine_is_right(sizes):
    q, k, v = inputs(sizes, torch.bfloat16)
    right = expected(q, k, v)
    for engine in cpu.attention.engines(torch.bfloat16):
        found = cpu.scored_attention(q, k, v, scale=q.shape[3] ** -0.5, softcap=None, engine=engine)
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one.float(), other, atol=2e-2, rtol=2e-2)


def test_each_query_of_a_kv_head_adds_up_to_one():
    q, k, v = inputs(SIZES[3], torch.float32)
    sums = scored_attention(q, k, v).scores
    assert sums is not None
    torch.testing.assert_close(sums.sum(2), torch.full((1, 3), 300.0))


@needs_native
def test_sums_do_not_depend_on_the_threads():
    q, k, v = inputs((1, 6, 2, 500, 700, 32, 32), torch.float32)
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(scored_attention(q, k, v, backend="cpu"))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(one, another) for one, another in zip(found[0], other, strict=True))


def test_strides_are_read_as_they_are():
    """Slices of a cache with room, and queries whose heads come after their positions."""
    q, k, v = inputs(SIZES[3], torch.float32)
    right = scored_attention(q, k, v)
    room = [torch.cat([x, torch.full_like(x, torch.nan)], dim=2)[:, :, : x.shape[2]] for x in (k, v)]
    found = scored_attention(q.transpose(1, 2).contiguous().transpose(1, 2), *room)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


def test_more_queries_than_keys_are_refused():
    q, k, v = inputs((1, 2, 1, 30, 20, 8, 8), torch.float32)
    with pytest.raises(ValueError, match="got 30 queries and 20 keys"):
        scored_attention(q, k, v)
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        scored_attention(q[:, :, :20], k, v, backend="fast")


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_last_token_takes_the_row_of_the_lowest(dtype, backend):
    rows, room = 6, 9
    scores = torch.tensor([[3.0, 1.0, 2.0, 0.5, 9.0, 0.1], [0.2, 5.0, 0.3, 0.4, 0.0, 7.0]]).view(1, 2, rows)
    # Position 20 and on are the latest: the lowest score before them is in row 3 of the first head, 0 of the second.
    positions = torch.tensor([[0, 4, 7, 9, 20, 21], [2, 5, 8, 11, 20, 21]], dtype=torch.int32).view(1, 2, rows)
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
    torch.testing.assert_close(ranks(scores, positions, latest=9, queries=10)[0, 0, :3], torch.tensor([0.4, 0.6, 0.5]))
    for queries, victim in ((10, 0), (None, 2)):
        held = [torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), scores.clone(), positions.clone()]
        drop_lowest(*held, rows=4, latest=9, queries=queries, backend=backend)
        assert held[3][0, 0, victim] == 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": torch.zeros(1, 2, 9).double()}, "scores must be float32 and positions int32, got torch.float64"),
        ({"positions": torch.zeros(1, 2, 8, dtype=torch.int32)}, "shapes do not go together: .*\\(1, 2, 8\\)"),
        ({"keys": torch.zeros(1, 9, 2, 8).transpose(1, 2)}, "must be contiguous"),
        ({"rows": 10}, "rows must be 2 to 9, got 10"),
        ({"rows": 1}, "rows must be 2 to 9, got 1"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, message):
    held = {"keys": torch.zeros(1, 2, 9, 8), "values": torch.zeros(1, 2, 9, 4), "scores": torch.zeros(1, 2, 9)}
    held["positions"] = torch.zeros(1, 2, 9, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        drop_lowest(**{**held, "rows": 5, "latest": 1, **changes})


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
            drop_lowest(*tensors, rows=rows, latest=260, queries=300 if rows % 2 else None, backend=backend)
    for one, other in zip(*held, strict=True):
        assert torch.equal(one[:, :, :100], other[:, :, :100])
