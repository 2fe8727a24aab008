"""Requests in many threads at once: on one applied model, and on two models with two artifacts."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import pytest
import torch

from kernels.patterns import Growth, LayerPlan, make
from runtime import Headwise
from tests.runtime.omnikv import LAYERS

OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


@pytest.fixture(autouse=True)
def _in_turns():
    """Python changes threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def counts(stats: dict[str, Any]) -> dict[str, int]:
    flat = {name: value for name, value in stats.items() if isinstance(value, int)}
    return flat | stats["dense"]


def test_two_models_with_two_artifacts_in_two_threads(build, artifact_for, decoding, ids):
    plain, choosing = build(), build(seed=1, **LAYERS)
    prompts = [ids(length, seed=length) for length in (200, 90, 150)] * 2
    handles = {
        id(plain): Headwise(artifact_for(plain)).apply(plain),
        id(choosing): decoding(choosing).apply(choosing),
    }

    def run(request):
        model, prompt = request
        cache = handles[id(model)].new_cache()
        return model.generate(prompt, past_key_values=cache, **OPTIONS)[
            0, prompt.shape[1] :
        ].tolist()

    requests = [(model, prompt) for prompt in prompts for model in (plain, choosing)]
    alone = [run(request) for request in requests]
    before = {key: handle.stats() for key, handle in handles.items()}
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, requests))
    assert together == alone
    for key, handle in handles.items():
        after = handle.stats()
        assert counts(after) == {how: 2 * count for how, count in counts(before[key]).items()}
        handle.undo()
    assert before[id(choosing)]["decode"] > 0 and before[id(plain)]["sparse"] > 0


def test_one_model_is_applied_and_undone_while_another_serves(build, artifact_for, ids):
    busy, other, prompt = build(), build(seed=1), ids(200)
    headwise, one_at_a_time = Headwise(artifact_for(other)), Lock()
    with Headwise(artifact_for(busy)).apply(busy, strict=True) as handle:
        expected = busy(prompt).logits

        def serve(_):
            with torch.inference_mode():
                return busy(prompt).logits

        def change(_):
            # A model that has an artifact takes no second one.
            with one_at_a_time:
                headwise.apply(other).undo()

        with ThreadPoolExecutor(3) as pool:
            served, changed = pool.map(serve, range(10)), pool.map(change, range(10))
            assert all(torch.equal(logits, expected) for logits in served)
            list(changed)
        assert handle.stats() == {"sparse": 22, "dense": {}}


def test_a_fault_is_said_once_by_all_threads(build, artifact_for, ids, warnings, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("std::bad_alloc")

    model, prompt = build(), ids(200)
    monkeypatch.setattr("runtime.attention.function.launch", fails)
    with Headwise(artifact_for(model)).apply(model) as handle, ThreadPoolExecutor(4) as pool:

        def run(_):
            with torch.no_grad():
                model(prompt)

        list(pool.map(run, range(20)))
        assert handle.stats() == {"sparse": 0, "dense": {"out of memory": 40}}
    assert warnings() == ["serving densely: out of memory: std::bad_alloc"]


def test_a_plan_that_grows_is_made_by_one_thread_at_a_time():
    growth = Growth(length=1024, powers={"vertical_slash": {"vertical": 1.0, "slash": 0.5}})
    plan = LayerPlan([make("vertical_slash", vertical=100, slash=100)] * 2, 1, growth=growth)
    lengths = [64 * (1 + n % 40) for n in range(4000)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(plan.at, lengths))
    for length, grown in zip(lengths, found, strict=True):
        assert grown.patterns == plan.at(length).patterns
