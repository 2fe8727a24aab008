"""Seconds of methods that were timed in other rounds, and where dense attention stands on a front."""

from __future__ import annotations

from typing import Any

from profiling.evaluation.fronts import fronts, sentences
from profiling.evaluation.record import timed_record
from profiling.evaluation.speed import Timed
from profiling.evaluation.times import Times


def times() -> Times:
    """Two methods of equal cost, the one timed on a machine that was then twice as busy as in dense's last rounds."""
    quiet = {"model": (4.0, 4.0, 4.0), "kernel": (2.0, 2.0, 2.0)}
    busy = {name: tuple(2 * value for value in values) for name, values in quiet.items()}
    prefill = {
        ("dense", 64): Timed(seconds=quiet["model"], **quiet),
        ("dense_kernel", 64): Timed(seconds=quiet["kernel"], **quiet),
        ("former", 64): Timed(seconds=(2.0, 2.0, 2.0), build=0.5, **busy),
        ("latter", 64): Timed(seconds=(1.0, 1.0, 1.0), build=0.25, **quiet),
    }
    return Times(prefill=prefill, decode=prefill, memory={}, crossover=None)


def test_seconds_of_other_rounds_compare() -> None:
    record = timed_record(times())
    seconds = {each["method"]: (each["seconds"], each.get("build")) for each in record["prefill"]}
    assert seconds["former"] == seconds["latter"] == (1.0, 0.25)
    assert seconds["dense"][0] == 4 and seconds["dense_kernel"][0] == 2
    rates = {each["method"]: each["tokens_per_second"] for each in record["decode"]}
    assert rates["former"] == rates["latter"] == 1


def figure(method: str, value: float, verdict: str = "", *, few: bool = False) -> dict[str, Any]:
    place = {"task": "t", "length": 64, "method": method, "measure": "score"}
    none = {"difference": None, "difference_low": None, "difference_high": None, "needed": None, "p": None}
    bounds = {"value": value, "low": value, "high": value, "count": 20, "corrected": None}
    return {**place, **bounds, **none, "verdict": verdict, "few": few}


def test_dense_stands_at_the_better_dense() -> None:
    figures = [figure("dense", 0.9), figure("former", 0.5, "worse"), figure("latter", 0.8, few=True)]
    record = {"settings": {"lengths": [64]}, "figures": figures, **timed_record(times())}
    (found,) = fronts(record)
    assert {point.method: point.seconds for point in found.points} == {
        "dense": 2.0,
        "dense by sdpa": 4.0,
        "former": 1.0,
        "latter": 1.0,
    }
    assert found.front == ("latter", "dense")
    assert sentences(found) == (
        "Beaten by none in both time and quality: latter, dense. Worse than dense: former. "
        "Too few prompts to tell from dense: latter."
    )
