"""Serving and taking off again leaves nothing behind: no entry, no tensor, no memory."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable

import pytest

from runtime import Headwise
from runtime.attention import state
from tests.runtime.omnikv import LAYERS


def held() -> Counter[str]:
    """What is alive since gc.freeze(), by type: everything that Python's collector knows, and the
    entries of the runtime's tables."""
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
def _few_objects():
    """The collector looks at what is made from here on, not at all that the process has."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("work", ["serve", "generate", "fail", "drop"])
@pytest.mark.usefixtures("_few_objects")
def test_nothing_is_left(work, build, artifact_for, decoding, ids):
    model, filtering, prompt = build(), build(**LAYERS), ids(140)
    plain = Headwise(artifact_for(model))
    handle = decoding(filtering, prefill_ratio=0.5).apply(filtering)

    def serve():
        with plain.apply(model) as served:
            model(prompt)
            served.stats()

    def generate():
        options = {"max_new_tokens": 2, "do_sample": False}
        filtering.generate(prompt, past_key_values=handle.new_cache(), **options)

    def fail():
        cache = handle.new_cache()
        filtering(prompt, past_key_values=cache, use_cache=True)
        with pytest.raises(RuntimeError):
            filtering(ids(3, batch=2), past_key_values=cache, use_cache=True)

    def drop():
        dropped = build()
        plain.apply(dropped)
        dropped(prompt)

    flat({"serve": serve, "generate": generate, "fail": fail, "drop": drop}[work], 5)
