"""Heads that see every key go to sdpa where that is the faster: together with the others the reference's result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention import sparse_attention
from kernels.patterns import LayerPlan, make
from kernels.ragged import Ragged
from runtime import Headwise, dense, measured
from runtime.attention import dense_heads
from runtime.attention.kernel import attend_layer
from runtime.attention.state import Layer, Settings

EVERY, FEW, SOME = make("dense"), make("a_shape", sink=64, window=100), make("block_sparse", blocks=3)
# The pattern of each query head, of which two or three in a row read one KV head.
LAYERS = {
    "all": [EVERY] * 6,
    "one": [FEW, SOME, FEW, FEW, EVERY, SOME],
    "neighbours": [FEW, SOME, FEW, EVERY, EVERY, EVERY],
    "one of each": [EVERY, FEW, SOME, FEW, FEW, EVERY],
    "one here, two there": [EVERY, FEW, EVERY, SOME, EVERY, FEW],
    "far apart": [EVERY, FEW, FEW, EVERY, EVERY, FEW],
    "by its sizes": [make("a_shape", sink=64, window=9000), FEW, make("vertical_slash", vertical=1, slash=9000)] * 2,
}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def sdpa_is_faster(monkeypatch: Any, tmp_path: Any) -> None:
    found = dense.Measured(by="sdpa", right=True, kernel_s=2.0, sdpa_s=1.0)
    monkeypatch.setattr(measured, "folder", lambda: tmp_path)
    monkeypatch.setattr(dense, "_known", {})
    monkeypatch.setattr(dense, "_measure", lambda *_: found)


@pytest.fixture
def asked(monkeypatch: Any) -> list[tuple[int, ...]]:
    """The shapes of queries that sdpa was given."""
    shapes: list[tuple[int, ...]] = []
    real = dense_heads.sdpa

    def sdpa(q: Tensor, *rest: Any) -> Tensor:
        shapes.append(tuple(q.shape))
        return real(q, *rest)

    monkeypatch.setattr(dense_heads, "sdpa", sdpa)
    return shapes


def a_layer(plan: LayerPlan, **more: Any) -> Layer:
    settings = {"dense_below": 0, "dense": "sdpa", "strict": True, "backend": "auto"} | more
    return Layer(Settings(**settings), 0, plan)


def inputs(q_len: int, k_len: int, *, batch: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    shapes = ((batch, 6, q_len, 32), (batch, 2, k_len, 32), (batch, 2, k_len, 16))
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def expected_of(plan: LayerPlan, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged | None = None) -> Tensor:
    index = plan.build(q, k, scale=0.2, ragged=ragged)
    return sparse_attention(q.float(), k.float(), v.float(), index, scale=0.2, backend="reference")


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_layer_in_two_is_the_layer(name: str, dtype: torch.dtype, asked: list[tuple[int, ...]]) -> None:
    plan, (q, k, v) = LayerPlan(LAYERS[name], 2), inputs(1100, 1100, batch=2, dtype=dtype)
    out = attend_layer(a_layer(plan), plan, q, k, v, scale=0.2, softcap=None)
    assert out.dtype == dtype and out.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(out.float(), expected_of(plan, q, k, v), atol=TOLERANCES[dtype], rtol=0)
    whole = plan.whole(1100)
    assert whole and sum(heads for _, heads, *_ in asked) == len(whole)
    # Of KV heads with equally many readers all go together.
    assert len(asked) == len({sum(head // 3 == its for head in whole) for its in {head // 3 for head in whole}})


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", ["all", "one here, two there"])
@pytest.mark.parametrize(
    "ragged",
    [
        Ragged.left_padded([1300, 40, 900], 1300, 1300),
        Ragged.left_padded([1300, 40, 900], 600, 1300),
        Ragged.packed([0, 65, 700], [0, 65, 1200]),
    ],
    ids=["padded", "padded chunk", "packed"],
)
def test_padded_and_packed_batches(ragged: Ragged, name: str, dtype: torch.dtype, asked: list[tuple[int, ...]]) -> None:
    batch, (q_len, k_len) = max(ragged.rows) + 1, map(max, zip(*ragged.lengths, strict=True))
    plan, (q, k, v) = LayerPlan(LAYERS[name], 2), inputs(max(q_len, 703), max(k_len, 1203), batch=batch, dtype=dtype)
    out = attend_layer(a_layer(plan), plan, q, k, v, scale=0.2, softcap=None, ragged=ragged)
    expected = expected_of(plan, q, k, v, ragged)
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCES[dtype], rtol=0)
    assert len(asked) == len(ragged) * (1 if name == "all" else 2)


def test_flash_s_mask_of_a_chunk_is_the_causal_one(monkeypatch: Any) -> None:
    """What a GPU's flash attention is asked for; here torch writes the mask down."""
    monkeypatch.setattr(dense, "_takes_flash", lambda q, v: True)
    plan, (q, k, v) = LayerPlan(LAYERS["one here, two there"], 2), inputs(300, 1100)
    out = attend_layer(a_layer(plan), plan, q, k, v, scale=0.2, softcap=None)
    torch.testing.assert_close(out, expected_of(plan, q, k, v), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("more", "how"),
    [
        ({"backend": "cpu"}, {}),
        ({"dense_by": "kernel"}, {}),
        ({"dense_by": "model"}, {}),
        ({"dense": "eager"}, {}),
        ({}, {"softcap": 20.0}),
        ({}, {"sinks": torch.zeros(6)}),
    ],
)
def test_what_sdpa_has_not_or_nobody_wants_of_it_is_the_kernel_s(
    more: dict[str, Any], how: dict[str, Any], asked: list[tuple[int, ...]]
) -> None:
    plan, (q, k, v) = LayerPlan(LAYERS["one"], 2), inputs(1100, 1100)
    out = attend_layer(a_layer(plan, **more), plan, q, k, v, scale=0.2, **{"softcap": None, **how})
    index = plan.build(q, k, scale=0.2)
    expected = sparse_attention(q, k, v, index, scale=0.2, **how, backend="reference")
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    assert not asked


def test_short_calls_and_a_faster_kernel_leave_all_to_it(monkeypatch: Any, asked: list[tuple[int, ...]]) -> None:
    plan = LayerPlan(LAYERS["one"], 2)
    attend_layer(a_layer(plan), plan, *inputs(1023, 1023), scale=None, softcap=None)
    found = dense.Measured(by="kernel", right=True, kernel_s=1.0, sdpa_s=2.0)
    monkeypatch.setattr(dense, "_known", {})
    monkeypatch.setattr(measured, "read", lambda file: None)
    monkeypatch.setattr(dense, "_measure", lambda *_: found)
    attend_layer(a_layer(plan), plan, *inputs(1100, 1100), scale=None, softcap=None)
    assert not asked


def test_a_model_s_prefill(build: Any, artifact_for: Any, ids: Any, asked: list[tuple[int, ...]]) -> None:
    model, prompt = build(), ids(1100)
    heads = model.config.num_attention_heads
    rows = [["dense", *["bs_2"] * (heads - 1)], ["a_64_64"] * heads]
    artifact = artifact_for(model, rows=rows)
    with Headwise(artifact).apply(model, backend="reference"):
        expected = model(prompt).logits
    assert not asked
    with Headwise(artifact).apply(model) as handle:
        torch.testing.assert_close(model(prompt).logits, expected, atol=3e-4, rtol=1e-3)
        assert handle.stats()["sparse"] == 2
    assert [shape[1:3] for shape in asked] == [(1, 1100)]
