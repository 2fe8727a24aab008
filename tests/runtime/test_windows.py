"""Layers that slide are served by our kernel: as torch has them under a mask, and only where that
is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import create_sliding_window_causal_mask

from artifacts import HeadwiseError
from runtime import Headwise
from runtime.attention.function import SLIDES
from runtime.attention.mask import PrefillMask
from tests.runtime.omnikv import CLOSE, steps
from tests.runtime.tiny import WITHOUT_DENSE_KERNELS

BY_KERNEL = "window by kernel"
# Of each two or three layers one slides at least; with them sinks, soft-caps, wide heads, layers
# without positions.
SLIDING = ("Gemma3", "Gemma3Wide", "Gemma2", "Cohere2", "GptOss")


def served(handle: Any) -> int:
    found: int = handle.stats()["dense"].get(BY_KERNEL, 0)
    return found


def sliding(model: Any) -> int:
    kinds: list[str] = model.config.layer_types
    return kinds.count("sliding_attention")


@pytest.mark.parametrize("family", SLIDING)
@pytest.mark.parametrize("length", [65, 127, 400])
def test_prompts_are_what_the_model_makes_of_them(
    length: int, family: str, build: Any, artifact_for: Any, ids: Any
) -> None:
    model, prompt = build(family), ids(length, batch=2)
    expected = model(prompt).logits
    with Headwise(artifact_for(model, dense=True)).apply(model) as handle:
        torch.testing.assert_close(model(prompt).logits, expected, **CLOSE)
        assert served(handle) == sliding(model)


@pytest.mark.parametrize("family", SLIDING)
@pytest.mark.parametrize("left", [True, False])
def test_padded_batches(left: bool, family: str, build: Any, artifact_for: Any, ids: Any) -> None:
    model, prompt = build(family), ids(300, batch=3)
    real = torch.ones_like(prompt)
    real[0, slice(0, 250) if left else slice(50, None)] = 0
    real[2, slice(0, 7) if left else slice(293, None)] = 0
    given = {"attention_mask": real, "position_ids": (real.cumsum(1) - 1).clamp(min=0)}
    expected = model(prompt, **given).logits
    with Headwise(artifact_for(model, dense=True)).apply(model) as handle:
        found = model(prompt, **given).logits
        assert served(handle) == sliding(model)
    torch.testing.assert_close(found[real.bool()], expected[real.bool()], **CLOSE)


@pytest.mark.parametrize("family", ["Gemma3", "GptOss"])
def test_packed_sequences_do_not_see_each_other(
    family: str, build: Any, artifact_for: Any, ids: Any
) -> None:
    """The first is longer than several windows, so that only its bounds tell it from the second."""
    model, lengths = build(family), (210, 20, 170)
    prompt = ids(sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    expected = model(prompt, position_ids=positions, use_cache=False).logits
    with Headwise(artifact_for(model, dense=True)).apply(model):
        found = model(prompt, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("cache", ["dynamic", "static", "own"])
@pytest.mark.parametrize("chunks", [(200, 100), (130, 64, 20, 90), (20, 64, 200)])
def test_chunks_and_decode(
    chunks: tuple[int, ...], cache: str, build: Any, artifact_for: Any, ids: Any
) -> None:
    model, prompt, forced = build("Gemma3"), ids(sum(chunks), batch=2), ids(40, batch=2, seed=9)

    def run(past: Any) -> Tensor:
        found = [model(part, past_key_values=past).logits for part in prompt.split(chunks, dim=1)]
        found += [model(token, past_key_values=past).logits for token in forced.split(1, dim=1)]
        return torch.cat(found, dim=1)

    expected = run(DynamicCache(config=model.config))
    with Headwise(artifact_for(model, dense=True)).apply(model) as handle:
        made = {
            "dynamic": lambda: DynamicCache(config=model.config),
            "static": lambda: StaticCache(config=model.config, max_cache_len=500),
            "own": handle.new_cache,
        }
        found = run(made[cache]())
        assert served(handle) == sum(size >= 64 for size in chunks)
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
def test_decode_of_padded_batches(
    cache: Any, build: Any, artifact_for: Any, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window moves past the padding while tokens are decoded."""
    monkeypatch.setattr("runtime.attention.function._MIN_KEYS_FLOAT32", 1)
    model, prompt, forced = build("Gemma3"), ids(40, batch=3), ids(40, batch=3, seed=9)
    real = torch.ones_like(prompt)
    real[0, :35] = 0
    real[2, :3] = 0
    given: dict[str, Any] = {
        "attention_mask": real,
        "position_ids": (real.cumsum(1) - 1).clamp(min=0),
    }
    more = {"max_cache_len": 100} if cache is StaticCache else {}
    expected = steps(model, prompt, forced, DynamicCache(config=model.config), **given)
    with Headwise(artifact_for(model, dense=True)).apply(model) as handle:
        found = steps(model, prompt, forced, cache(config=model.config, **more), **given)
        # All layers in transformers' cache that grows; in a static one those whose slots are all
        # filled.
        assert handle.stats()["dense"]["decode by kernel"] == (120 if cache is DynamicCache else 40)
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize(("changes", "options"), WITHOUT_DENSE_KERNELS)
def test_switched_off(
    changes: dict[str, Any], options: dict[str, Any], build: Any, artifact_for: Any, ids: Any
) -> None:
    model, prompt = build("Gemma3", layer_types=["sliding_attention"] * 3, **changes), ids(300)
    expected = model(prompt).logits
    with Headwise(artifact_for(model, dense=True)).apply(model, **options) as handle:
        assert torch.equal(model(prompt).logits, expected)
        assert served(handle) == 0


def test_more_than_a_window_is_left_to_the_model(build: Any, artifact_for: Any) -> None:
    """An overlay far behind the first windows, as that of a picture in the prompt."""
    model = build("Gemma3")
    blocks = torch.full((1, 300), -1)
    blocks[:, 200:220] = 0
    given = {
        "config": model.config,
        "inputs_embeds": torch.zeros(1, 300, 1),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": torch.arange(300)[None],
    }
    with Headwise(artifact_for(model, dense=True)).apply(model):
        plain = create_sliding_window_causal_mask(**given)
        joined = create_sliding_window_causal_mask(
            **given, or_mask_function=lambda b, h, q, k: (blocks[b, q] == 0) & (blocks[b, k] == 0)
        )
    assert isinstance(plain, PrefillMask) and plain.context.window == model.config.sliding_window
    assert not isinstance(joined, PrefillMask) and bool(joined[0, 0, 200, 219])
    assert not bool(plain[0, 0, 200, 219])


def test_a_model_that_slides_everywhere_is_served_by_its_window(
    build: Any, artifact_for: Any, ids: Any
) -> None:
    model, prompt = build("Mistral", head_dim=64, sliding_window=40), ids(300)
    expected = model(prompt).logits
    artifact = artifact_for(model, dense=True)
    nothing = artifact.model_copy(
        update={
            "prefill": artifact.prefill.model_copy(
                update={"layers": (None,) * len(artifact.prefill.layers)}
            )
        }
    )
    with Headwise(nothing).apply(model) as handle:
        torch.testing.assert_close(model(prompt).logits, expected, **CLOSE)
        assert handle.stats() == {"sparse": 0, "dense": {BY_KERNEL: 2}}


def test_patterns_for_a_layer_that_slides_are_refused_though_its_call_does_not_say_so(
    build: Any, artifact_for: Any, ids: Any
) -> None:
    """Qwen2-MoE has a window in the mask alone."""
    more = {
        "use_sliding_window": True,
        "sliding_window": 32,
        "max_window_layers": 2,
        "hidden_size": 256,
    }
    model, prompt = build("Qwen2Moe", **more), ids(300)
    assert "sliding_attention" in model.config.layer_types
    expected = model(prompt).logits
    headwise = Headwise(artifact_for(model, rows=[["dense"] * 4] * 2))
    with headwise.apply(model) as handle:
        torch.testing.assert_close(model(prompt).logits, expected, **CLOSE)
        assert handle.stats()["dense"][SLIDES] == sliding(model)
    with headwise.apply(model, strict=True), pytest.raises(HeadwiseError, match="the layer slides"):
        model(prompt)


def test_layers_that_see_everything_are_not_counted_as_windows(
    build: Any, artifact_for: Any, ids: Any
) -> None:
    model, prompt = build("Gemma2"), ids(300)
    expected = model(prompt).logits
    with Headwise(artifact_for(model, rows=[None, None])).apply(model) as handle:
        torch.testing.assert_close(model(prompt).logits, expected, **CLOSE)
        assert handle.stats()["dense"] == {BY_KERNEL: 1, "layer left alone": 1}
