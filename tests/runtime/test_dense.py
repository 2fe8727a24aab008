"""Dense attention by sdpa or our kernel: right by either, and chosen by the rule of the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from artifacts import HeadwiseError
from kernels import dispatch
from runtime import Headwise, apply_dense
from runtime.attention import dense
from tests.runtime.omnikv import CLOSE

BY_KERNEL = "dense by kernel"


def made(
    q_len: int, k_len: int, dtype: torch.dtype = torch.float32, heads: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(1, heads, q_len, 64, dtype=dtype),
        torch.randn(1, 2, k_len, 64, dtype=dtype),
        torch.randn(1, 2, k_len, 32, dtype=dtype),
    )


@pytest.mark.parametrize("by", ["kernel", "sdpa", "auto"])
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 200), (1000, 1000), (64, 1100), (300, 1500)])
@pytest.mark.parametrize("window", [None, 100])
def test_either_is_the_reference(window: int | None, q_len: int, k_len: int, by: str) -> None:
    q, k, v = made(q_len, k_len)
    found = dense.dense_attention(q, k, v, scale=0.2, window=window, by=by)
    expected = dense.every_key(q, k, v, scale=0.2, window=window, backend="reference")[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_soft_cap_is_the_kernel_s() -> None:
    q, k, v = made(100, 100)
    expected = dense.every_key(q, k, v, softcap=2.0, backend="reference")[0]
    torch.testing.assert_close(
        dense.dense_attention(q, k, v, softcap=2.0), expected, atol=1e-5, rtol=1e-4
    )
    with pytest.raises(ValueError, match="soft-cap"):
        dense.dense_attention(q, k, v, softcap=2.0, by="sdpa")
    with pytest.raises(ValueError, match="got 'fast'"):
        dense.dense_attention(q, k, v, by="fast")


@pytest.mark.parametrize(("k_len", "by"), [(1023, "sdpa"), (1024, "kernel")])
def test_the_rule_on_a_cpu(k_len: int, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dense.faster(*made(100, k_len)) == by
    monkeypatch.setattr(dispatch, "why_slow", lambda *_: "no compiler")
    assert dense.faster(*made(100, k_len)) == "sdpa"


def test_elsewhere_sdpa_serves() -> None:
    """A device without anything in it stands for a GPU."""
    assert dense.faster(*(x.to("meta") for x in made(4096, 4096))) == "sdpa"


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3", "GPTNeoX"])
def test_prefills_go_by_the_rule(
    family: str, build: Any, artifact_for: Any, ids: Any, monkeypatch: Any
) -> None:
    model, prompt = build(family), ids(1024)
    rows = [None] * model.config.num_hidden_layers
    expected = model(prompt).logits
    full = sum(
        kind == "full_attention"
        for kind in getattr(model.config, "layer_types", ["full_attention"] * 2)
    )
    for by, count in (("kernel", full), ("sdpa", 0)):
        monkeypatch.setattr("runtime.attention.function.faster", lambda *_, by=by: by)
        with Headwise(artifact_for(model, rows=rows)).apply(model) as handle:
            torch.testing.assert_close(model(prompt).logits, expected, **CLOSE)
            assert handle.stats()["dense"].get(BY_KERNEL, 0) == count


@pytest.mark.parametrize("left", [True, False])
def test_padded_batches_and_chunks(left: bool, build: Any, ids: Any) -> None:
    model, prompt = build(), ids(300, batch=3)
    real = torch.ones_like(prompt)
    real[0, slice(0, 250) if left else slice(50, None)] = 0
    real[2, slice(0, 7) if left else slice(293, None)] = 0
    given = {"attention_mask": real, "position_ids": (real.cumsum(1) - 1).clamp(min=0)}

    def run() -> Tensor:
        cache = DynamicCache(config=model.config)
        parts = [
            model(
                prompt[:, a:b],
                attention_mask=real[:, :b],
                position_ids=given["position_ids"][:, a:b],
                past_key_values=cache,
            ).logits
            for a, b in ((0, 170), (170, 230), (230, 300))
        ]
        return torch.cat(parts, dim=1)

    expected, whole = run(), model(prompt, **given).logits
    with apply_dense(model) as applied:
        torch.testing.assert_close(run()[real.bool()], expected[real.bool()], **CLOSE)
        torch.testing.assert_close(
            model(prompt, **given).logits[real.bool()], whole[real.bool()], **CLOSE
        )
        assert applied.settings.calls.total()[BY_KERNEL] == 8
    assert torch.equal(run(), expected)


def test_a_whole_model_densely_by_our_kernel_needs_no_artifact(build: Any, ids: Any) -> None:
    model, prompt = build(), ids(100)
    expected = model.generate(prompt, max_new_tokens=5, do_sample=False)
    former = model.config._attn_implementation
    with apply_dense(model) as applied:
        assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), expected)
        assert applied.stats()["dense"][BY_KERNEL] == 2 and set(applied.stats()) == {"dense"}
        with pytest.raises(HeadwiseError, match="applied already"):
            apply_dense(model)
        cache = applied.new_cache()
        assert torch.equal(
            model.generate(prompt, past_key_values=cache, max_new_tokens=5, do_sample=False),
            expected,
        )
        assert {type(layer).__name__ for layer in cache.layers} == {"GrowingLayer"}
    assert model.config._attn_implementation == former
    with apply_dense(model, by="model") as applied:
        assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), expected)
        assert BY_KERNEL not in applied.settings.calls.total()
    with pytest.raises(HeadwiseError, match="by must be one of"):
        apply_dense(model, by="magic")


def test_dense_kernels_false_leaves_all_to_the_model(
    build: Any, artifact_for: Any, ids: Any
) -> None:
    model, prompt = build(), ids(1024)
    expected = model(prompt).logits
    with Headwise(artifact_for(model, rows=[None, None])).apply(
        model, dense_kernels=False
    ) as handle:
        assert torch.equal(model(prompt).logits, expected)
        assert handle.stats()["dense"] == {"layer left alone": 2}
