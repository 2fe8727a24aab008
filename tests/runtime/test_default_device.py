"""torch.set_default_device moves nothing: tensors of the host stay, others name their device."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

import artifacts
from runtime import LoadedArtifact, apply_dense
from tests.runtime.batches import real_from
from tests.runtime.omnikv import LAYERS
from tests.runtime.test_training import POLICIES

UNIFORM = {"selector": "uniform", "prefill_ratio": 0.1}
WAYS = ["patterns", "dense", "filters", "packed filters", *POLICIES, "unlike heads", "positions"]


@pytest.mark.parametrize("way", WAYS)
def test_default_device_changes_nothing(way, build, artifact_for, decoding, keeping, ids):
    """Serve padded prompts, a chunk, steps, drafts taken back, and other beams on a copy."""
    model = build(**LAYERS) if "filters" in way else build()
    tokens, real = ids(262, batch=2), real_from(262, 60, 0)
    policies = dict(POLICIES)
    rows = None
    if way == "unlike heads":
        rows = [("snapkv", "h2o"), ("streaming", "full")]
        policies = {name: POLICIES[name] for name in ("snapkv", "h2o", "streaming", "full")}
    elif way in POLICIES:
        policies = POLICIES[way]
    elif way == "positions":
        policies = artifacts.Streaming(sinks=4, window=60, positions="cache")
    applied = {
        "patterns": lambda: LoadedArtifact(artifact_for(model)).apply(model),
        "dense": lambda: apply_dense(model),
        "filters": lambda: decoding(model, **UNIFORM).apply(model),
        "packed filters": lambda: decoding(model, **UNIFORM).apply(model),
    }.get(way, lambda: keeping(model, policies, rows).apply(model))
    offload = "packed" if way == "packed filters" else "never"

    def served():
        with applied() as handle:
            cache = handle.new_cache(offload=offload)
            forward = partial(model, past_key_values=cache)
            logits = [
                forward(tokens[:, begin:end], attention_mask=real[:, :end]).logits
                for begin, end in ((0, 160), (160, 260), (260, 261))
            ]
            cache = copy.deepcopy(cache)
            cache.reorder_cache(torch.tensor([1, 1], device="cpu"))
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([0, 3], device="cpu"))
            mask = torch.ones(2, 262, dtype=torch.long, device="cpu")
            logits.append(model(tokens[:, 261:], attention_mask=mask, past_key_values=cache).logits)
            return logits, handle.stats()

    expected = served()
    with torch.device("meta"):
        actual = served()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
