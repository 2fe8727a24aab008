"""warm_up: what the first request would have compiled and measured is there, and nothing of it is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from artifacts import HeadwiseError
from kernels import dispatch, triton_calls
from kernels.attention import triton_launch
from kernels.attention.triton_launch import How
from kernels.triton_calls import KernelCall
from runtime import Headwise, apply_dense, dense, measured, warm_up


def test_dense_attention_is_measured_before_the_first_request(
    build: Any, artifact_for: Any, ids: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(measured, "folder", lambda: tmp_path)
    monkeypatch.setattr(dense, "_known", {})
    model, prompt = build(max_position_embeddings=2048), ids(1100)
    with Headwise(artifact_for(model, rows=[None, None])).apply(model) as handle:
        seconds = handle.warm_up([50, 1024])
        assert list(seconds) == [50, 1024]
        assert min(seconds.values()) > 0
        assert handle.stats()["sparse"] == 0
        assert not handle.stats()["dense"]
        monkeypatch.setattr(dense, "_measure", lambda *_: pytest.fail("measured in a request"))
        model(prompt)


def test_sections_are_served_with_their_own_caches(build: Any, decoding: Any, ids: Any) -> None:
    model, prompt = build(num_hidden_layers=6), ids(150)
    with decoding(model, budget=0.2).apply(model) as handle:
        expected = model.generate(prompt, max_new_tokens=4, do_sample=False, past_key_values=handle.new_cache())
        before = handle.stats()
        # Of another length, of which a step reads other than of the prompt.
        handle.warm_up([900])
        assert handle.stats() == before
        found = model.generate(prompt, max_new_tokens=4, do_sample=False, past_key_values=handle.new_cache())
    assert torch.equal(found, expected)


def test_no_variant_is_left_to_a_request(build: Any, artifact_for: Any, ids: Any, monkeypatch: Any) -> None:
    """Triton's launches on the CPU, which compute nothing here: what would be compiled is counted."""
    compiled: set[tuple[object, ...]] = set()

    def run(call: KernelCall) -> None:
        compiled.add((call.kernel, *call.constants.values(), *call.options.values()))
        for name in {"out", "lse"} & call.arguments.keys():
            call.arguments[name].zero_()

    monkeypatch.setattr(triton_calls, "_run", run)
    monkeypatch.setattr(triton_launch, "_INTERPRETED", True)
    monkeypatch.setattr(dispatch, "_by_device", lambda kind: dispatch.BACKENDS)
    monkeypatch.setattr("kernels.patterns.triton.chooses", lambda *_: False)
    # A GPU of 16 multiprocessors, which a turn does not fill.
    monkeypatch.setattr(triton_launch, "multiprocessors", lambda device: 16)
    monkeypatch.setattr(triton_launch, "few", lambda programs, device: programs < 30)
    model, prompt, turn = build(max_position_embeddings=4096), ids(2200), ids(100)
    padding = torch.ones(2, 2200, dtype=torch.long)
    padding[0, :30] = 0
    with Headwise(artifact_for(model)).apply(model) as handle, torch.no_grad():
        handle.warm_up([2200], batch=2)
        warm = set(compiled)
        model.generate(prompt, max_new_tokens=3, do_sample=False)
        past = model(prompt, use_cache=True).past_key_values
        model(turn, past_key_values=past)
        model(prompt.expand(2, -1), attention_mask=padding)
        assert handle.stats()["sparse"] > 0
    kinds = {part for kernel in warm for part in kernel if isinstance(part, How)}
    assert compiled == warm
    assert all(any(getattr(how, sort) for how in kinds) for sort in ("split", "ragged", "tiles", "columns", "walk"))


def test_what_cannot_be_warmed_is_refused(build: Any) -> None:
    model = build()
    with pytest.raises(HeadwiseError, match="wants a model that an artifact is applied to"):
        warm_up(model, [100])
    with apply_dense(model):
        for length in (0, -5, 1025, 1.5, True):
            with pytest.raises(HeadwiseError, match="lengths of 1 to 1024 tokens"):
                warm_up(model, [length])
        with pytest.raises(HeadwiseError, match="a batch of 1 sequence or more"):
            warm_up(model, [1024], batch=0)
        assert list(warm_up(model, [1024])) == [1024]
