"""Sinks and a window: the same however tokens come, and what masked full attention over re-counted
positions gives."""

from __future__ import annotations

import inspect
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import repeat_kv

from artifacts import HeadwiseError, Streaming
from runtime import memory_report
from runtime.caches.policy import Step
from runtime.caches.rotation import Rotation
from runtime.caches.window import Window
from tests.runtime.caches.feeding import fed

CLOSE = {"atol": 3e-4, "rtol": 1e-3}


@contextmanager
def oracle(model: Any, sinks: int, window: int, counted: bool) -> Iterator[None]:
    """Every query by itself over all keys: sinks and window, with keys taken back to where the text
    has no position.

    Without a cache, so that keys come with the rotations of positions 0, 1, ...
    """
    rotary, apply = model.model.rotary_emb, None

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **kwargs: Any
    ) -> Any:
        nonlocal apply
        apply = inspect.unwrap(type(module).forward).__globals__["apply_rotary_pos_emb"]
        n = q.shape[2]
        kind = (
            {}
            if "layer_type" not in inspect.signature(rotary.forward).parameters
            else {"layer_type": "full_attention"}
        )

        def turned(x: Tensor, by: Tensor) -> Tensor:
            cos, sin = rotary(x, by[None], **kind)
            return apply(x, x, cos, sin)[0]

        plain_q, plain_k = turned(q, -torch.arange(n)), turned(k, -torch.arange(n))
        groups, out = q.shape[1] // k.shape[1], []
        for t in range(n):
            seen = sorted({*range(min(sinks, t + 1)), *range(max(0, t - window + 1), t + 1)})
            places = torch.arange(len(seen)) if counted else torch.tensor(seen)
            keys = repeat_kv(turned(plain_k[:, :, seen], places), groups)
            query = turned(plain_q[:, :, t : t + 1], places[-1:])
            weights = (query @ keys.transpose(2, 3) * scaling).softmax(-1)
            out.append(weights @ repeat_kv(v[:, :, seen], groups))
        return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None

    AttentionInterface.register("window_oracle", attention)
    former = model.config._attn_implementation
    model.config._attn_implementation = "window_oracle"
    try:
        yield
    finally:
        model.config._attn_implementation = former


@pytest.mark.parametrize("counted", [True, False], ids=["cache", "original"])
@pytest.mark.parametrize("sizes", [(1,), (2,), (3, 1), (16,), (17,), (40, 1), (100,)])
@pytest.mark.parametrize(("sinks", "window"), [(4, 12), (1, 1), (0, 9), (3, 40)])
def test_however_tokens_come_each_sees_sinks_and_window(
    sinks, window, sizes, counted, build, keeping, ids
):
    model, tokens = build(), ids(100, batch=2)
    with oracle(model, sinks, window, counted):
        expected = model(tokens, use_cache=False).logits
    policy = Streaming(sinks=sinks, window=window, positions="cache" if counted else "original")
    with keeping(model, policy).apply(model) as handle:
        found = fed(model, tokens, sizes, handle.new_cache())
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("family", ["Qwen3", "Phi3", "GPTNeoX", "Glm4"])
def test_positions_are_counted_in_the_cache_with_the_model_s_own_rotation(
    family, build, keeping, ids
):
    more = {"head_dim": 64} if family == "Glm4" else {}
    model, tokens = build(family, **more), ids(90)
    if family == "GPTNeoX":
        model.model = model.gpt_neox
    with oracle(model, 4, 20, counted=True):
        expected = model(tokens, use_cache=False).logits
    with keeping(model, Streaming(sinks=4, window=20)).apply(model) as handle:
        found = fed(model, tokens, (50, 1), handle.new_cache())
    torch.testing.assert_close(found, expected, **CLOSE)


def test_the_example_of_the_paper() -> None:
    """StreamingLLM, Figure 4: of tokens 0..9 the cache holds [0, 1, 2, 3, 6, 7, 8] and 9, at
    positions 0..7."""
    policy, shifts = Window(4, 4), []
    k = torch.arange(10.0)[None, None, :, None].expand(1, 1, 10, 8).contiguous()
    for t in range(10):
        _attend(policy, k[:, :, t : t + 1])
        shifts.append(policy._shift(t))
    assert policy.keys is not None
    assert sorted(policy.keys[0, 0, : policy.kept, 0].tolist()) == [0, 1, 2, 3, 6, 7, 8, 9]
    # The query is token 9 of the text and stands at position 7.
    assert 9 - shifts[9] == 7


@pytest.mark.parametrize(
    ("window", "chunks", "slots"),
    [(3, [5], [3, 4, 2]), (3, [5, 5], [9, 7, 8]), (4, [10], [8, 9, 6, 7])],
)
def test_slot_is_i_mod_w(window, chunks, slots) -> None:
    """Mistral 7B, section 2: the examples of its rolling buffer."""
    policy, at = Window(0, window), 0
    for size in chunks:
        _attend(
            policy,
            torch.arange(float(at), at + size)[None, None, :, None]
            .expand(1, 1, size, 8)
            .contiguous(),
        )
        at += size
    assert policy.keys is not None
    assert policy.keys[0, 0, :, 0].tolist() == slots


def _attend(policy: Window, k: Tensor) -> None:
    policy.attend(
        Step(
            q=torch.randn_like(k),
            k=k,
            v=k,
            scale=1.0,
            softcap=None,
            backend="reference",
            prefill=lambda q, k, v: v,
        )
    )


def test_memory_is_that_of_the_window_however_long_the_stream(build, keeping, ids):
    model = build()
    with keeping(model, Streaming(sinks=4, window=28)).apply(model) as handle:
        cache = handle.new_cache()
        fed(model, ids(64), (64,), cache)
        held = memory_report(cache).device
        pointers = {
            tensor.data_ptr()
            for layer in cache.layers
            for policy in layer.policies
            for tensor in [policy.keys]
        }
        fed(model, ids(300), (1,), cache)
        report = memory_report(cache)
        assert report.device == held
        assert {
            t.data_ptr() for la in cache.layers for p in la.policies for t in [p.keys]
        } == pointers
        assert [(layer.seen, layer.kept) for layer in report.layers] == [(364, 32)] * 2


def test_three_thousand_steps_need_no_more_memory_than_one(build) -> None:
    model = build(num_hidden_layers=1, num_key_value_heads=1, num_attention_heads=1, hidden_size=64)
    policy = Window(4, 28, Rotation(model, model.model.layers[0].self_attn))

    def steps(count: int) -> None:
        for _ in range(count):
            q, k, v = torch.randn(3, 1, 1, 1, 64)
            policy.attend(
                Step(
                    q=q, k=k, v=v, scale=0.1, softcap=None, backend="cpu", prefill=lambda q, k, v: v
                )
            )

    steps(100)
    lie = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in policy.tensors().items()}
    tracemalloc.start()
    steps(200)
    before = tracemalloc.get_traced_memory()[0]
    steps(2700)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert {
        name: (tensor.data_ptr(), tensor.shape) for name, tensor in policy.tensors().items()
    } == lie
    # Python's smallest object has 16 bytes; other threads of the process allocate some thousand.
    assert set(lie) == {"keys", "values", "first"} and grown < 16 * 2700
    assert (policy.seen, policy.kept) == (3000, 32)


def test_a_softcap_goes_into_both_parts(build, keeping, ids):
    model, tokens = build("Gemma2", layer_types=["full_attention"] * 2), ids(80)
    with keeping(model, Streaming(sinks=2, window=200)).apply(model) as handle:
        found = fed(model, tokens, (30, 20), handle.new_cache())
    expected = model(tokens, use_cache=False).logits
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_change_with_the_length_are_refused(kind, build, keeping):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    if kind == "longrope":
        factors = {
            "short_factor": [1.0] * 32,
            "long_factor": [2.0] * 32,
            "original_max_position_embeddings": 512,
        }
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, **factors}
    model = build(rope_parameters=rope)
    with pytest.raises(
        HeadwiseError, match=f"{kind}.* changes with the length; set positions: original"
    ):
        keeping(model, Streaming()).new_cache(model)
    keeping(model, Streaming(positions="original")).new_cache(model)


def test_yarn_s_factor_on_attention_is_not_applied_twice(build, keeping, ids):
    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 256,
    }
    model, tokens = build(rope_parameters=rope), ids(100)
    with keeping(model, Streaming(sinks=4, window=20)).apply(model) as handle:
        by_one = fed(model, tokens, (1,), handle.new_cache())
        torch.testing.assert_close(fed(model, tokens, (37,), handle.new_cache()), by_one, **CLOSE)
    with keeping(model, Streaming(sinks=4, window=200)).apply(model) as handle:
        cache = handle.new_cache()
        torch.testing.assert_close(
            fed(model, tokens, (37,), cache),
            fed(model, tokens, (37,), DynamicCache(config=model.config)),
            **CLOSE,
        )


def test_backends_agree(build, keeping, ids):
    model, tokens = build(), ids(100)
    headwise = keeping(model, Streaming(sinks=4, window=30))
    found = []
    for backend in ("reference", "auto"):
        with headwise.apply(model, backend=backend) as handle:
            found.append(fed(model, tokens, (60, 1), handle.new_cache()))
    torch.testing.assert_close(*found, **CLOSE)
