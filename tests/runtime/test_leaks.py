"""Serving and taking off again leaves nothing behind: no entry, no tensor, no memory."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
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
    at least, after each of two spans. Whatever else happens in the process, such as a message to a
    worker of pytest's, comes in one of them."""
    for _ in range(times):
        work()
    # The first look at everything makes entries in caches of Python's own.
    held()
    counts = [held()]
    for _ in range(2):
        for _ in range(times):
            work()
        counts.append(held())
    grown = (counts[1] - counts[0]) & (counts[2] - counts[1])
    assert {name: more for name, more in grown.items() if more >= times} == {}


@pytest.fixture
def works(
    build: Any, artifact_for: Any, decoding: Any, ids: Any
) -> dict[str, Callable[[], object]]:
    """What is done again and again, by name."""
    model, filtering, prompt = build(), build(**LAYERS), ids(140)
    plain, chosen = Headwise(artifact_for(model)), decoding(filtering, prefill_ratio=0.5)
    handle = chosen.apply(filtering)

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
        "apply, serve and undo": apply_serve_and_drop,
        "generate": generate,
        "fail": fail,
    }


@pytest.mark.parametrize("name", ["apply, serve and undo", "generate", "fail"])
def test_nothing_is_left(name: str, works: dict[str, Callable[[], object]]) -> None:
    flat(works[name], 5)


def test_a_model_that_is_dropped_while_applied_is_freed(
    build: Any, artifact_for: Any, ids: Any
) -> None:
    def apply_and_drop() -> None:
        model = build()
        Headwise(artifact_for(model)).apply(model)
        model(ids(140))

    flat(apply_and_drop, 3)
