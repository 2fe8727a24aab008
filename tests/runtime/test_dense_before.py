"""What stays dense goes through the attention that the model had, whichever that was: flash and flex keep theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask

from runtime import Headwise

NAME = "flash_for_tests"


@pytest.fixture
def flash() -> list[tuple[str, Any, int]]:
    """A flash attention: no mask of Q x K, and it reads its name in the module's configuration. What it was given."""
    given: list[tuple[str, Any, int]] = []

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any) -> Any:
        given.append((module.config._attn_implementation, mask, module.layer_idx))
        whole = None
        if mask is not None:
            real = mask.bool()[:, None, None, :]
            whole = real & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        elif q.shape[2] != k.shape[2]:
            whole = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])[None, None]
        return sdpa_attention_forward(module, q, k, v, whole, **more)

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    return given


def test_a_flash_user_keeps_flash(flash: Any, build: Any, artifact_for: Any, ids: Any) -> None:
    model, short, long = build(), ids(100, batch=2), ids(1100, batch=2)
    real = torch.ones_like(short)
    real[0, :30] = 0
    model.config._attn_implementation = NAME
    given = {"attention_mask": real, "position_ids": (real.cumsum(1) - 1).clamp(min=0)}
    expected = model(short, **given).logits[real.bool()], model(long).logits
    flash.clear()
    with Headwise(artifact_for(model, rows=[None, None])).apply(model) as handle:
        found = model(short, **given).logits[real.bool()]
        assert torch.equal(found, expected[0])
        assert torch.equal(model(long).logits, expected[1])
        generated = model.generate(short[1:], max_new_tokens=3, do_sample=False)
        assert handle.stats()["dense"] == {"layer left alone": 6, "decode": 4}
    assert {name for name, _, _ in flash} == {NAME}
    assert [None if mask is None else tuple(mask.shape) for _, mask, _ in flash[:4]] == [(2, 100)] * 2 + [None] * 2
    assert model.config._attn_implementation == NAME
    assert torch.equal(model.generate(short[1:], max_new_tokens=3, do_sample=False), generated)


def test_a_sparse_prefill_of_a_flash_user(flash: Any, build: Any, artifact_for: Any, masked: Any, ids: Any) -> None:
    model, prompt = build(), ids(200)
    with masked(model):
        expected = model(prompt).logits
    model.config._attn_implementation = NAME
    with Headwise(artifact_for(model)).apply(model, strict=True) as handle:
        torch.testing.assert_close(model(prompt).logits, expected, atol=2e-4, rtol=1e-3)
        assert handle.stats()["sparse"] == 2
    assert not flash


def test_a_flex_user_keeps_flex(build: Any, artifact_for: Any, ids: Any, monkeypatch: Any) -> None:
    model, prompt = build(), ids(100)
    expected = model(prompt).logits
    seen: list[str] = []

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **more: Any) -> Any:
        seen.append(type(mask).__name__)
        return sdpa_attention_forward(module, q, k, v, None, **more)

    monkeypatch.setitem(AttentionInterface._global_mapping, "flex_attention", attention)
    model.config._attn_implementation = "flex_attention"
    # transformers compiles the making of the mask, which takes ten seconds and changes no mask.
    with torch.compiler.set_stance("force_eager"), Headwise(artifact_for(model)).apply(model) as handle:
        torch.testing.assert_close(model(prompt).logits, expected)
        assert handle.stats()["dense"] == {"short": 2}
    assert seen == ["BlockMask"] * 2


def test_a_short_sequence_beside_long_ones_is_flash_s_too(flash: Any, build: Any, artifact_for: Any, ids: Any) -> None:
    """On a past, where sdpa would want a mask, which flash does not take."""
    model, tokens = build(), ids(300, batch=2)
    real = torch.ones_like(tokens)
    real[0, :190] = 0
    positions = (real.cumsum(1) - 1).clamp(min=0)

    def run() -> Tensor:
        cache, logits = DynamicCache(config=model.config), []
        for a, b in ((0, 200), (200, 300)):
            given = {"attention_mask": real[:, :b], "position_ids": positions[:, a:b]}
            logits.append(model(tokens[:, a:b], past_key_values=cache, **given).logits)
        return torch.cat(logits, dim=1)

    expected = run()
    model.config._attn_implementation = NAME
    with Headwise(artifact_for(model, dense=True)).apply(model, strict=True) as handle:
        torch.testing.assert_close(run()[real.bool()], expected[real.bool()], atol=2e-4, rtol=1e-3)
        assert handle.stats()["sparse"] == 4
    assert len(flash) == 4 and all(mask is None for _, mask, _ in flash)
