"""Decode as OmniKV does it, against the same thing written down in plain torch over full attention
weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from artifacts import HeadwiseError
from tests.runtime.omnikv import CLOSE, LAYERS, oracle, steps


@pytest.fixture(params=["never", "packed"])
def offload(request: pytest.FixtureRequest) -> str:
    """Where a cache keeps its keys and values."""
    offload: str = request.param
    return offload


@pytest.mark.parametrize("selector", ["last", "uniform", "exponential"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3"])
def test_every_step_is_what_the_oracle_computes(
    selector, family, offload, build, decoding, ids
) -> None:
    kinds = (
        {"layer_types": ["full_attention", "sliding_attention"] + ["full_attention"] * 4}
        if family == "Gemma3"
        else {}
    )
    changes = {"dense_layers": (0,)} if family == "Gemma3" else {}
    model, prompt, forced = build(family, **LAYERS, **kinds), ids(150), ids(12, seed=9)
    loaded = decoding(model, selector=selector, **changes)
    with oracle(model, loaded.artifact.decode.omnikv):
        expected = steps(model, prompt, forced, DynamicCache(config=model.config))
    dense = steps(model, prompt, forced, DynamicCache(config=model.config))
    with loaded.apply(model, backend="reference", strict=True) as handle:
        found = steps(model, prompt, forced, handle.new_cache(offload=offload))
        assert handle.stats()["decode"] == 12 * (6 if family != "Gemma3" else 5)
        assert handle.stats()["tokens"] == 24
    torch.testing.assert_close(found, expected, **CLOSE)
    assert (found - dense).abs().max() > 0.05, "the budget must bite, or nothing is tested"


@pytest.mark.parametrize("budget", [2, 24])
def test_drafts_see_themselves_and_what_is_before_them(
    budget, offload, build, decoding, ids
) -> None:
    model, prompt, drafts = build(**LAYERS), ids(150), ids(10, seed=9)

    def logits(cache: Cache) -> Tensor:
        model(prompt, past_key_values=cache, use_cache=True)
        parts = [
            model(part, past_key_values=cache, use_cache=True).logits
            for part in drafts.split((4, 1, 5), dim=1)
        ]
        return torch.cat(parts, dim=1)

    loaded = decoding(model, budget=budget)
    with oracle(model, loaded.artifact.decode.omnikv):
        expected = logits(DynamicCache(config=model.config))
    with loaded.apply(model, backend="auto") as handle:
        torch.testing.assert_close(logits(handle.new_cache(offload=offload)), expected, **CLOSE)


def test_without_the_cache_the_last_query_chooses(offload, build, decoding, ids) -> None:
    model, prompt, forced = build(**LAYERS), ids(150), ids(6, seed=9)
    with decoding(model).apply(model, backend="reference") as handle:
        expected = steps(model, prompt, forced, handle.new_cache(offload=offload))
        found = steps(model, prompt, forced, DynamicCache(config=model.config))
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("budget", [200, 0.99999])
def test_a_budget_of_everything_is_dense(budget, backend, offload, build, decoding, ids) -> None:
    model, prompt, forced = build(**LAYERS), ids(150), ids(6, seed=9)
    expected = steps(model, prompt, forced, DynamicCache(config=model.config))
    with decoding(model, budget=budget).apply(model, backend=backend) as handle:
        torch.testing.assert_close(
            steps(model, prompt, forced, handle.new_cache(offload=offload)), expected, **CLOSE
        )


@pytest.mark.parametrize("selector", ["last", "exponential"])
def test_left_padded_batch_is_its_sequences_alone(selector, offload, build, decoding, ids) -> None:
    model, forced = build(**LAYERS), ids(8, seed=9)
    prompts = [ids(n, seed=n) for n in (150, 90, 120)]
    width = max(p.shape[1] for p in prompts)
    tokens = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0)) for p in prompts])
    real = torch.stack([torch.arange(width) >= width - p.shape[1] for p in prompts]).long()
    with decoding(model, selector=selector).apply(model, backend="auto") as handle:
        alone = [steps(model, p, forced, handle.new_cache(offload=offload)) for p in prompts]
        positions = (real.cumsum(1) - 1).clamp(min=0)
        together = steps(
            model,
            tokens,
            forced.expand(3, -1),
            handle.new_cache(offload=offload),
            attention_mask=real,
            position_ids=positions,
        )
    torch.testing.assert_close(together, torch.cat(alone), **CLOSE)


def test_turns_chunks_and_crops_on_one_cache(offload, build, decoding, ids) -> None:
    model, text = build(**LAYERS), ids(200)
    section = {"selector": "uniform", "window": 3}
    with decoding(model, **section).apply(model, backend="auto") as handle:
        cache = handle.new_cache(offload=offload)
        first = steps(model, text[:, :100], text[:, 100:104], cache)
        cache.crop(-2)
        again = torch.cat(
            [
                model(text[:, at : at + 1], past_key_values=cache, use_cache=True).logits
                for at in (102, 103)
            ],
            dim=1,
        )
        torch.testing.assert_close(again, first[:, 3:], **CLOSE)
        second = steps(model, text[:, 104:190], text[:, 190:194], cache)
        other = handle.new_cache(offload=offload)
        for chunk in (text[:, :60], text[:, 60:100]):
            model(chunk, past_key_values=other, use_cache=True)
        for at in range(100, 104):
            model(text[:, at : at + 1], past_key_values=other, use_cache=True)
        torch.testing.assert_close(
            steps(model, text[:, 104:190], text[:, 190:194], other), second, **CLOSE
        )


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}]
)
def test_beams_and_samples_carry_their_scores_along(options, offload, build, decoding, ids) -> None:
    model, prompt = build(**LAYERS), ids(120)
    options = {"max_new_tokens": 6, "do_sample": False, "min_new_tokens": 6} | options
    loaded = decoding(model, selector="uniform", window=3, budget=0.9999)
    torch.manual_seed(0)
    expected = model.generate(prompt, **options)
    with loaded.apply(model, backend="auto") as handle:
        torch.manual_seed(0)
        assert torch.equal(
            model.generate(prompt, past_key_values=handle.new_cache(offload=offload), **options),
            expected,
        )
    with decoding(model, selector="uniform", window=3).apply(model, backend="auto") as handle:
        model.generate(prompt, past_key_values=handle.new_cache(offload=offload), **options)
        assert handle.stats()["decode"] > 0


def test_assisted_decoding_gives_the_tokens_of_plain_decoding(
    offload, build, decoding, ids
) -> None:
    model, helper, prompt = build(**LAYERS), build(seed=3), ids(120)
    options = {"max_new_tokens": 8, "do_sample": False}
    with decoding(model, budget=0.9999).apply(model, backend="auto") as handle:
        expected = model.generate(
            prompt, past_key_values=handle.new_cache(offload=offload), **options
        )
        cache = handle.new_cache(offload=offload)
        found = model.generate(prompt, past_key_values=cache, assistant_model=helper, **options)
    assert torch.equal(found, expected)


def test_two_threads_do_not_disturb_each_other(offload, build, decoding, ids) -> None:
    from concurrent.futures import ThreadPoolExecutor

    model = build(**LAYERS)
    prompts = [ids(n, seed=n) for n in (100, 130, 160, 110)]
    with decoding(model).apply(model, backend="auto") as handle:

        def run(prompt: Tensor) -> Tensor:
            with torch.no_grad():
                return steps(model, prompt, prompt[:, :10], handle.new_cache(offload=offload))

        alone = [run(prompt) for prompt in prompts]
        with ThreadPoolExecutor(2) as pool:
            together = list(pool.map(run, prompts))
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_no_memory_is_copied_for_a_new_token(build, decoding, ids) -> None:
    model = build(**LAYERS)
    with decoding(model).apply(model) as handle:
        cache = handle.new_cache()
        model(ids(150), past_key_values=cache, use_cache=True)
        before = [layer.keys.data_ptr() for layer in cache.layers]
        model(ids(1), past_key_values=cache, use_cache=True)
        assert [layer.keys.data_ptr() for layer in cache.layers] == before
        held = sum(
            t.untyped_storage().nbytes()
            for layer in cache.layers
            for t in (layer.keys, layer.values)
        )
        assert handle.cache_bytes(cache) == (held, 0)


def test_inference_mode_may_end_between_two_steps(offload, build, decoding, ids) -> None:
    model, prompt = build(**LAYERS), ids(120)
    with decoding(model).apply(model, backend="auto") as handle:
        expected = steps(model, prompt, prompt[:, :3], handle.new_cache(offload=offload))
        cache = handle.new_cache(offload=offload)
        with torch.inference_mode():
            first = model(prompt, past_key_values=cache, use_cache=True).logits[:, -1:].clone()
        rest = [
            model(prompt[:, i : i + 1], past_key_values=cache, use_cache=True).logits
            for i in range(3)
        ]
    torch.testing.assert_close(torch.cat([first, *rest], dim=1), expected, **CLOSE)


def test_a_section_that_does_not_fit_the_model_is_refused(build, decoding) -> None:
    model = build("Gemma3")
    with pytest.raises(
        HeadwiseError, match="filter layer 0 slides: decode can filter in the layers 1, 2"
    ):
        decoding(model, filter_layers=(0,), dense_layers=()).apply(model)
