"""Curves of error against budget: against plain attention with full weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from artifacts import HeadwiseError
from profiling.caches import budget_curves
from profiling.caches.budget_curves import measure
from profiling.inside.capture import capture
from profiling.models.loading import LoadedModel
from profiling.prompts.prompt import Prompt
from tests.profiling.conftest import tiny
from tests.profiling.inside.plain import weights

SHARES = (0.1, 0.25, 0.6)


def _loaded(family: str) -> LoadedModel:
    return LoadedModel(model=tiny(family), tokenizer=None, name=family, revision=None)


def _prompt(length: int) -> Prompt:
    ids = torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(0))
    return Prompt(tuple(ids.tolist()), None)


def test_kept_and_error_are_those_of_full_attention_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budget_curves, "_PLACES", 2)
    loaded, prompt, length = _loaded("llama"), _prompt(150), 150
    found = measure(loaded, [prompt], SHARES)
    assert found.layers == [0, 1, 2] and found.error.shape == (3, 2, 3)
    # Places are the first block after a quarter of the prompt, and the last.
    places = [(48, 64), (144, 150)]
    states: dict[int, torch.Tensor] = {}
    layers = loaded.model.model.layers
    for at, layer in enumerate(layers):
        layer.register_forward_pre_hook(
            lambda _, args, at=at: states.__setitem__(at, args[0][0].clone())
        )

    def visit(inputs) -> None:
        by_group = weights(inputs).float().unflatten(0, (2, 2))
        project = layers[inputs.layer].self_attn.o_proj.weight.unflatten(1, (2, -1)).transpose(0, 1)
        for i, share in enumerate(SHARES):
            kept, error = torch.zeros(2), torch.zeros(2)
            for begin, end in places:
                scores = by_group[:, :, :begin, :begin].sum((1, 2))
                recent = heavy = math.ceil(share / 2 * end)
                old = min(begin, end - recent)
                for head in range(2):
                    held = torch.zeros(length, dtype=torch.bool)
                    held[scores[head, :old].topk(min(heavy, old)).indices] = True
                    held[old:end] = True
                    part = by_group[head, :, begin:end].masked_fill(~held, 0)
                    mass = part.sum(-1, keepdim=True)
                    missed = (part / mass - by_group[head, :, begin:end]) @ inputs.v[0, head]
                    out = missed.transpose(0, 1).flatten(1) @ project[head].T
                    square = states[inputs.layer][begin:end].square().sum(-1)
                    kept[head] += mass.mean() / 2
                    error[head] += (out.square().sum(-1) / square).mean() / 2
            np.testing.assert_allclose(found.kept[inputs.layer, :, i], kept, rtol=1e-3)
            np.testing.assert_allclose(found.error[inputs.layer, :, i], error, rtol=1e-2, atol=1e-6)

    capture(loaded.model, torch.tensor([prompt.input_ids]), visit)


def test_layers_that_slide_are_left_out() -> None:
    found = measure(_loaded("gemma3"), [_prompt(100)], SHARES)
    assert found.layers == [1]
    assert np.isnan(found.error[[0, 2]]).all() and np.isfinite(found.error[1]).all()
    assert (np.diff(found.kept[1], axis=-1) > 0).all()
    with pytest.raises(HeadwiseError, match="every layer of mistral is a sliding-window layer"):
        measure(_loaded("mistral"), [_prompt(100)], SHARES)
