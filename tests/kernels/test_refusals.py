"""Refusals of attention, decode, and batches of sequences: each names the value that is wrong.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention import sparse_attention
from kernels.decode import MAX_QUERIES, decode_attention
from kernels.decode.dropping import EvictCall
from kernels.dense import dense_attention
from kernels.index import SparseIndex
from kernels.logits import Logits
from kernels.patterns import LayerPlan, make
from kernels.patterns.dense import dense_index
from kernels.ragged import Ragged


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def inputs(length: int = 200) -> tuple[Tensor, Tensor, Tensor, SparseIndex]:
    q = torch.zeros(1, 2, length, 64)
    k = torch.zeros(1, 1, length, 64)
    return q, k, k, dense_index(1, 2, length, length, q.device)


INDEX = inputs()[3]
ATTENTION = [
    ({"q": torch.zeros(2, 200, 64)}, "got q 3-D, k 4-D, v 4-D"),
    ({"q": torch.zeros(2, 2, 200, 64)}, r"q \(2, 2, 200, 64\), k \(1, 1, 200, 64\)"),
    ({"q": torch.zeros(1, 2, 200, 80)}, "shapes do not go together"),
    ({"v": torch.zeros(1, 1, 199, 64)}, "shapes do not go together"),
    (dict.fromkeys("kv", torch.ones(1, 3, 200, 64)), "2 query heads do not divide into 3 KV heads"),
    (dict.fromkeys("kv", torch.ones(1, 0, 200, 64)), "2 query heads do not divide into 0 KV heads"),
    ({"v": torch.zeros(1, 1, 200, 0)}, "head dims must be positive, got 64 and 0"),
    ({"q": torch.zeros(1, 2, 201, 64)}, "between 1 and key length 200, got 201"),
    ({"q": torch.zeros(1, 2, 0, 64)}, "between 1 and key length 200, got 0"),
    ({"k": torch.zeros(1, 1, 200, 64).half()}, "got torch.float32, torch.float16"),
    ({"v": torch.zeros(1, 1, 200, 64, device="meta")}, "must share a device, got cpu, meta"),
    ({"q": torch.zeros(1, 2, 100, 64)}, r"= \(1, 200, 200\), the call has \(1, 100, 200\)"),
    ({"q": torch.zeros(1, 3, 200, 64)}, "index is for 2 heads, q has 3"),
    ({"out": torch.zeros(1, 2, 200, 32)}, r"out must be .* got .* \(1, 2, 200, 32\)"),
    ({"out": torch.zeros(1, 1, 200, 64).expand(1, 2, 200, 64)}, "must not overlap itself"),
    (
        {"out": torch.zeros(20_000).as_strided((1, 2, 200, 64), (0, 64, 16, 1))},
        "must not overlap itself",
    ),
    ({"skipped": torch.zeros(1, 2, dtype=torch.int64)}, r"contiguous int32 \(1, 2\), got .*int64"),
    ({"logits": Logits(scale=float("nan"))}, "scale must be a positive finite number, got nan"),
    ({"logits": Logits(window=5)}, "the index is for a window of None, the logits of 5"),
    ({"logits": Logits(softcap=0.0)}, "softcap must be a positive finite number, got 0.0"),
    ({"backend": "cuda"}, "unknown backend 'cuda'; known: auto, .*cpu.*, reference"),
    ({"index": None}, "index must be a SparseIndex, got NoneType"),
    ({"index": replace(INDEX, columns=int32(9, 3).expand(1, 2, 2))}, "must be strictly ascending"),
    (
        {n: torch.zeros(1, 2 if n == "q" else 1, 200, 64).double() for n in "qkv"}
        | {"backend": "cpu"},
        "backend 'cpu' cannot serve this call: it serves .*, not torch.float64",
    ),
    (
        {"q": torch.zeros(1, 2, 200, 64, requires_grad=True), "backend": "cpu"},
        "backend 'cpu' cannot serve this call: it has no backward pass",
    ),
]


@pytest.mark.parametrize(("change", "message"), ATTENTION)
def test_attention_error_names_the_fault(change, message):
    q, k, v, index = inputs()
    with pytest.raises(ValueError, match=message):
        sparse_attention(**({"q": q, "k": k, "v": v, "index": index} | change))


@pytest.mark.parametrize(
    ("ragged", "message"),
    [
        (Ragged.packed([0, 150, 201], [0, 150, 201]), "queries in rows 150 to 201 of batch"),
        (Ragged.packed([0, 100, 200], [0, 100, 201]), "sequence 1 has its keys in rows 100 to 201"),
        (Ragged.left_padded([100, 200], 200, 200), "in rows 0 to 200 of batch element 1"),
    ],
)
def test_ragged_sequences_outside_the_tensors_are_rejected(ragged, message):
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match=message):
        LayerPlan([make("dense")] * 2, 1).build(q, k, ragged=ragged)
    q_len, k_len = max(ragged.q_lens), max(ragged.k_lens)
    index = replace(dense_index(2, 2, q_len, k_len, q.device), ragged=ragged)
    with pytest.raises(ValueError, match=message):
        sparse_attention(q, k, v, index)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"q_lens": (5,), "k_lens": (4,)}, "q_len must be between 1 and k_len=4, got 5"),
        ({"q_lens": (0,), "k_lens": (4,)}, "q_len must be between 1 and k_len=4, got 0"),
        ({"q_lens": (1, 1), "k_lens": (4,)}, "must have one entry for each sequence"),
        ({"q_lens": (1,), "k_lens": (4,), "k_starts": (-1,)}, r"negative, got \(0, 0, -1\)"),
        ({"q_lens": (1,), "k_lens": (4,), "q_starts": (0.5,)}, "must be integers, got 0.5"),
        (
            {
                "rows": (1, 0, 1),
                "q_starts": (4, 0, 0),
                "q_lens": (2, 9, 5),
                "k_starts": (0,) * 3,
                "k_lens": (9,) * 3,
            },
            "sequences 2 and 0 overlap: row 4 of batch element 1 is a query of both",
        ),
    ],
)
def test_ragged_batch_error_names_the_fault(fields, message):
    with pytest.raises(ValueError, match=message):
        Ragged(**{"rows": (0,), "q_starts": (0,), "k_starts": (0,)} | fields)


def test_missing_page_is_rejected():
    q, k, v, index = inputs(length=100)
    caches = [x.transpose(1, 2).reshape(2, 50, 1, 64) for x in (k, v)]
    for page in (2, -1):
        with pytest.raises(ValueError, match=f"page {page} is none of the 2 pages"):
            sparse_attention(q, *caches, index, block_table=int32(0, page)[None], backend="cpu")
    for table in (int32(0)[None], int32(0, 1), torch.zeros(1, 2)):
        with pytest.raises(ValueError, match=r"must be int32 \(1, at least 2\), got torch"):
            sparse_attention(q, *caches, index, block_table=table)


def decode_inputs(**change: Any) -> dict[str, Any]:
    shapes = {"q": (2, 4, 3, 16), "k": (2, 2, 40, 16), "v": (2, 2, 40, 8)}
    return {name: torch.ones(shape) for name, shape in shapes.items()} | change


ONES = torch.ones(2, dtype=torch.int32)
PAGES = {"k": torch.ones(2, 8, 2, 16), "v": torch.ones(2, 8, 2, 8)}
# Checks of q, k, v and the logits are those of attention.
DECODE = [
    ({"q": torch.ones(2, 4, 3, 8)}, r"q \(2, 4, 3, 8\), k \(2, 2, 40, 16\), v \(2, 2, 40, 8\)"),
    ({"q": torch.ones(3, 4, 3, 16)}, r"q \(3, 4, 3, 16\), k \(2, 2, 40, 16\), v \(2, 2, 40, 8\)"),
    ({"q": torch.ones(2, 4, 0, 16)}, "decode takes 1 to 16 queries, got 0"),
    ({"q": torch.ones(2, 4, 17, 16)}, "decode takes 1 to 16 queries, got 17"),
    ({"q": torch.ones(2, 4, 17, 16), "scores": "max"}, "1 to 16 queries, got 17"),
    (
        {"q": torch.ones(2, 4, 17, 16), "scores": "sum", "logits": Logits(window=5)},
        "1 to 16 queries, got 17",
    ),
    ({"q": torch.ones(2, 4, 41, 16), "scores": "sum"}, "got 41 queries and 40 keys"),
    ({"k": torch.ones(2, 2, 0, 16), "v": torch.ones(2, 2, 0, 8)}, r"empty: k \(2, 2, 0, 16\)"),
    ({"k": torch.ones(2, 2, 40, 16, device="meta")}, "must share a device, got cpu, meta"),
    ({"tokens": ONES[:, None].long()}, r"int32 \(2, C\) .*, got torch.int64 \(2, 1\)"),
    ({"tokens": torch.ones(2, 0, dtype=torch.int32)}, r"with C > 0, got torch.int32 \(2, 0\)"),
    ({"starts": torch.zeros(3, dtype=torch.int32)}, r"starts must be int32 \(2,\), got .* \(3,\)"),
    ({"ends": torch.zeros(2)}, "ends must be .*, got torch.float32"),
    ({"logits": Logits(window=3.5)}, "window must be an integer, got 3.5"),
    ({"scores": "mean"}, "scores must be 'none', 'sum' or 'max', got 'mean'"),
    ({"backend": "cuda"}, "unknown backend 'cuda'; known: auto, triton, cpu, reference"),
    ({"backend": "triton"}, "'triton' cannot serve this call: it serves tensors on a GPU, not on"),
    ({"block_table": ONES, **PAGES}, r"int32 \(2, at least 1\), got torch.int32 \(2,\)"),
    (
        {"block_table": ONES[:, None], **PAGES, "k": torch.ones(2, 8, 2, 32)[..., ::2]},
        "the last dimension of a paged cache must be contiguous",
    ),
    # Only the CPU checks values: on a GPU the check would make the host wait.
    ({"starts": ONES * -1}, "starts must not be negative, got -1 for sequence 0"),
    ({"ends": ONES * 41}, "ends must be at most the key length 40, got 41 for sequence 0"),
    ({"tokens": int32(30, 7).expand(2, 2)}, "tokens must ascend below 40, got 7 after 30"),
    ({"block_table": ONES[:, None] * 2, **PAGES}, "page 2 is none of the 2 pages"),
]


@pytest.mark.parametrize(("change", "message"), DECODE)
def test_decode_error_names_the_fault(change, message):
    assert MAX_QUERIES == 16
    with pytest.raises(ValueError, match=message):
        decode_attention(**decode_inputs(**change))


@pytest.mark.parametrize("op", [sparse_attention, decode_attention, dense_attention])
def test_inputs_that_are_not_dense_tensors_are_rejected(op):
    q, k, v, index = inputs(length=10)
    rest = {"index": index} if op is sparse_attention else {}
    with pytest.raises(ValueError, match="k must be a tensor, got NoneType"):
        op(q, None, v, **rest)
    with pytest.raises(ValueError, match=r"v must be a dense tensor, got layout torch.sparse_coo"):
        op(q, k, v.to_sparse(), **rest)
    for sinks in (torch.zeros(3), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1)):
        with pytest.raises(ValueError, match=r"sinks must be floating \(2,\), got"):
            op(q, k, v, logits=Logits(sinks=sinks), **rest)


def test_dense_attention_error_names_the_fault():
    q, k, v, _ = inputs(length=40)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"a block table needs the lengths .*: pass a Ragged"):
        dense_attention(q, k, v, block_table=table)
    with pytest.raises(ValueError, match="between 1 and key length 30, got 40"):
        dense_attention(q, k[:, :, :30], v[:, :, :30])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": torch.zeros(1, 2, 9).double()}, "got torch.float64"),
        ({"positions": torch.zeros(1, 2, 8, dtype=torch.int32)}, r"\(1, 2, 8\)"),
        ({"keys": torch.zeros(1, 9, 2, 8).transpose(1, 2)}, "must be contiguous"),
        ({"rows": [10]}, "rows must be 0 or 2 to 9, got 10"),
        ({"rows": [1]}, "rows must be 0 or 2 to 9, got 1"),
        ({"rows": [5, 5]}, "rows must be 1 numbers, one for each sequence, got 2"),
        ({"latest": []}, "latest must be 1 numbers, one for each sequence, got 0"),
        ({"queries": [1, 2, 3]}, "queries must be 1 numbers, one for each sequence, got 3"),
    ],
)
def test_evict_call_error_names_the_fault(change, message):
    held = {
        "keys": torch.zeros(1, 2, 9, 8),
        "values": torch.zeros(1, 2, 9, 4),
        "scores": torch.zeros(1, 2, 9),
        "positions": torch.zeros(1, 2, 9, dtype=torch.int32),
        "rows": [5],
        "latest": [1],
    }
    with pytest.raises(ValueError, match=message):
        EvictCall(**{**held, **change}).run()
