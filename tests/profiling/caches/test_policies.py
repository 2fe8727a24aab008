"""Policies by name and in memory, random eviction, and error by the retained fraction."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from artifacts import H2O, HeadwiseError, SnapKV
from profiling.caches import budget_curves
from profiling.caches.budget_curves import measure
from profiling.caches.parsing import SINKS, parse_cache, parse_policy
from profiling.caches.policies import drawing, with_policy
from profiling.inside.capture import capture
from profiling.models.loading import LoadedModel
from profiling.prompts.prompt import Prompt
from profiling.quality.method import of_policy
from runtime import memory_report
from tests.profiling.conftest import tiny
from tests.profiling.inside.plain import weights


def loaded(family: str) -> LoadedModel:
    return LoadedModel(tiny(family), None, family, None)


def test_parse_policy_reads_names_and_fields():
    assert parse_policy("h2o") == H2O()
    expected = H2O(heavy=400, recent=0.1, normalised=True)
    assert parse_policy("h2o:heavy=400,recent=0.1,normalised=true") == expected


@pytest.mark.parametrize(
    ("text", "said"), [("h3o", "'h3o'"), ("h2o:heavy", "'heavy'"), ("h2o:heavi=1", "heavi")]
)
def test_parse_policy_refuses_other_text(text, said):
    with pytest.raises(HeadwiseError, match=said):
        parse_policy(text)


LENGTH, RECORD = 90, SnapKV(budget=40, window=8)


def kept_places(model: LoadedModel, cache: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Find the positions of each policy layer's kept keys by KV head, (G, n), in a full cache."""
    full = model.model(ids, use_cache=True).past_key_values
    result = []
    for layer, whole in zip(cache.layers, full.layers, strict=True):
        if layer.is_sliding:
            continue
        (policy,) = layer.policies
        apart = torch.cdist(policy.keys[0, :, : policy.cached[0]], whole.keys[0])
        result.append(apart.argmin(-1))
        assert apart.min(-1).values.max() < 0.05
    return result


@torch.no_grad()
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_random_eviction_keeps_start_end_and_random_tokens(family):
    model = loaded(family)
    headwise = with_policy(model, RECORD)
    ids = torch.randint(3, 97, (1, LENGTH))
    result = []
    with headwise.apply(model.model):
        for seed in (0, 0, 1):
            cache = drawing(headwise.new_cache(model.model), RECORD, seed=seed)
            output = model.model(ids, past_key_values=cache)
            after = copy.deepcopy(cache)
            model.model(ids[:, :3], past_key_values=after)
            result.append((cache, output.logits))
            assert {layer.mean_cached for layer in after.layers if not layer.is_sliding} == {43}
    sliding = [layer.cached for layer in memory_report(result[0][0]).layers if layer.cached != 40]
    assert sliding == ([16, 16] if family == "Gemma3" else [])
    places = [kept_places(model, cache, ids) for cache, _ in result]
    for layer in places[0]:
        assert layer.shape[1] == 40
        for head in layer.tolist():
            assert head == sorted(set(head)) and head[:SINKS] == list(range(SINKS))
            assert head[-8:] == list(range(LENGTH - 8, LENGTH))
        assert len({tuple(head) for head in layer.tolist()}) == len(layer)
    drawn = [layer.tolist() for layer in places[0]]
    assert len({str(layer) for layer in drawn}) == len(drawn)
    assert (
        drawn == [layer.tolist() for layer in places[1]] != [layer.tolist() for layer in places[2]]
    )


def test_method_of_a_random_cache_draws_the_tokens_that_it_keeps():
    model, ids = loaded("Llama"), torch.randint(3, 97, (1, LENGTH))
    kept = []
    for name in ("snapkv", "random"):
        method = of_policy(model, name, parse_cache(f"{name}:budget=40,window=8"))
        with torch.no_grad(), method.apply(model.model):
            cache = method.cache(model.model)
            model.model(ids, past_key_values=cache)
        kept.append([layer.tolist() for layer in kept_places(model, cache, ids)])
    assert kept[0] != kept[1]
    assert all(head[:SINKS] == list(range(SINKS)) for layer in kept[1] for head in layer)


SHARES = (0.1, 0.25, 0.6)


def random_prompt(length: int) -> Prompt:
    ids = torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(0))
    return Prompt(tuple(ids.tolist()), None)


def test_budget_curves_match_full_attention_weights(monkeypatch):
    monkeypatch.setattr(budget_curves, "_PLACES", 2)
    llama, prompt, length = loaded("Llama"), random_prompt(150), 150
    result = measure(llama, [prompt], SHARES)
    assert result.layers == [0, 1, 2] and result.error.shape == (3, 2, 3)
    # Places are the first block after a quarter of the prompt, and the last.
    places = [(48, 64), (144, 150)]
    states = {}
    layers = llama.model.model.layers
    for at, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda _, args, at=at: states.update({at: args[0][0]}))

    def visit(inputs):
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
            np.testing.assert_allclose(result.kept[inputs.layer, :, i], kept, rtol=1e-3)
            np.testing.assert_allclose(
                result.error[inputs.layer, :, i], error, rtol=1e-2, atol=1e-6
            )

    capture(llama.model, torch.tensor([prompt.input_ids]), visit)


def test_budget_curves_leave_out_sliding_layers():
    result = measure(loaded("Gemma3"), [random_prompt(100)], SHARES)
    assert result.layers == [1]
    assert np.isnan(result.error[[0, 2]]).all() and np.isfinite(result.error[1]).all()
    assert (np.diff(result.kept[1], axis=-1) > 0).all()
    with pytest.raises(HeadwiseError, match="no layer of Mistral"):
        measure(loaded("Mistral"), [random_prompt(100)], SHARES)
