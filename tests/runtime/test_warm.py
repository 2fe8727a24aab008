"""warm_up: what the first request would have compiled and measured is there, and nothing of it is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from artifacts import HeadwiseError
from runtime import Headwise, apply_dense, dense, measured, warm_up


def test_dense_attention_is_measured_before_the_first_request(
    build: Any, artifact_for: Any, ids: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(measured, "folder", lambda: tmp_path)
    monkeypatch.setattr(dense, "_known", {})
    model, prompt = build(max_position_embeddings=2048), ids(1100)
    with Headwise(artifact_for(model, rows=[None, None])).apply(model, watch=True) as handle:
        seconds = handle.warm_up([50, 1024])
        assert list(seconds) == [50, 1024]
        assert min(seconds.values()) > 0
        assert handle.stats()["sparse"] == 0
        assert not handle.stats()["dense"]
        monkeypatch.setattr(dense, "_measure", lambda *_: pytest.fail("measured in a request"))
        model(prompt)


def test_sections_are_served_with_their_own_caches(build: Any, decoding: Any, ids: Any) -> None:
    model, prompt = build(num_hidden_layers=6), ids(150)
    with decoding(model).apply(model) as handle:
        expected = model.generate(prompt, max_new_tokens=4, do_sample=False, past_key_values=handle.new_cache())
        before = handle.stats()
        handle.warm_up([150])
        assert handle.stats() == before
        found = model.generate(prompt, max_new_tokens=4, do_sample=False, past_key_values=handle.new_cache())
    assert torch.equal(found, expected)


def test_what_cannot_be_warmed_is_refused(build: Any) -> None:
    model = build()
    with pytest.raises(HeadwiseError, match="wants a model that an artifact is applied to"):
        warm_up(model, [100])
    with apply_dense(model):
        for length in (0, -5, 1025, 1.5, True):
            with pytest.raises(HeadwiseError, match="lengths of 1 to 1024 tokens"):
                warm_up(model, [length])
        assert list(warm_up(model, [1024])) == [1024]
