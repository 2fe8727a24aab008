"""The keys and tiles with the highest exact scores, and nothing but the prefill is touched."""

from __future__ import annotations

import math

import pytest
import torch

from artifacts import HeadwiseError
from kernels.index import TILE
from profiling.inside.capture import LayerInputs
from profiling.inside.chosen_tiles import (
    attend_to,
    mass_scores,
    random_scores,
    share_beside,
    top_k_index,
    top_p_index,
)
from profiling.inside.oracle import choosing, oracle, top_k_attention
from tests.default_dtype import OTHERS, default_dtype
from tests.profiling.conftest import tiny
from tests.profiling.inside.plain import output, random_inputs, weights
from tests.profiling.inside.test_capture import tokens

SCALE = 0.3


def highest(x: LayerInputs, density: float, tail: int) -> torch.Tensor:
    """(H, S, S) True at the highest scores of a row: `density` of the keys that the last of 64
    queries sees."""
    ranked = weights(x).argsort(-1, descending=True)
    mask = torch.zeros_like(ranked, dtype=torch.bool)
    length = len(ranked[0])
    for row in range(length):
        stop = min(length, (row // 64 + 1) * 64)
        count = min(row + 1, math.ceil(density * stop))
        if row >= length - tail:
            count = row + 1
        mask[:, row].scatter_(1, ranked[:, row, :count], True)
    return mask


@pytest.mark.parametrize(
    ("length", "density", "tail"), [(1, 0.25, 0), (63, 1.0, 0), (200, 0.25, 0), (200, 0.25, 70)]
)
def test_it_attends_to_the_highest_scores(length, density, tail):
    x = random_inputs(length, heads=6, seed=length, scale=0.2)
    found = top_k_attention(x.q, x.k, x.v, density=density, tail=tail, scale=0.2)
    expected = output(x, highest(x, density, tail)).float()
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_tiles_are_counted_the_same_under_another_default_dtype(dtype):
    scores = torch.rand(2, 300, 300)
    expected = top_k_index(scores, 300 * TILE, 0.37).computed_tiles()
    with default_dtype(dtype):
        found = top_k_index(scores, 300 * TILE, 0.37)
        torch.testing.assert_close(found.computed_tiles(), expected, atol=0, rtol=0)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_a_model_under_it_prefills_sparsely_and_decodes_densely(family):
    model, ids = tiny(family), tokens(150)
    with torch.no_grad():
        dense = model(ids).logits
        with oracle(model, 1.0):
            torch.testing.assert_close(model(ids).logits, dense, atol=1e-4, rtol=1e-3)
        with oracle(model, 0.1):
            first = model(ids[:, :-5], use_cache=True)
            assert not torch.allclose(first.logits, dense[:, :-5], atol=1e-2)
            more = model(ids[:, -5:], past_key_values=first.past_key_values, use_cache=True).logits
        assert torch.isfinite(more).all()
        torch.testing.assert_close(model(ids).logits, dense)


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Llama4"])
def test_without_a_choice_a_model_answers_as_it_is(family):
    model, ids = tiny(family), tokens(150)
    with torch.no_grad():
        dense = model(ids).logits
        with choosing(model, None):
            first = model(ids[:, :-9], use_cache=True)
            torch.testing.assert_close(first.logits, dense[:, :-9])
            cache = first.past_key_values
            rows = [
                model(part, past_key_values=cache, use_cache=True).logits
                for part in ids[:, -9:].split([6, 1, 1, 1], 1)
            ]
    torch.testing.assert_close(torch.cat(rows, dim=1), dense[:, -9:], atol=1e-4, rtol=1e-3)


def made(length: int) -> LayerInputs:
    return random_inputs(length, seed=length, scale=SCALE)


@pytest.mark.parametrize("length", [1, 63, 1000])
def test_masses_are_those_of_the_softmax(length):
    x = made(length)
    found, whole = mass_scores(x.q, x.k, SCALE, 0), weights(x).float()
    for number, rows in enumerate(whole.split(TILE, dim=1)):
        for tile, part in enumerate(rows.mean(1).split(TILE, dim=1)[: number + 1]):
            torch.testing.assert_close(found[:, number, tile], part.sum(-1))
    torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:2]))


@pytest.mark.parametrize(("by_mass", "share"), [(False, 0.4), (True, 0.8)])
@pytest.mark.parametrize("tail", [0, 64])
def test_attention_is_that_of_the_chosen_tiles(by_mass, share, tail):
    x = made(1000)
    out = attend_to(
        x.q, x.k, x.v, SCALE, 3, scores=mass_scores, share=share, by_mass=by_mass, tail=tail
    )
    build = top_p_index if by_mass else top_k_index
    index = build(mass_scores(x.q, x.k, SCALE, 3), 1000, share, tail=tail)
    index.validate()
    expected = output(x, index.to_mask()[0]).float()
    torch.testing.assert_close(out[0], expected, atol=2e-4, rtol=2e-4)
    assert not torch.allclose(expected, output(x).float(), atol=1e-2)


@pytest.mark.parametrize(("build", "share"), [(top_k_index, 0.5), (top_p_index, 0.7)])
def test_the_highest_tiles_are_taken_and_no_more_than_the_mass_needs(build, share):
    x = made(1280)
    masses = mass_scores(x.q, x.k, SCALE, 0)
    mask = build(masses, 1280, share).to_mask()[0]
    seen = mask.unflatten(1, (20, TILE)).unflatten(3, (20, TILE))[:, :, -1, :, 0]
    for row in range(2, 20):
        for head in range(4):
            taken = seen[head, row, : row + 1]
            mass = masses[head, row, : row + 1]
            # The first tile and a row's own are always there.
            free = taken.clone()
            free[[0, row]] = False
            assert taken[0] and taken[row]
            if free.any() and not taken.all():
                assert mass[free].min() >= mass[~taken].max()
            held = float(mass[taken].sum())
            if build is top_k_index:
                assert int(taken.sum()) == max(2, round(share * (row + 1)))
            else:
                assert held >= share - 1e-6
                assert not free.any() or held - float(mass[free].min()) < share


def test_random_tiles_differ_by_layer_and_head_and_not_by_prompt():
    x = made(1280)
    one, again, other = (
        top_k_index(random_scores(queries, x.k, SCALE, layer), 1280, 0.5)
        for queries, layer in ((x.q, 1), (2 * x.q, 1), (x.q, 2))
    )
    assert torch.equal(one.tiles, again.tiles) and not torch.equal(one.tiles, other.tiles)
    assert not torch.equal(one.padded_tiles()[:, 0], one.padded_tiles()[:, 1])


@pytest.mark.parametrize("density", [0.3, 0.6])
def test_the_dense_tail_is_counted(density):
    share = share_beside(density, 4096, 64)
    index = top_k_index(torch.rand(2, 64, 64), 4096, share, tail=64)
    assert float(index.density().mean()) == pytest.approx(density, abs=0.01)
    assert share < density and share_beside(density, 4096, 0) == pytest.approx(density)


def test_a_share_that_is_none_is_an_error():
    refused = pytest.raises(HeadwiseError, match="density must be above 0 and at most 1, got 0")
    with refused, oracle(tiny("Llama"), 0):
        pass
    x, none = made(64), {"share": 0, "by_mass": False, "tail": 0}
    with pytest.raises(HeadwiseError, match="a share must be above 0 and at most 1, got 0"):
        attend_to(x.q, x.k, x.v, SCALE, 0, scores=random_scores, **none)
