"""Rolling buffers of sliding-window layers next to full ones: any chunks, right padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from artifacts import Full, Streaming
from runtime import memory_report
from tests.runtime.caches.feeding import fed

CLOSE = {"atol": 3e-4, "rtol": 1e-3}
W = 24
CHUNKS = (W - 1, W, W + 1, 2 * W + 3)


def _model(build: Any) -> Any:
    return build("Gemma3", sliding_window=W)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_prompts_that_end_in_an_earlier_chunk_go_on_by_themselves(chunk, build, keeping, ids):
    model, lengths, more = _model(build), (4 * W, 2 * W + 5, 7), W + 3
    prompts = [ids(n + more, seed=n)[0] for n in lengths]
    padded = torch.zeros(3, max(lengths), dtype=torch.long)
    real = torch.zeros(3, max(lengths), dtype=torch.long)
    for row, (prompt, n) in enumerate(zip(prompts, lengths, strict=True)):
        padded[row, :n], real[row, :n] = prompt[:n], 1
    with keeping(model, {"full": Full()}).apply(model) as handle:
        cache = handle.new_cache()
        fed(model, padded, (chunk,), cache, attention_mask=real)
        sliding = [layer for layer in cache.layers if layer.is_sliding]
        assert sliding and all(policy.kept <= W for layer in sliding for policy in layer.policies)
        steps = []
        for step in range(more):
            real = torch.nn.functional.pad(real, (0, 1), value=1)
            token = torch.stack(
                [prompt[n + step] for prompt, n in zip(prompts, lengths, strict=True)]
            )[:, None]
            at = real.sum(1, keepdim=True) - 1
            steps.append(
                model(token, attention_mask=real, position_ids=at, past_key_values=cache).logits
            )
    found = torch.cat(steps, dim=1)
    for row, (prompt, n) in enumerate(zip(prompts, lengths, strict=True)):
        expected = model(prompt[None], use_cache=False).logits[0, n:]
        torch.testing.assert_close(found[row], expected, **CLOSE)
        assert torch.equal(found[row].argmax(-1), expected.argmax(-1))


def test_it_serves_sliding_layers_whatever_the_full_ones_keep(build, keeping, ids):
    model, tokens = _model(build), ids(3 * W)
    with keeping(model, Streaming(sinks=4, window=500)).apply(model) as handle:
        cache = handle.new_cache()
        found = fed(model, tokens, (W + 1, 1), cache)
        kept = [layer.kept for layer in memory_report(cache).layers]
    # Nothing has left the wide window yet.
    torch.testing.assert_close(found, model(tokens, use_cache=False).logits, **CLOSE)
    assert kept == [W, 3 * W, 3 * W]


def test_without_a_section_sliding_layers_are_transformers_own(build, apply, ids):
    model = _model(build)
    with apply(model, dense=True) as handle:
        cache = handle.new_cache()
        tokens = ids(100)
        expected = model(tokens, past_key_values=DynamicCache(config=model.config)).logits
        torch.testing.assert_close(model(tokens, past_key_values=cache).logits, expected, **CLOSE)
        assert type(cache.layers[0]).__name__ == "DynamicSlidingWindowLayer"
