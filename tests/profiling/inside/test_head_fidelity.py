"""Fidelity of patterns by head: recall, error and density on a model's queries and keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from artifacts import Artifact, AShape, Imported, Prefill
from kernels.attention import sparse_attention
from profiling.inside.capture import LayerInputs, capture
from profiling.inside.head_fidelity import fidelity, recall
from profiling.prompts.prompt import Prompt
from runtime.fingerprint import fingerprint
from runtime.layers import layer_plans
from tests.runtime.tiny import tiny_model

LENGTH = 300
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


def test_recall_and_error_are_those_of_all_scores(model: Any, prompt: Prompt) -> None:
    made = artifact(model, NARROW, NARROW)
    plans, found = layer_plans(made), fidelity(model, made, prompt)

    def visit(inputs: LayerInputs) -> None:
        index = plans[inputs.layer].build(inputs.q, inputs.k, scale=inputs.scale)
        groups = inputs.q.shape[1] // inputs.k.shape[1]
        k, v = (part.double().repeat_interleave(groups, 1) for part in (inputs.k, inputs.v))
        scores = inputs.q.double() @ k.transpose(-1, -2) * inputs.scale
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
        dense = weights @ v
        # Of values that say which key they are of, attention's output is its weights.
        every = torch.eye(LENGTH).expand(1, inputs.k.shape[1], LENGTH, LENGTH)
        seen = (
            sparse_attention(
                inputs.q, inputs.k, every, index, scale=inputs.scale, backend="reference"
            )
            > 0
        )
        kept = (weights * seen).sum(-1)
        sparse = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        error = (sparse - dense).norm(dim=(2, 3)) / dense.norm(dim=(2, 3))
        np.testing.assert_allclose(found.recall[inputs.layer], kept.mean(-1)[0], atol=1e-5)
        np.testing.assert_allclose(found.error[inputs.layer], error[0], rtol=1e-4)

    capture(model, torch.tensor([prompt.input_ids]), visit)


def test_recall_of_several_is_of_patterns_alone(model: Any, prompt: Prompt) -> None:
    def kept(made: Artifact) -> dict[str, float]:
        return recall(model, prompt, {"dense": {}, "m": layer_plans(made)})

    few, all_of_it = kept(artifact(model, NARROW, NARROW)), kept(artifact(model, WIDE, WIDE))
    assert list(few) == list(all_of_it) == ["m"] and 0.3 < few["m"] < 0.99
    assert all_of_it["m"] == pytest.approx(1, abs=1e-5)
    assert recall(model, prompt, {"dense": {}}) == {}
