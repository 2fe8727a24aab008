"""Prompts under SnapKV: attended to by patterns, and what of them can be taken back.

That a policy keeps what its definition keeps is shown by tests/conformance.
"""

from __future__ import annotations

import pytest
import torch

from artifacts import HeadwiseError, SnapKV
from runtime import memory_report
from tests.runtime.caches.feeding import fed

CLOSE = {"atol": 3e-4, "rtol": 1e-3}


def test_a_prompt_is_attended_to_by_the_artifact_s_patterns(build, keeping, apply, ids):
    model, tokens = build(), ids(200)
    rows = [["vs_70_70", "a_64_64", "bs_2", "a_64_64"]] * 2
    policy = SnapKV(budget=40, window=16)
    with keeping(model, policy, patterns=rows).apply(model, backend="reference") as handle:
        cache = handle.new_cache()
        found = model(tokens, past_key_values=cache).logits
        assert handle.stats() == {"sparse": 2, "kept": 2, "dense": {}}
        assert [layer.kept for layer in memory_report(cache).layers] == [40, 40]
        model(tokens[:, :1], past_key_values=cache)
    with apply(model, rows=rows, strict=True):
        torch.testing.assert_close(found, model(tokens).logits, **CLOSE)


def test_generated_tokens_are_taken_back_and_a_compressed_prompt_is_not(build, keeping, ids):
    model, tokens = build(), ids(100)
    with keeping(model, SnapKV(budget=20, window=8)).apply(model) as handle:
        expected = fed(model, tokens, (70, 1), handle.new_cache())
        cache = handle.new_cache()
        fed(model, torch.cat([tokens[:, :80], ids(9, seed=3)], dim=1), (70, 1), cache)
        cache.crop(-9)
        torch.testing.assert_close(
            fed(model, tokens[:, 80:], (1,), cache), expected[:, 80:], **CLOSE
        )
        with pytest.raises(HeadwiseError, match="cannot take 31 tokens back"):
            cache.crop(-31)
        assert [layer.kept for layer in memory_report(cache).layers] == [50, 50]


def test_a_prompt_that_cost_nothing_is_taken_back(build, keeping, ids):
    model, tokens = build(), ids(100)
    with keeping(model, SnapKV(budget=1.0, window=8)).apply(model) as handle:
        cache = handle.new_cache()
        fed(model, tokens, (50, 1, 40), cache)
        cache.crop(-60)
        for state in (layer.policies[0] for layer in cache.layers):
            assert (state.seen, state.kept) == (40, 40)
        found = fed(model, tokens[:, 40:], (10,), cache)
    torch.testing.assert_close(found, model(tokens).logits[:, 40:], **CLOSE)
