"""Decode over every key by our kernel: as sdpa has it, counted, and only where it is meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from runtime import Headwise
from tests.runtime.omnikv import CLOSE, steps
from tests.runtime.tiny import WITHOUT_DENSE_KERNELS

BY_KERNEL = "decode by kernel"


@pytest.fixture(autouse=True)
def _at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 it waits for 256 keys; here there are fewer."""
    monkeypatch.setattr("runtime.attention.function._MIN_KEYS_FLOAT32", 1)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3", "Gemma2", "GPTNeoX", "Phi3"])
@pytest.mark.parametrize("own_cache", [False, True])
def test_steps_are_those_of_sdpa(
    own_cache: bool, family: str, build: Any, artifact_for: Any, ids: Any
) -> None:
    model, prompt, forced = build(family), ids(100), ids(8, seed=9)
    expected = steps(model, prompt, forced, DynamicCache(config=model.config))
    with Headwise(artifact_for(model, dense=True)).apply(model) as handle:
        cache = handle.new_cache() if own_cache else DynamicCache(config=model.config)
        found = steps(model, prompt, forced, cache)
        dense = handle.stats()["dense"]
    torch.testing.assert_close(found, expected, **CLOSE)
    assert dense.get(BY_KERNEL, 0) == 8 * model.config.num_hidden_layers


@pytest.mark.parametrize("left", [True, False])
def test_padded_batches(left: bool, build: Any, artifact_for: Any, ids: Any) -> None:
    model, prompt, forced = build(), ids(100, batch=3), ids(8, batch=3, seed=9)
    real = torch.ones_like(prompt)
    real[0, slice(0, 40) if left else slice(60, None)] = 0
    real[2, slice(0, 7) if left else slice(93, None)] = 0
    given: dict[str, Any] = {
        "attention_mask": real,
        "position_ids": (real.cumsum(1) - 1).clamp(min=0),
    }
    expected = steps(model, prompt, forced, DynamicCache(config=model.config), **given)
    with Headwise(artifact_for(model, dense=True)).apply(model) as handle:
        found = steps(model, prompt, forced, DynamicCache(config=model.config), **given)
        dense = handle.stats()["dense"]
    torch.testing.assert_close(found, expected, **CLOSE)
    # Tokens after padding on the right leave holes in their sequences.
    assert dense.get(BY_KERNEL, 0) == (16 if left else 0)


def test_a_layer_that_lost_tokens_fails_as_with_sdpa(
    build: Any, artifact_for: Any, ids: Any
) -> None:
    model, prompt = build(), ids(100, batch=2)
    real = torch.ones_like(prompt)
    real[0, :40] = 0
    cache = DynamicCache(config=model.config)
    model(prompt, attention_mask=real, past_key_values=cache)
    cache.layers[1].keys, cache.layers[1].values = (
        x[:, :, 5:] for x in (cache.layers[1].keys, cache.layers[1].values)
    )
    longer = torch.cat([real, real[:, -1:]], dim=1)
    with (
        Headwise(artifact_for(model, dense=True)).apply(model),
        pytest.raises(RuntimeError, match="size"),
    ):
        model(prompt[:, :1], attention_mask=longer, past_key_values=cache)


@pytest.mark.parametrize("drafts", [2, 16, 17])
def test_drafts(drafts: int, build: Any, artifact_for: Any, ids: Any) -> None:
    model, prompt, few = build(), ids(100), ids(drafts, seed=9)

    def logits() -> Tensor:
        cache = DynamicCache(config=model.config)
        model(prompt, past_key_values=cache, use_cache=True)
        return model(few, past_key_values=cache, use_cache=True).logits

    expected = logits()
    with Headwise(artifact_for(model, dense=True)).apply(model) as handle:
        torch.testing.assert_close(logits(), expected, **CLOSE)
        assert handle.stats()["dense"].get(BY_KERNEL, 0) == (2 if drafts <= 16 else 0)


def test_a_prompt_of_few_tokens_is_sdpa_s(build: Any, artifact_for: Any, ids: Any) -> None:
    model, prompt = build(), ids(9)
    expected = model(prompt).logits
    with Headwise(artifact_for(model)).apply(model) as handle:
        assert torch.equal(model(prompt).logits, expected)
        assert handle.stats()["dense"] == {"short": 2}


def test_slots_that_are_not_filled_are_not_seen(build: Any, artifact_for: Any, ids: Any) -> None:
    model, prompt, forced = build(), ids(100), ids(4, seed=9)
    expected = steps(model, prompt, forced, DynamicCache(config=model.config))
    with Headwise(artifact_for(model, dense=True)).apply(model) as handle:
        found = steps(model, prompt, forced, StaticCache(config=model.config, max_cache_len=200))
        assert handle.stats()["dense"]["decode"] == 8
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize(("changes", "options"), WITHOUT_DENSE_KERNELS)
def test_switched_off(
    changes: dict[str, Any], options: dict[str, Any], build: Any, artifact_for: Any, ids: Any
) -> None:
    model, prompt, forced = build(**changes), ids(100), ids(4, seed=9)
    expected = steps(model, prompt, forced, DynamicCache(config=model.config))
    with Headwise(artifact_for(model)).apply(model, **options) as handle:
        assert torch.equal(
            steps(model, prompt, forced, DynamicCache(config=model.config)), expected
        )
        assert handle.stats()["dense"] == {"short": 2, "decode": 8}


def test_short_contexts_in_float32_are_sdpa_s_and_half_precision_is_ours(
    build: Any, artifact_for: Any, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.attention.function._MIN_KEYS_FLOAT32", 256)
    model = build()
    for dtype, length, reason in (
        (torch.float32, 100, "decode"),
        (torch.float32, 260, BY_KERNEL),
        (torch.bfloat16, 100, BY_KERNEL),
    ):
        model.to(dtype)
        prompt, forced = ids(length), ids(3, seed=9)
        expected = steps(model, prompt, forced, DynamicCache(config=model.config))
        with Headwise(artifact_for(model, dense=True)).apply(model) as handle:
            found = steps(model, prompt, forced, DynamicCache(config=model.config))
            assert handle.stats()["dense"][reason] == 6
        tolerance = CLOSE if dtype == torch.float32 else {"atol": 0.3, "rtol": 0.1}
        torch.testing.assert_close(found, expected, **tolerance)


def test_a_kernel_that_fails_leaves_it_to_sdpa(
    build: Any, artifact_for: Any, ids: Any, warnings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such instruction")

    model, prompt, forced = build(), ids(100), ids(4, seed=9)
    expected = steps(model, prompt, forced, DynamicCache(config=model.config))
    monkeypatch.setattr("runtime.attention.function.native.decode_attention", fails)
    with Headwise(artifact_for(model)).apply(model) as handle:
        assert torch.equal(
            steps(model, prompt, forced, DynamicCache(config=model.config)), expected
        )
        assert handle.stats()["dense"] == {"short": 2, "a kernel failed with RuntimeError": 8}
    assert warnings() == ["serving densely: a kernel failed with RuntimeError: no such instruction"]
