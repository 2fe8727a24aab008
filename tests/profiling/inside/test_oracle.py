"""Oracle top-k: the keys with the highest exact scores, and nothing but the prefill is touched."""

from __future__ import annotations

import math

import pytest
import torch

from artifacts import HeadwiseError
from profiling.inside.oracle import choosing, oracle, top_k_attention
from tests.profiling.conftest import tiny
from tests.profiling.inside.plain import random_inputs
from tests.profiling.inside.test_capture import tokens

SCALE = 0.2


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, density: float, tail: int
) -> torch.Tensor:
    """The highest scores row by row: `density` of the keys that the last of 64 queries sees."""
    length = q.shape[2]
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        keys, values = k[0, head // 3], v[0, head // 3]
        for row in range(length):
            scores = keys[: row + 1] @ q[0, head, row] * SCALE
            stop = min(length, (row // 64 + 1) * 64)
            count = min(len(scores), math.ceil(density * stop))
            if row >= length - tail:
                count = len(scores)
            chosen = scores.topk(count).indices
            out[0, head, row] = scores[chosen].softmax(0) @ values[chosen]
    return out


@pytest.mark.parametrize(
    ("length", "density", "tail"), [(1, 0.25, 0), (63, 1.0, 0), (200, 0.25, 0), (200, 0.25, 70)]
)
def test_it_attends_to_the_highest_scores(length: int, density: float, tail: int) -> None:
    x = random_inputs(length, heads=6, seed=length)
    q, k, v = x.q, x.k, x.v
    found = top_k_attention(q, k, v, density=density, tail=tail, scale=SCALE)
    torch.testing.assert_close(found, expected(q, k, v, density, tail), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_model_under_it_prefills_sparsely_and_decodes_densely(family: str) -> None:
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


@pytest.mark.parametrize("family", ["llama", "gemma3", "llama4"])
def test_without_a_choice_a_model_answers_as_it_is(family: str) -> None:
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


def test_a_density_that_is_none() -> None:
    refused = pytest.raises(HeadwiseError, match="density must be above 0 and at most 1, got 0")
    with refused, oracle(tiny("llama"), 0):
        pass
