"""Refusals of the op and the dispatcher, and odd but honest input.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.dispatch as dispatch
from kernels.attention import cpu, sparse_attention
from kernels.index import PAD, SparseIndex, lists
from kernels.patterns import LayerPlan, make
from kernels.ragged import Ragged


def inputs(
    heads: int = 2, kv_heads: int = 1, length: int = 200, **options: Any
) -> tuple[Tensor, Tensor, Tensor, SparseIndex]:
    torch.manual_seed(0)
    q = torch.randn(1, heads, length, 64, **options)
    k, v = (
        torch.randn(1, kv_heads, length, 64, **options),
        torch.randn(1, kv_heads, length, 64, **options),
    )
    patterns = [make("vertical_slash", vertical=70, slash=64), make("dense")] * (heads // 2)
    return q, k, v, LayerPlan(patterns, kv_heads).build(q, k)


@pytest.fixture
def fresh_notes() -> Iterator[None]:
    """Forget what has been said once."""
    dispatch.say_once.cache_clear()
    yield
    dispatch.say_once.cache_clear()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"dense_tail": (1,)}, r"dense_tail must be \(\) or 2 counts, got \(1,\)"),
        ({"dense_tail": (1, -1)}, r"dense_tail must be \(\) or 2 counts, got \(1, -1\)"),
        (
            {"ragged": Ragged.left_padded([200, 100], 200, 200)},
            r"index is for 1 sequences of up to \(200, 200\) .*, its ragged batch has 2 of up to "
            r"\(200, 200\)",
        ),
        (
            {"ragged": Ragged.left_padded([100], 200, 200)},
            r"its ragged batch has 1 of up to \(100, 100\)",
        ),
    ],
)
def test_the_index_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    q, k, v, index = inputs()
    with pytest.raises(ValueError, match=message):
        sparse_attention(q, k, v, replace(index, **change))


@pytest.mark.parametrize(
    ("ragged", "message"),
    [
        (
            Ragged.packed([0, 150, 201], [0, 150, 201]),
            r"sequence 1 has its queries in rows 150 to 201 of batch element 0, q is \(1, 2, 200, "
            r"64\)",
        ),
        (
            Ragged.packed([0, 100, 200], [0, 100, 201]),
            r"sequence 1 has its keys in rows 100 to 201, k is",
        ),
        (
            Ragged.left_padded([100, 200], 200, 200),
            "sequence 1 has its queries in rows 0 to 200 of batch element 1",
        ),
    ],
)
def test_sequences_must_lie_in_the_tensors(ragged: Ragged, message: str) -> None:
    q, k, v, index = inputs()
    with pytest.raises(ValueError, match=message):
        LayerPlan([make("dense")] * 2, 1).build(q, k, ragged=ragged)
    two = replace(
        index,
        q_len=max(ragged.q_lens),
        k_len=max(ragged.k_lens),
        ragged=ragged,
        **{name: torch.cat([getattr(index, name)] * 2) for name in ("diagonals", "columns")},
        offsets=torch.cat([index.offsets] * 2)[:, :, : max(-(-n // 64) for n in ragged.k_lens) + 1],
    )
    with pytest.raises(ValueError, match=message):
        sparse_attention(q, k, v, two)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (
            {"q_lens": (5,), "k_lens": (4,)},
            "sequence 0: q_len must be between 1 and k_len=4, got 5",
        ),
        (
            {"q_lens": (0,), "k_lens": (4,)},
            "sequence 0: q_len must be between 1 and k_len=4, got 0",
        ),
        ({"q_lens": (1, 1), "k_lens": (4,)}, "must have one entry for each sequence"),
        (
            {"q_lens": (1,), "k_lens": (4,), "k_starts": (-1,)},
            r"starts must not be negative, got \(0, 0, -1\)",
        ),
    ],
)
def test_a_ragged_batch_names_what_is_wrong(lengths: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ragged(**{"rows": (0,), "q_starts": (0,), "k_starts": (0,)} | lengths)


def test_a_page_that_is_not_there_is_refused() -> None:
    q, k, v, index = inputs(length=100)
    caches = [x.transpose(1, 2).reshape(2, 50, 1, 64) for x in (k, v)]
    expected = sparse_attention(q, k, v, index)
    assert torch.equal(sparse_attention(q, *caches, index, block_table=int32(0, 1)[None]), expected)
    for page in (2, -1):
        with pytest.raises(ValueError, match=f"page {page} is none of the 2 pages"):
            sparse_attention(q, *caches, index, block_table=int32(0, page)[None], backend="cpu")
    for table in (int32(0)[None], int32(0, 1), torch.zeros(1, 2)):
        with pytest.raises(
            ValueError, match=r"the block table must be int32 \(1, at least 2\), got torch"
        ):
            sparse_attention(q, *caches, index, block_table=table)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 200, 64)}, "q, k and v must be 4-D .*, got 3, 4, 4-D"),
        (
            {"q": torch.zeros(2, 2, 200, 64)},
            r"shapes do not go together: q \(2, 2, 200, 64\), k \(1, 1, 200, 64\)",
        ),
        ({"q": torch.zeros(1, 2, 200, 80)}, "shapes do not go together"),
        ({"v": torch.zeros(1, 1, 199, 64)}, "shapes do not go together"),
        ({"v": torch.zeros(1, 2, 200, 64)}, "shapes do not go together"),
        (
            {"k": torch.zeros(1, 3, 200, 64), "v": torch.zeros(1, 3, 200, 64)},
            "2 query heads do not divide into 3 KV heads",
        ),
        (
            {"k": torch.zeros(1, 0, 200, 64), "v": torch.zeros(1, 0, 200, 64)},
            "2 query heads do not divide into 0 KV heads",
        ),
        (
            {"q": torch.zeros(1, 2, 200, 0), "k": torch.zeros(1, 1, 200, 0)},
            "head dims must be positive, got 0 and 64",
        ),
        ({"v": torch.zeros(1, 1, 200, 0)}, "head dims must be positive, got 64 and 0"),
        (
            {"q": torch.zeros(1, 2, 201, 64)},
            "query length must be between 1 and key length 200, got 201",
        ),
        (
            {"q": torch.zeros(1, 2, 0, 64)},
            "query length must be between 1 and key length 200, got 0",
        ),
        (
            {"k": torch.zeros(1, 1, 200, 64).half()},
            "must share a floating dtype, got torch.float32, torch.float16",
        ),
        (
            {n: torch.zeros(1, 1, 200, 64).int() for n in "qkv"},
            "must share a floating dtype, got torch.int32",
        ),
        ({"v": torch.zeros(1, 1, 200, 64, device="meta")}, "must share a device, got cpu, meta"),
        (
            {"q": torch.zeros(1, 2, 100, 64)},
            r"index is for \(B, Q, K\) = \(1, 200, 200\), the call has \(1, 100, 200\)",
        ),
        ({"q": torch.zeros(1, 3, 200, 64)}, "index is for 2 heads, q has 3"),
        (
            {"out": torch.zeros(1, 2, 200, 32)},
            r"out must be torch.float32 \(1, 2, 200, 64\) .* got .* \(1, 2, 200, 32\)",
        ),
        ({"scale": 0.0}, "scale must be a positive finite number, got 0.0"),
        ({"scale": float("nan")}, "scale must be a positive finite number, got nan"),
        ({"softcap": 0.0}, "softcap must be a positive finite number, got 0.0"),
        ({"softcap": float("inf")}, "softcap must be a positive finite number, got inf"),
        ({"backend": "cuda"}, "unknown backend 'cuda'; known: auto, .*cpu.*, reference"),
        (
            {n: torch.zeros(1, 2 if n == "q" else 1, 200, 64).double() for n in "qkv"}
            | {"backend": "cpu"},
            "backend 'cpu' cannot serve this call: it serves float32, float16 and bfloat16, not "
            "torch.float64",
        ),
        (
            {"q": torch.zeros(1, 2, 200, 64, requires_grad=True), "backend": "cpu"},
            "backend 'cpu' cannot serve this call: it has no backward pass",
        ),
    ],
)
def test_the_op_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    q, k, v, index = inputs()
    with pytest.raises(ValueError, match=message):
        sparse_attention(**({"q": q, "k": k, "v": v, "index": index} | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tiles": torch.zeros(1, 2, 4, 0, dtype=torch.int32)},
            r"tiles must be \(any width\), got",
        ),
        ({"offsets": torch.zeros(1, 2, 4, dtype=torch.int64)}, r"offsets must be \(1, 2, 5\), got"),
        (
            {"columns": torch.zeros(1, 1, 5, dtype=torch.int32)},
            r"columns must be \(1, 2, any width\), got",
        ),
        ({"columns": torch.zeros(1, 2, 5)}, "columns must be int32, got torch.float32"),
        (
            {"columns": torch.zeros(1, 2, 0, dtype=torch.int32, device="meta")},
            "columns must be on cpu, got meta",
        ),
    ],
)
def test_an_index_of_the_wrong_shape_is_not_read(change: dict[str, Tensor], message: str) -> None:
    q, k, v, index = inputs()
    with pytest.raises(ValueError, match=message):
        sparse_attention(q, k, v, replace(index, **change))


def test_a_broken_index_reads_and_writes_nothing_outside() -> None:
    """Entries that the op refuses, handed past it: native code stops at wild columns and tiles."""
    q, k, v, index = inputs()
    how: dict[str, Any] = {"scale": 0.125, "softcap": None}
    wild = replace(index, columns=int32(-5, 3).expand(1, 2, 2))
    with pytest.raises(ValueError, match="column -5 is none of the 200 keys"):
        cpu.sparse_attention(q, k, v, wild, **how)
    with pytest.raises(ValueError, match="columns must not be negative, got -5"):
        sparse_attention(q, k, v, wild)
    with pytest.raises(ValueError, match="column -7 is none of the 200 keys"):
        cpu.sparse_attention(
            q, k, v, replace(index, columns=int32(3, 80, -7, 90).expand(1, 2, 4)), **how
        )
    wild = replace(
        index,
        diagonals=int32(0, -(2**31), PAD).expand(1, 2, 3),
        **lists(int32(-1, -(10**9), PAD).expand(1, 2, 4, 3)),
        columns=int32(3, PAD).expand(1, 2, 2),
    )
    beyond = replace(wild, offsets=torch.tensor([-5, 10**12, 3, -(10**12), 1]).expand(1, 2, 5))
    for broken in (wild, beyond):
        out, _ = cpu.sparse_attention(q, k, v, broken, **how)
        assert out.isfinite().all()
    with pytest.raises(
        ValueError, match="offsets must be ascending from 0 to at most 24, the entries of tiles"
    ):
        sparse_attention(q, k, v, beyond)


def test_padding_says_nothing() -> None:
    q, k, v, index = inputs()
    pad = torch.nn.functional.pad
    padded = replace(
        index,
        diagonals=pad(index.diagonals, (0, 3), value=PAD),
        **lists(pad(index.listed(), (0, 2), value=PAD)),
        columns=pad(index.columns, (0, 70), value=PAD),
    )
    padded.validate()
    for backend in ("cpu", "reference"):
        assert torch.equal(
            sparse_attention(q, k, v, padded, backend=backend),
            sparse_attention(q, k, v, index, backend=backend),
        )


def test_entries_may_be_views() -> None:
    q, k, v, index = inputs()
    expected = sparse_attention(q, k, v, index, backend="cpu")
    wide = torch.stack([index.columns, index.columns + 1], dim=-1)[..., 0]
    one = index.diagonals[:, :1].expand(1, 2, -1)
    viewed = replace(index, columns=wide)
    assert torch.equal(sparse_attention(q, k, v, viewed, backend="cpu"), expected)
    same = replace(index, diagonals=one)
    reference = sparse_attention(q, k, v, same, backend="reference")
    torch.testing.assert_close(sparse_attention(q, k, v, same, backend="cpu"), reference)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_no_batch_gives_no_output(backend: str) -> None:
    q, k, v, _ = inputs()
    index = LayerPlan([make("dense")] * 2, 1).build(q[:0], k[:0])
    out, lse = sparse_attention(q[:0], k[:0], v[:0], index, return_lse=True, backend=backend)
    assert out.shape == (0, 2, 200, 64) and lse.shape == (0, 2, 200)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key", [3, 100, 150])
def test_a_bad_key_reaches_only_those_who_see_it(
    backend: str, dtype: torch.dtype, key: int
) -> None:
    q, k, v, index = inputs(dtype=dtype)
    clean = sparse_attention(q, k, v, index, backend=backend)
    k[0, 0, key, 5] = float("nan")
    out, lse = sparse_attention(q, k, v, index, return_lse=True, backend=backend)
    seen = index.to_mask()[..., key]
    assert out[seen].isnan().all() and lse[seen].isnan().all()
    assert torch.equal(out[~seen], clean[~seen])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_bad_query_reaches_only_itself(backend: str) -> None:
    q, k, v, index = inputs()
    clean = sparse_attention(q, k, v, index, backend=backend)
    q[0, 1, 77] = float("nan")
    out = sparse_attention(q, k, v, index, backend=backend)
    assert out[0, 1, 77].isnan().all()
    others = torch.ones(1, 2, 200, dtype=torch.bool)
    others[0, 1, 77] = False
    assert torch.equal(out[others], clean[others])


def test_an_infinite_score_is_nan_as_in_softmax() -> None:
    q, k, v, index = inputs()
    q[0, 0, :, 5], k[0, 0, 3, 5] = 1.0, float("inf")
    out = sparse_attention(q, k, v, index, backend="cpu")
    assert out[0, 0, 3:].isnan().all() and out[0, 0, :3].isfinite().all()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_large_logits_do_not_overflow(backend: str) -> None:
    q, k, v, index = inputs()
    out, lse = sparse_attention(
        q * 300, k * 300, v, index, scale=1.0, return_lse=True, backend=backend
    )
    assert out.isfinite().all() and lse.isfinite().all() and lse.max() > 1e6


@pytest.mark.parametrize("softcap", [1e-3, 30.0])
def test_soft_cap_holds_at_both_ends(softcap: float) -> None:
    q, k, v, index = inputs()
    for factor in (1e-4, 1e3):
        args = (q * factor, k * factor, v, index)
        out, lse = sparse_attention(*args, softcap=softcap, return_lse=True, backend="cpu")
        expected, expected_lse = sparse_attention(
            *args, softcap=softcap, return_lse=True, backend="reference"
        )
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse, expected_lse, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offsets_beyond_two_billion_elements(dtype: torch.dtype) -> None:
    """Strides past 2^31, over address space of which next to nothing is touched."""
    q, k, _, index = inputs(4, 2, dtype=dtype)
    far = 3 * 2**30
    row, head, batch = far // 300, far, far + 64
    size = (batch + head + far) * dtype.itemsize
    no_reserve = 0x4000
    space = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    storage = torch.frombuffer(space, dtype=dtype)
    wide_k = storage.as_strided((2, 2, 200, 64), (batch, head, row, 1))
    wide_k.copy_(k.expand(2, -1, -1, -1))
    plan = LayerPlan([make("vertical_slash", vertical=70, slash=64), make("dense")] * 2, 2)
    two = plan.build(q.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1))
    out = sparse_attention(q.expand(2, -1, -1, -1), wide_k, wide_k, two, backend="cpu")
    expected = sparse_attention(q, k, k, index, backend="cpu")
    assert torch.equal(out, expected.expand(2, -1, -1, -1))


def test_gradients_are_refused_not_lost(
    fresh_notes: None, caplog: pytest.LogCaptureFixture
) -> None:
    q, k, v, index = inputs()
    q.requires_grad_()
    with caplog.at_level(logging.WARNING, "headwise"):
        out = sparse_attention(q, k, v, index)
        sparse_attention(q, k, v, index)
    assert [r.message for r in caplog.records if "'cpu'" in r.message] == [
        "backend 'cpu' not used: it has no backward pass (use torch.no_grad or "
        "torch.inference_mode)"
    ]
    out.sum().backward()
    assert q.grad is not None and q.grad.abs().sum() > 0
    with torch.no_grad():
        assert cpu.supports(q, k, v) is None


def test_auto_falls_back_and_says_so_once(
    fresh_notes: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    q, k, v, index = inputs()
    expected = sparse_attention(q, k, v, index, backend="reference")
    monkeypatch.setattr(
        "kernels.native.build.load", lambda: "no C++ compiler found (install g++, or set CXX)"
    )
    with caplog.at_level(logging.WARNING, "headwise"):
        for _ in range(3):
            assert torch.equal(sparse_attention(q, k, v, index), expected)
    said = [r.message for r in caplog.records if "'cpu'" in r.message]
    assert said == ["backend 'cpu' not used: no C++ compiler found (install g++, or set CXX)"]
    assert dispatch.why_not(q, k, v)["cpu"] == "no C++ compiler found (install g++, or set CXX)"
    with pytest.raises(
        ValueError, match=r"backend 'cpu' cannot serve this call: no C\+\+ compiler"
    ):
        sparse_attention(q, k, v, index, backend="cpu")
    with pytest.raises(ValueError, match="no C"):
        cpu.engines(torch.float32)


def test_why_not_knows_every_backend() -> None:
    q, k, v, _ = inputs()
    reasons = dispatch.why_not(q, k, v)
    assert reasons.keys() == set(dispatch.BACKENDS) and reasons["reference"] is None
    assert "serves tensors on the CPU, not on meta" in str(
        dispatch.why_not(q.to("meta"), k, v)["cpu"]
    )


def test_an_engine_that_does_not_serve_is_named() -> None:
    q, k, v, index = inputs()
    with pytest.raises(ValueError, match="engine 'dot' does not serve Float on this processor"):
        cpu.sparse_attention(q, k, v, index, scale=1.0, softcap=None, engine="dot")
