"""Scores of candidates against building each one and plain arithmetic over the whole prompt."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.attention import AttentionCall, attend, sparse_attention
from kernels.index import TILE, num_tiles
from kernels.patterns import LayerPlan, Pattern, make
from kernels.patterns.dense import dense_index
from profiling.inside.gradients import LayerGradients, gradient_pass
from profiling.inside.residual import ResidualStream
from profiling.ranks import Ranks
from search.model import sampled_tiles, scoring
from search.model.sampled_tiles import sampled
from search.model.scoring import Scores, score_layer
from tests.runtime.tiny import look_at_themselves, tiny_model
from tests.sampling import sampled as sampled_cases

TAILS = (0, 100)
CANDIDATES = (
    make("a_shape", sink=64, window=20),
    make("vertical_slash", vertical=70, slash=70, last_q=64),
    make("vertical_slash", vertical=70, slash=80, last_q=256),
    make("vertical_slash", vertical=150, slash=150, last_q=64, coverage=0.9),
    make("block_sparse", blocks=2),
    make("block_sparse", blocks=4, coverage=0.9),
    make("dense"),
)


def with_a_threshold(length: int) -> tuple[Pattern, ...]:
    """And one that skips tiles of a tiny model, whose logits differ by little."""
    return (*CANDIDATES, make("skip_softmax", scale_factor=0.99 * length))


@pytest.fixture(scope="module")
def model():
    return tiny_model("Llama")


@pytest.fixture
def every_tile(monkeypatch):
    monkeypatch.setattr(sampled_tiles, "_EVERY", 1)
    monkeypatch.setattr(sampled_tiles, "_LEAST", 10_000)
    monkeypatch.setattr(scoring, "_COUNTED", 10_000)
    yield


def scores_of(model: Any, length: int, visit: Any, *, total: int | None = None) -> None:
    ids = torch.randint(3, 97, (1, total or length), generator=torch.Generator().manual_seed(2))
    answers = torch.zeros(ids.shape[1], dtype=torch.bool)
    with ResidualStream(model) as stream:
        gradient_pass(model, ids, answers, lambda layer: visit(layer, stream))


def direct(
    model: Any, layer: LayerGradients, stream: ResidualStream, length: int, tail: int
) -> dict[str, np.ndarray]:
    """(H, C) of each sum, a candidate at a time over the whole prefill."""
    whole = layer.inputs
    q, k, v = (x[:, :, :length] for x in (whole.q, whole.k, whole.v))
    heads = q.shape[1]
    groups = k.shape[1]
    dim = v.shape[3]
    dense = layer.out[0, :, :length].double()
    by_out = layer.by_out[0, :, :length].double()
    weight = model.model.layers[whole.layer].self_attn.o_proj.weight.double()
    sizes = stream._sizes[whole.layer][:length].double()
    names = ("change", "squared", "size", "recall", "first_order", "fisher", "tiles")
    candidates = with_a_threshold(length)
    scores = {name: np.empty((heads, len(candidates))) for name in names}
    for c, pattern in enumerate(candidates):
        index = LayerPlan([pattern] * heads, groups, dense_tail=tail).build(q, k, scale=whole.scale)
        skipped = torch.zeros(1, heads, dtype=torch.int32)
        out = sparse_attention(
            q, k, v, index, logits=whole.logits, skipped=skipped, backend="reference"
        )
        assert not skipped.any() or pattern.kind == "skip_softmax"
        assert skipped.any() or pattern.kind != "skip_softmax" or length < 320
        # The mass on keys: a learned sink is none.
        without_sinks = replace(whole.logits, sinks=None)
        kept, every = (
            attend(AttentionCall(q, k, v, one, logits=without_sinks), "reference")[1][0].double()
            for one in (index, dense_index(1, heads, length, length, q.device))
        )
        change = out[0].double() - dense
        factor = (out[0].double() * dense).sum(-1) / out[0].double().square().sum(-1)
        rest = factor[..., None] * out[0].double() - dense
        lost = (change * by_out).sum(-1)
        for head in range(heads):
            written = rest[head] @ weight[:, head * dim : (head + 1) * dim].T
            scores["change"][head, c] = (written.square().sum(-1) / sizes).sum()
        scores["squared"][:, c] = change.square().sum((1, 2))
        scores["size"][:, c] = dense.square().sum((1, 2))
        scores["recall"][:, c] = (kept - every).exp().sum(-1)
        scores["first_order"][:, c] = lost.sum(-1)
        scores["fisher"][:, c] = lost.square().sum(-1) / 2
        scores["tiles"][:, c] = index.computed_tiles()[0] - skipped[0] / 2
    return scores


@pytest.mark.parametrize(
    ("family", "length", "total"),
    sampled_cases(
        [("Llama", 320, 320), ("Llama", 200, 333), ("GptOss", 333, 340)],
        ("Llama", 200, 333),
        ("GptOss", 333, 340),
    ),
)
def test_scores_with_every_tile_equal_each_candidate_alone(family, every_tile, length, total):
    """Lengths are no multiples of a tile, and chat turns and answers follow the context."""
    model = tiny_model(family)
    layers = []
    look_at_themselves(model)

    def visit(layer: LayerGradients, stream: ResidualStream) -> None:
        layers.append(layer.inputs.layer)
        assert (layer.inputs.logits.sinks is None) == (family == "Llama")
        result = score_layer(
            layer, stream, with_a_threshold(length), length=length, tails=TAILS, seed=0
        )
        for tail, scores in result.items():
            for name, expected in direct(model, layer, stream, length, tail).items():
                near = 1e-6 * max(1.0, float(np.abs(expected).max()))
                np.testing.assert_allclose(
                    getattr(scores, name),
                    expected,
                    rtol=3e-3,
                    atol=50 * near,
                    err_msg=f"{name} with tail {tail}",
                )

    scores_of(model, length, visit, total=total)
    assert layers == ([1, 0] if family == "Llama" else [1])


def test_scores_without_gradients_omit_only_gradient_terms(model, every_tile):
    def visit(layer: LayerGradients, stream: ResidualStream) -> None:
        one, none = (
            score_layer(layer, stream, CANDIDATES, length=200, tails=TAILS, seed=0, gradients=g)[0]
            for g in (True, False)
        )
        assert not none.first_order.any() and not none.fisher.any() and one.fisher.any()
        for name in ("change", "squared", "size", "recall", "tiles"):
            np.testing.assert_array_equal(getattr(none, name), getattr(one, name))

    scores_of(model, 200, visit)


def test_estimates_are_unbiased_and_deterministic_per_seed(model, monkeypatch):
    length = 700
    names = ("change", "squared", "recall", "first_order", "fisher")

    def scored(layer: LayerGradients, stream: ResidualStream, seed: int) -> Scores:
        return score_layer(
            layer, stream, CANDIDATES[:1], length=length, tails=(0, 64, 256), seed=seed
        )[64]

    def visit(layer: LayerGradients, stream: ResidualStream) -> None:
        if layer.inputs.layer:
            return
        with monkeypatch.context() as patch:
            patch.setattr(sampled_tiles, "_LEAST", 10_000)
            expected = scored(layer, stream, 0)
        monkeypatch.setattr(sampled_tiles, "_LEAST", 3)
        estimates = [scored(layer, stream, seed) for seed in range(40)]
        again = scored(layer, stream, 0)
        for name in names:
            values = np.stack([getattr(one, name) for one in estimates])
            error = values.std(0, ddof=1) / len(estimates) ** 0.5
            assert (np.abs(values.mean(0) - getattr(expected, name)) <= 4.5 * error + 1e-9).all(), (
                name
            )
            assert np.ptp(values) > 0 and np.array_equal(getattr(again, name), values[0])

    scores_of(model, length, visit)


@pytest.mark.parametrize(
    "length, tails", [(4096, (0, 64)), (4100, (0, 64, 256)), (130, (0,)), (200, (256,))]
)
def test_tiles_are_sampled_from_each_segment_and_tail(length, tails):
    by_out: Tensor = torch.randn(1, 2, length, 8, generator=torch.Generator().manual_seed(0))
    samples = sampled(by_out, length, tails, 3)
    n = num_tiles(length)
    rows = samples.rows.tolist()
    assert rows == sorted(set(rows)) and (samples.weights >= 1 - 1e-9).all()
    assert min(n, 16) <= len(rows) <= 16 + len(tails)
    # The rows that a tail adds to a shorter one are sampled separately.
    bounds = sorted({n, *(max(0, length - tail) // TILE for tail in tails if tail)})
    for first, last in pairwise(bounds):
        assert any(first <= row < last for row in rows)
    again = sampled(by_out, length, tails, 3)
    assert torch.equal(again.rows, samples.rows) and torch.equal(again.weights, samples.weights)
    if n > 16:
        assert not torch.equal(sampled(by_out, length, tails, 4).rows, samples.rows)


def test_weights_sum_to_all_tiles_and_favor_large_gradients():
    length = 64 * 160
    n = 160
    by_out = torch.full((1, 1, length, 4), 0.01)
    by_out[:, :, 64 * 40 : 64 * 41] = 1.0
    draws = [sampled(by_out, length, (0,), seed) for seed in range(300)]
    assert np.mean([float(one.weights.sum()) for one in draws]) == pytest.approx(n, rel=0.05)
    assert np.mean([40 in one.rows.tolist() for one in draws]) > 0.5
    assert max(float(one.weights.max()) for one in draws) <= 2 * 10 + 1e-9
    alike = sampled(None, length, (0,), 0)
    assert len(alike.rows) == 20 and torch.allclose(
        alike.weights, torch.full((20,), 8.0, dtype=torch.float64)
    )


@pytest.mark.parametrize(
    ("layers", "count"),
    [((6,), 1), ((6,), 3), ((6,) * 3, 2), ((6,) * 4, 5), ((6,) * 7, 3), ((1, 6, 4), 2), ((), 1)],
)
def test_ranks_divide_prompts_and_remaining_layers(layers, count):
    """`layers` are those left per prompt: an interrupted search scored the last ones already."""
    units = [(number, layer) for number, left in enumerate(layers) for layer in range(left)]
    shares = [Ranks(rank, count).deal(units, lambda unit: unit[0]) for rank in range(count)]
    assert sorted(unit for share in shares for unit in share) == units
    # No rank makes the dense pass of more prompts than it must.
    passes = [len({number for number, _ in share}) for share in shares]
    assert max(passes) == -(-len(layers) // count)
    if layers == (6, 6, 6):
        assert [len(share) for share in shares] == [9, 9]
    if layers == (1, 6, 4):
        assert set(shares[0]) == {(0, 0), *((1, layer) for layer in range(6))}
