"""Windows: rotations that change with the length, and rolling buffers of sliding layers."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from artifacts import Full, HeadwiseError, Streaming
from tests.runtime.batches import fed
from tests.runtime.omnikv import CLOSE
from tests.runtime.tiny import LONGROPE


@pytest.mark.parametrize(
    "rope", [{"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}, LONGROPE]
)
def test_cache_positions_reject_length_dependent_rotation(rope, build, keeping):
    model = build(rope_parameters=rope)
    why = f"{rope['rope_type']}.* changes with the length; set positions: original"
    with pytest.raises(HeadwiseError, match=why):
        keeping(model, Streaming()).new_cache(model)
    keeping(model, Streaming(positions="original")).new_cache(model)


def test_yarn_attention_factor_is_applied_once(build, keeping, ids):
    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 256,
    }
    model, tokens = build(rope_parameters=rope), ids(50)
    with keeping(model, Streaming(sinks=4, window=12)).apply(model) as handle:
        by_one = fed(model, tokens, (1,), handle.new_cache())
        torch.testing.assert_close(fed(model, tokens, (19,), handle.new_cache()), by_one, **CLOSE)
    with keeping(model, Streaming(sinks=4, window=200)).apply(model) as handle:
        cache = handle.new_cache()
        torch.testing.assert_close(
            fed(model, tokens, (19,), cache), fed(model, tokens, (19,)), **CLOSE
        )


W = 12


@pytest.mark.parametrize("chunk", [W - 1, W, W + 1, 2 * W + 3])
def test_prompts_ending_in_earlier_chunk_continue(chunk, build, keeping, ids):
    model, lengths, width, more = build("Gemma3", sliding_window=W), (48, 27, 4), 48, W + 3
    prompts = [ids(n + more, seed=n)[0] for n in lengths]
    tokens = torch.zeros(3, width + more, dtype=torch.long)
    real = torch.ones_like(tokens)
    for row, (prompt, n) in enumerate(zip(prompts, lengths, strict=True)):
        tokens[row, :n] = prompt[:n]
        tokens[row, width:] = prompt[n:]
        real[row, n:width] = 0
    sizes = [min(chunk, width - at) for at in range(0, width, chunk)]
    with keeping(model, {"full": Full()}).apply(model) as handle:
        cache = handle.new_cache()
        actual = fed(model, tokens, (*sizes, 1), cache, attention_mask=real)[:, width:]
    sliding = [layer for layer in cache.layers if layer.is_sliding]
    policies = [policy for layer in sliding for policy in layer.policies]
    assert policies and all(max(policy.cached) <= W for policy in policies)
    for row, (prompt, n) in enumerate(zip(prompts, lengths, strict=True)):
        expected = model(prompt[None], use_cache=False).logits[0, n:]
        torch.testing.assert_close(actual[row], expected, **CLOSE)
        assert torch.equal(actual[row].argmax(-1), expected.argmax(-1))


def test_sliding_layers_without_section_use_transformers_cache(build, apply, ids):
    model, tokens = build("Gemma3", sliding_window=W), ids(100)
    with apply(model, dense=True) as handle:
        cache = handle.new_cache()
        expected = model(tokens, past_key_values=DynamicCache(config=model.config)).logits
        torch.testing.assert_close(model(tokens, past_key_values=cache).logits, expected, **CLOSE)
        assert type(cache.layers[0]).__name__ == "DynamicSlidingWindowLayer"
