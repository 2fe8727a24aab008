"""Serving and taking off again leaves nothing behind: no entry, no tensor, no memory."""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime import Headwise
from runtime.attention import state
from tests.runtime.omnikv import LAYERS


def held() -> Counter[str]:
    """What is alive, by type: everything that Python's collector knows, and the entries of the
    runtime's tables."""
    gc.collect()
    alive = Counter(type(thing).__qualname__ for thing in gc.get_objects())
    return alive + Counter({"configurations": len(state._configs)})


def flat(work: Callable[[], object], times: int) -> None:
    """Fails if a round of `work` leaves an object behind: of some type there are more, one a round
    at least."""
    for _ in range(times):
        work()
    # The first look at everything makes entries in caches of Python's own.
    held()
    before = held()
    for _ in range(times):
        work()
    assert {name: more for name, more in (held() - before).items() if more >= times} == {}


def resident() -> int:
    """Kilobytes of this process in memory, without what is free and only kept for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@pytest.fixture
def works(
    build: Any, artifact_for: Any, decoding: Any, ids: Any
) -> dict[str, Callable[[], object]]:
    """What is done again and again, by name."""
    model, filtering, prompt = build(), build(**LAYERS), ids(140)
    plain, chosen = Headwise(artifact_for(model)), decoding(filtering, prefill_ratio=0.5)
    handle = chosen.apply(filtering)

    def apply_and_undo() -> None:
        with plain.apply(model):
            pass

    def apply_serve_and_drop() -> None:
        served = plain.apply(model)
        model(prompt)
        served.stats()
        served.undo()

    def generate() -> None:
        options = {"max_new_tokens": 2, "do_sample": False}
        filtering.generate(prompt, past_key_values=handle.new_cache(), **options)

    def fail() -> None:
        cache = handle.new_cache()
        filtering(prompt, past_key_values=cache, use_cache=True)
        with pytest.raises(RuntimeError):
            filtering(ids(3, batch=2), past_key_values=cache, use_cache=True)

    return {
        "apply and undo": apply_and_undo,
        "apply, serve and undo": apply_serve_and_drop,
        "generate": generate,
        "fail": fail,
    }


@pytest.mark.parametrize("name", ["apply and undo", "apply, serve and undo", "generate", "fail"])
def test_nothing_is_left(name: str, works: dict[str, Callable[[], object]]) -> None:
    flat(works[name], 30)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["apply and undo", "generate"])
def test_a_thousand_times(name: str, works: dict[str, Callable[[], object]]) -> None:
    for _ in range(100):
        works[name]()
    before, memory = held(), resident()
    for _ in range(1000):
        works[name]()
    assert sum((held() - before).values()) < 100
    assert resident() - memory < 8_000, "kilobytes more"


def test_a_model_that_is_dropped_while_applied_is_freed(
    build: Any, artifact_for: Any, ids: Any
) -> None:
    def apply_and_drop() -> None:
        model = build()
        Headwise(artifact_for(model)).apply(model)
        model(ids(140))

    flat(apply_and_drop, 10)
