"""A cache under policies that was written down goes on as if nothing had happened."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch

from artifacts import Full, Streaming
from runtime import Headwise
from tests.runtime.caches.feeding import fed

Keeping = Callable[..., Headwise]


def written(cache: Any) -> list[Any]:
    file = io.BytesIO()
    torch.save([layer.state() for layer in cache.layers], file)
    file.seek(0)
    states: list[Any] = torch.load(file, weights_only=True)
    return states


def test_a_cache_goes_on_from_its_state(build: Callable[..., Any], ids: Callable[..., Any], keeping: Keeping) -> None:
    model, tokens = build("Gemma3"), ids(120, batch=2)
    rows = [None, ("stream", "all"), ("stream", "stream")]
    headwise = keeping(model, {"stream": Streaming(sinks=2, window=20), "all": Full()}, rows)
    real = torch.ones(2, 120, dtype=torch.long)
    real[1, :9] = 0
    with headwise.apply(model, backend="reference"):
        cache = headwise.new_cache(model)
        fed(model, tokens[:, :70], [70], cache, attention_mask=real[:, :70])
        states, later = written(cache), headwise.new_cache(model)
        for layer, state in zip(later.layers, states, strict=True):
            layer.load_state(state)
        assert later.get_seq_length() == 70
        assert all(layer.dtype == torch.float32 for layer in later.layers)
        for start in (70, 95):
            given = {"attention_mask": real[:, : start + 25], "position_ids": torch.arange(start, start + 25)[None]}
            new = tokens[:, start : start + 25]
            once, again = (model(new, past_key_values=each, **given).logits for each in (cache, later))
            torch.testing.assert_close(again, once, atol=0, rtol=0)


def test_an_empty_cache_has_an_empty_state(build: Callable[..., Any], ids: Any, keeping: Keeping) -> None:
    model = build()
    headwise = keeping(model, Streaming(sinks=2, window=20))
    with headwise.apply(model, backend="reference"):
        cache = headwise.new_cache(model)
        used = headwise.new_cache(model)
        fed(model, ids(30), [30], used)
        for layer, state in zip(used.layers, written(cache), strict=True):
            layer.load_state(state)
        assert used.get_seq_length() == 0
        torch.testing.assert_close(fed(model, ids(30), [30], used), fed(model, ids(30), [30], cache))
