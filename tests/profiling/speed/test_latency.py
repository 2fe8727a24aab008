"""Timing in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from profiling.speed.latency import in_turn, interleaved, medians


def test_interleaving_takes_turns_and_drops_the_first_round() -> None:
    order: list[str] = []

    @contextmanager
    def context(name: str) -> Iterator[None]:
        order.append(name)
        yield

    ways = {name: partial(context, name) for name in ("a", "b")}
    seconds = interleaved(ways, lambda: None, repeats=3, device="cpu")
    assert order == ["a", "b"] * 4
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}
    assert medians({"a": [3.0, 1.0, 2.0]}) == {"a": 2.0}


def test_a_rehearsal_is_one_timed_round() -> None:
    calls: list[str] = []
    runs = {name: lambda name=name: calls.append(name) for name in "ab"}  # type: ignore[misc]
    for repeats, warm_up, rounds in ((0, True, 1), (2, True, 3), (2, False, 2)):
        calls.clear()
        seconds = in_turn(runs, repeats=repeats, device="cpu", warm_up=warm_up)
        assert calls == ["a", "b"] * rounds and len(seconds["a"]) == max(repeats, 1)
