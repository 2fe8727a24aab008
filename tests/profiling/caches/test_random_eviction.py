"""Random eviction keeps a prompt's start and end, and random tokens of each KV head and layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from artifacts import SnapKV
from profiling.caches.parsing import SINKS
from profiling.caches.policies import drawing, with_policy
from profiling.models.loading import LoadedModel
from tests.profiling.conftest import tiny

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
    model = LoadedModel(tiny(family), None, family, None)
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
