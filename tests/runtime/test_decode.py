"""Decode as OmniKV does it, against the same thing written down in plain torch over full attention weights.

Shapes: B batch, H query heads, Q query length, K key length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import sdpa_mask

from artifacts import HeadwiseError, OmniKV

CLOSE = {"atol": 3e-4, "rtol": 1e-3}
LAYERS = {"num_hidden_layers": 6}
DECODE = OmniKV(filter_layers=(2, 4), dense_layers=(0, 1), selector="last", window=4, budget=24)


@dataclass
class Oracle:
    """Attention from full weights; keeps what filter layers chose and the scores of their latest queries."""

    decode: OmniKV
    longest_decode: int = 16
    chosen: dict[int, Tensor] = field(default_factory=dict)
    rows: dict[int, list[Tensor]] = field(default_factory=dict)

    def __call__(self, module, query, key, value, mask, dropout=0.0, scaling=None, **kwargs) -> Any:
        q_len, k_len, layer = query.shape[2], key.shape[2], module.layer_idx
        groups = query.shape[1] // key.shape[1]
        keys, values = repeat_kv(key, groups), repeat_kv(value, groups)
        logits = query @ keys.transpose(2, 3) * scaling
        seen = torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len)[None, None]
        window = getattr(module, "sliding_window", None)
        if mask is not None:
            seen = mask[..., :k_len]
        logits = logits.masked_fill(~seen, float("-inf"))
        budget = self.decode.budget if isinstance(self.decode.budget, int) else ceil(self.decode.budget * k_len)
        chooses = q_len <= self.longest_decode and k_len > budget and window is None
        before = [f for f in self.decode.filter_layers if f < layer]
        if chooses and layer not in (*self.decode.filter_layers, *self.decode.dense_layers) and before:
            logits = logits.masked_fill(~self.chosen[before[-1]][:, None, None], float("-inf"))
        weights = logits.softmax(-1)
        if layer in self.decode.filter_layers and window is None:
            self._choose(layer, weights.nan_to_num(), seen, q_len, budget, chooses)
        return (weights @ values).transpose(1, 2).contiguous(), weights

    def _choose(self, layer: int, weights: Tensor, seen: Tensor, q_len: int, budget: int, chooses: bool) -> None:
        rows, window = self.rows.setdefault(layer, []), self.decode.window
        if chooses:
            rows.append(weights.amax((1, 2)))
        elif q_len > 1:
            rows += [weights[:, :, -back].amax(1) for back in range(min(window - 1, q_len), 0, -1)]
        if not chooses:
            return
        k_len = weights.shape[-1]
        latest = [torch.nn.functional.pad(r, (0, k_len - r.shape[-1])) for r in rows[-window:]]
        scores = latest[-1].clone()
        if self.decode.selector == "uniform":
            scores = sum(latest)
        elif self.decode.selector == "exponential":
            scores = sum(r * 0.5**age for age, r in enumerate(reversed(latest)))
        scores[:, -q_len:] = float("inf")
        real = seen[:, 0, -1].expand(weights.shape[0], -1)
        scores = scores.masked_fill(~real, float("-inf"))
        best = scores.topk(min(budget, k_len), dim=-1).indices
        self.chosen[layer] = torch.zeros_like(real).scatter(1, best, True) & real


@contextmanager
def oracle(model: Any, decode: OmniKV) -> Iterator[Oracle]:
    attention = Oracle(decode)
    AttentionInterface.register("omnikv_oracle", attention)
    AttentionMaskInterface.register("omnikv_oracle", sdpa_mask)
    former = model.config._attn_implementation
    model.config._attn_implementation = "omnikv_oracle"
    try:
        yield attention
    finally:
        model.config._attn_implementation = former


@pytest.fixture
def decoding(artifact_for: Any) -> Callable[..., Any]:
    """decoding(model, **changes of the section) -> a Headwise whose artifact has a decode section."""
    from artifacts import Decode
    from runtime import Headwise

    def decoding(model: Any, **changes: Any) -> Headwise:
        section = Decode(omnikv=DECODE.model_copy(update=changes))
        return Headwise(artifact_for(model, dense=True, dense_below=64).model_copy(update={"decode": section}))

    return decoding


def steps(model: Any, prompt: Tensor, forced: Tensor, cache: Any, **given: Any) -> Tensor:
    """Logits of a prefill's last token and of every forced token after it: (B, 1 + forced, vocabulary)."""
    real = given.get("attention_mask")
    out = [model(prompt, past_key_values=cache, use_cache=True, **given).logits[:, -1:]]
    for i in range(forced.shape[1]):
        more = {}
        if real is not None:
            real = torch.nn.functional.pad(real, (0, 1), value=1)
            more = {"attention_mask": real, "position_ids": real.sum(1, keepdim=True) - 1}
        out.append(model(forced[:, i : i + 1], past_key_values=cache, use_cache=True, **more).logits)
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("selector", ["last", "uniform", "exponential"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3"])
def test_every_step_is_what_the_oracle_computes(selector, family, build, decoding, ids) -> None:
    kinds = (
        {"layer_types": ["full_attention", "sliding_attention"] + ["full_attention"] * 4} if family == "Gemma3" else {}
    )
    changes = {"dense_layers": (0,)} if family == "Gemma3" else {}
    model, prompt, forced = build(family, **LAYERS, **kinds), ids(150), ids(12, seed=9)
    loaded = decoding(model, selector=selector, **changes)
    with oracle(model, loaded.artifact.decode.omnikv):
        expected = steps(model, prompt, forced, DynamicCache(config=model.config))
    dense = steps(model, prompt, forced, DynamicCache(config=model.config))
    with loaded.apply(model, backend="reference", strict=True) as handle:
        found = steps(model, prompt, forced, handle.cache())
        assert handle.stats()["decode"] == 12 * (6 if family != "Gemma3" else 5)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert (found - dense).abs().max() > 0.05, "the budget must bite, or nothing is tested"


def test_without_the_cache_the_last_query_chooses(build, decoding, ids) -> None:
    model, prompt, forced = build(**LAYERS), ids(150), ids(6, seed=9)
    with decoding(model).apply(model, backend="reference") as handle:
        expected = steps(model, prompt, forced, handle.cache())
        found = steps(model, prompt, forced, DynamicCache(config=model.config))
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("budget", [200, 0.99999])
def test_a_budget_of_everything_is_dense(budget, backend, build, decoding, ids) -> None:
    model, prompt, forced = build(**LAYERS), ids(150), ids(6, seed=9)
    expected = steps(model, prompt, forced, DynamicCache(config=model.config))
    with decoding(model, budget=budget).apply(model, backend=backend) as handle:
        torch.testing.assert_close(steps(model, prompt, forced, handle.cache()), expected, **CLOSE)


@pytest.mark.parametrize("selector", ["last", "exponential"])
def test_left_padded_batch_is_its_sequences_alone(selector, build, decoding, ids) -> None:
    model, forced = build(**LAYERS), ids(8, seed=9)
    prompts = [ids(n, seed=n) for n in (150, 90, 120)]
    width = max(p.shape[1] for p in prompts)
    tokens = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0)) for p in prompts])
    real = torch.stack([torch.arange(width) >= width - p.shape[1] for p in prompts]).long()
    with decoding(model, selector=selector).apply(model, backend="auto") as handle:
        alone = [steps(model, p, forced, handle.cache()) for p in prompts]
        positions = (real.cumsum(1) - 1).clamp(min=0)
        together = steps(
            model, tokens, forced.expand(3, -1), handle.cache(), attention_mask=real, position_ids=positions
        )
    torch.testing.assert_close(together, torch.cat(alone), **CLOSE)


def test_turns_chunks_and_crops_on_one_cache(build, decoding, ids) -> None:
    model, text = build(**LAYERS), ids(200)
    section = {"selector": "uniform", "window": 3}
    with decoding(model, **section).apply(model, backend="auto") as handle:
        cache = handle.cache()
        first = steps(model, text[:, :100], text[:, 100:104], cache)
        cache.crop(-2)
        again = torch.cat(
            [model(text[:, at : at + 1], past_key_values=cache, use_cache=True).logits for at in (102, 103)], dim=1
        )
        torch.testing.assert_close(again, first[:, 3:], **CLOSE)
        second = steps(model, text[:, 104:190], text[:, 190:194], cache)
        other = handle.cache()
        for chunk in (text[:, :60], text[:, 60:100]):
            model(chunk, past_key_values=other, use_cache=True)
        for at in range(100, 104):
            model(text[:, at : at + 1], past_key_values=other, use_cache=True)
        torch.testing.assert_close(steps(model, text[:, 104:190], text[:, 190:194], other), second, **CLOSE)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}])
def test_beams_and_samples_carry_their_scores_along(options, build, decoding, ids) -> None:
    model, prompt = build(**LAYERS), ids(120)
    options = {"max_new_tokens": 6, "do_sample": False, "min_new_tokens": 6} | options
    loaded = decoding(model, selector="uniform", window=3, budget=0.9999)
    torch.manual_seed(0)
    expected = model.generate(prompt, **options)
    with loaded.apply(model, backend="auto") as handle:
        torch.manual_seed(0)
        assert torch.equal(model.generate(prompt, past_key_values=handle.cache(), **options), expected)
    with decoding(model, selector="uniform", window=3).apply(model, backend="auto") as handle:
        model.generate(prompt, past_key_values=handle.cache(), **options)
        assert handle.stats()["decode"] > 0


def test_assisted_decoding_gives_the_tokens_of_plain_decoding(build, decoding, ids) -> None:
    model, helper, prompt = build(**LAYERS), build(seed=3), ids(120)
    options = {"max_new_tokens": 8, "do_sample": False}
    with decoding(model, budget=0.9999).apply(model, backend="auto") as handle:
        expected = model.generate(prompt, past_key_values=handle.cache(), **options)
        found = model.generate(prompt, past_key_values=handle.cache(), assistant_model=helper, **options)
    assert torch.equal(found, expected)


def test_two_threads_do_not_disturb_each_other(build, decoding, ids) -> None:
    from concurrent.futures import ThreadPoolExecutor

    model = build(**LAYERS)
    prompts = [ids(n, seed=n) for n in (100, 130, 160, 110)]
    with decoding(model).apply(model, backend="auto") as handle:

        def run(prompt: Tensor) -> Tensor:
            with torch.no_grad():
                return steps(model, prompt, prompt[:, :10], handle.cache())

        alone = [run(prompt) for prompt in prompts]
        with ThreadPoolExecutor(2) as pool:
            together = list(pool.map(run, prompts))
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_no_memory_is_copied_for_a_new_token(build, decoding, ids) -> None:
    model = build(**LAYERS)
    with decoding(model).apply(model) as handle:
        cache = handle.cache()
        model(ids(150), past_key_values=cache, use_cache=True)
        before = [layer.keys.data_ptr() for layer in cache.layers]
        model(ids(1), past_key_values=cache, use_cache=True)
        assert [layer.keys.data_ptr() for layer in cache.layers] == before
        held = sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))
        assert handle.cache_bytes(cache) == held


def test_inference_mode_may_end_between_two_steps(build, decoding, ids) -> None:
    model, prompt = build(**LAYERS), ids(120)
    with decoding(model).apply(model, backend="auto") as handle:
        expected = steps(model, prompt, prompt[:, :3], handle.cache())
        cache = handle.cache()
        with torch.inference_mode():
            first = model(prompt, past_key_values=cache, use_cache=True).logits[:, -1:].clone()
        rest = [model(prompt[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(3)]
    torch.testing.assert_close(torch.cat([first, *rest], dim=1), expected, **CLOSE)


def test_a_section_that_does_not_fit_the_model_is_refused(build, decoding) -> None:
    model = build("Gemma3")
    with pytest.raises(HeadwiseError, match="filter layer 0 slides: decode can filter in the layers 1, 2"):
        decoding(model, filter_layers=(0,), dense_layers=()).apply(model)
    plain = build(seed=1)
    from runtime import Headwise

    loaded = decoding(plain, filter_layers=(0,), dense_layers=())
    with (
        Headwise(loaded.artifact.model_copy(update={"decode": None})).apply(plain) as handle,
        pytest.raises(HeadwiseError, match="the artifact has no decode section"),
    ):
        handle.cache()
