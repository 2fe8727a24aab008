"""Fidelity of patterns by head against plain softmax: recall, error and density."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from artifacts import Artifact, AShape, Imported, Prefill
from kernels.patterns import LayerPlan, make
from profiling.inside.head_fidelity import (
    dense_of_layer,
    fidelity,
    layer_fidelity,
    recall,
    worked_tiles,
)
from profiling.prompts.prompt import Prompt
from runtime.fingerprint import fingerprint
from runtime.layers import layer_plans
from tests.profiling.inside.plain import output, random_inputs, weights
from tests.runtime.tiny import tiny_model

LENGTH = 300
PLAN = LayerPlan(
    [make("a_shape", sink=64, window=64), make("dense"), make("block_sparse", blocks=2)] * 2, 2
)


@pytest.mark.parametrize("fields", [{}, {"sinks": torch.linspace(-1, 3, 6)}, {"softcap": 2.0}])
def test_it_is_what_plain_softmax_says(fields: dict[str, Any]) -> None:
    given = random_inputs(LENGTH, heads=6, scale=0.5, **fields)
    index = PLAN.build(given.q, given.k, scale=given.scale)
    mask = index.to_mask()[0]
    dense, exact, found = weights(given), output(given), output(given, mask)
    measured = layer_fidelity(given, PLAN)
    error = (found - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
    # Of the mass on keys alone: a sink is no key.
    kept = ((dense * mask).sum(-1) / dense.sum(-1)).mean(-1)
    np.testing.assert_allclose(measured.error, error, atol=1e-4, rtol=1e-3)
    np.testing.assert_allclose(measured.recall, kept, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(torch.from_numpy(measured.density), index.density()[0])
    assert measured.recall[1] == pytest.approx(1) and measured.recall[0] < 0.95
    torch.testing.assert_close(dense_of_layer(given)[0][0], exact.float(), atol=1e-4, rtol=1e-3)


def test_a_tile_that_is_skipped_counts_half() -> None:
    given = random_inputs(LENGTH, heads=6, scale=0.25)
    # Keys that all queries like: the first tile holds next to everything.
    given.q[:, :, :, 0] = 20.0
    given.k[:, :, :64, 0] = 20.0
    plan = LayerPlan([make("skip_softmax", scale_factor=n) for n in (1.0, 1e-60)] * 3, 2)
    index = plan.build(given.q, given.k, scale=given.scale)
    tiles = worked_tiles(given, index)[0]
    density = torch.from_numpy(layer_fidelity(given, plan).density).double()
    assert index.causal_tiles / 2 < tiles.min() < tiles.max() == index.causal_tiles
    torch.testing.assert_close(tiles.double() / index.causal_tiles, density, atol=1e-6, rtol=1e-6)


WIDE, NARROW = AShape(sink=64, window=512), AShape(sink=64, window=64)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("Llama")


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    ids = torch.randint(3, 97, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    return Prompt(tuple(ids), None)


def artifact(model: Any, first: AShape, others: AShape) -> Artifact:
    """One pattern for all heads of layer 0, and one for all others."""
    heads = model.config.num_attention_heads
    rows = (("first",) * heads, *[("others",) * heads] * (model.config.num_hidden_layers - 1))
    source = Imported(format="minference", file="best.json", sha256="0" * 64, scores="recall")
    prefill = Prefill(dense_below=64, dense_tail=0, layers=rows, imported=source)
    patterns = {"first": first, "others": others}
    return Artifact(
        model=fingerprint(model, name="tiny"), search=None, patterns=patterns, prefill=prefill
    )


def test_what_a_pattern_keeps_is_known_of_each_head(model: Any, prompt: Prompt) -> None:
    made = artifact(model, WIDE, NARROW)
    found = fidelity(model, made, prompt)
    assert found.recall.shape == (model.config.num_hidden_layers, model.config.num_attention_heads)
    np.testing.assert_allclose(found.recall[0], 1.0, atol=1e-5)
    np.testing.assert_allclose(found.density[0], 1.0)
    np.testing.assert_allclose(found.error[0], 0.0, atol=1e-5)
    # The sink's tile, a row's own and the one before it: 12 of the 15 causal tiles.
    np.testing.assert_allclose(found.density[1:], 12 / 15)
    assert (found.recall[1:] < 0.99).all() and (found.error[1:] > 0.01).all()


def test_recall_of_several_is_of_patterns_alone(model: Any, prompt: Prompt) -> None:
    plans = {
        "few": layer_plans(artifact(model, NARROW, NARROW)),
        "whole": layer_plans(artifact(model, WIDE, WIDE)),
    }
    found = recall(model, prompt, {"dense": {}, **plans})
    assert found == {"few": found["few"], "whole": pytest.approx(1, abs=1e-5)}
    assert 0.3 < found["few"] < 0.99
    assert recall(model, prompt, {"dense": {}}) == {}
