"""Artifacts made in memory serve a model as loaded ones do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from artifacts import H2O, Full, HeadwiseError, SnapKV, Streaming
from profiling.caches.parsing import SINKS, parse_policy
from profiling.caches.policies import drawing, with_policy
from profiling.models.loading import LoadedModel
from runtime import memory_report
from tests.profiling.conftest import tiny


def loaded(family: str) -> LoadedModel:
    return LoadedModel(tiny(family), None, family, None)


@torch.no_grad()
@pytest.mark.parametrize("policy", [None, Full(), Streaming(sinks=2, window=200)])
def test_a_policy_with_room_for_all_changes_nothing(policy: Full | Streaming | None) -> None:
    model = loaded("llama")
    ids = torch.randint(3, 97, (1, 80))
    expected = model.model(ids).logits
    headwise = with_policy(model, policy)
    with headwise.apply(model.model, strict=True):
        cache = headwise.new_cache(model.model)
        found = torch.cat(
            [model.model(part, past_key_values=cache).logits for part in ids.split(33, dim=1)],
            dim=1,
        )
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_layers_that_slide_keep_their_own_window() -> None:
    model = loaded("gemma3")
    headwise = with_policy(model, Streaming(sinks=2, window=30))
    with headwise.apply(model.model):
        cache = headwise.new_cache(model.model)
        model.model(torch.randint(3, 97, (1, 80)), past_key_values=cache)
    assert [layer.kept for layer in memory_report(cache).layers] == [16, 32, 16]


def test_a_model_that_slides_throughout_is_refused() -> None:
    with pytest.raises(HeadwiseError, match="every layer of mistral is a sliding-window layer"):
        with_policy(loaded("mistral"), Streaming())


def test_policies_are_read() -> None:
    assert parse_policy("h2o") == H2O()
    expected = H2O(heavy=400, recent=0.1, normalised=True)
    assert parse_policy("h2o:heavy=400,recent=0.1,normalised=true") == expected
    for text, said in (
        ("h3o", "unknown policy 'h3o'; known: full, streaming, h2o, snapkv"),
        ("h2o:heavy", "'heavy' must be FIELD=VALUE"),
        ("h2o:heavi=1", "heavi: Extra inputs are not permitted"),
        ("streaming:window=0", "window: Input should be greater than or equal to 1"),
    ):
        with pytest.raises(HeadwiseError, match=said):
            parse_policy(text)


LENGTH, RECORD = 90, SnapKV(budget=40, window=8)


def kept_places(model: LoadedModel, cache: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Find the positions of each policy layer's kept keys by KV head, (G, n), in a full cache."""
    full = model.model(ids, use_cache=True).past_key_values
    found = []
    for layer, whole in zip(cache.layers, full.layers, strict=True):
        if layer.is_sliding:
            continue
        (policy,) = layer.policies
        apart = torch.cdist(policy.keys[0, :, : policy.kept], whole.keys[0])
        found.append(apart.argmin(-1))
        assert apart.min(-1).values.max() < 0.05
    return found


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_it_keeps_start_and_end_and_draws_the_rest(family: str) -> None:
    model = loaded(family)
    headwise = with_policy(model, RECORD)
    ids = torch.randint(3, 97, (1, LENGTH))
    found = []
    with headwise.apply(model.model):
        for seed in (0, 0, 1):
            cache = drawing(headwise.new_cache(model.model), RECORD, seed=seed)
            output = model.model(ids, past_key_values=cache)
            after = copy.deepcopy(cache)
            model.model(ids[:, :3], past_key_values=after)
            found.append((cache, output.logits))
            assert {layer.mean_kept for layer in after.layers if not layer.is_sliding} == {43}
    places = [kept_places(model, cache, ids) for cache, _ in found]
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
