"""Quality against time: of each task the methods that no other one beats in both, and what could not be told apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from profiling.evaluation.record import figure, summary_tasks
from profiling.evaluation.rows import ALL, BASELINE, MEASURES
from profiling.pictures.charts import Series, legend, lines
from profiling.speed.baselines import KERNEL

# Dense attention as the model comes, where Headwise's kernel is the better dense.
_SDPA = "dense by sdpa"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A method: its value, the seconds of its prefill, and whether it is "better" or "worse" than dense, or "".

    few: there were too few prompts for either.
    """

    method: str
    value: float
    seconds: float
    verdict: str
    few: bool = False


@dataclass(frozen=True, kw_only=True)
class Front:
    """points: fastest first. front: of these the names of those that no other one beats in both."""

    task: str
    length: int
    measure: str
    points: tuple[Point, ...]
    front: tuple[str, ...]


def front_of(points: Sequence[Point], *, higher: bool) -> tuple[str, ...]:
    """The names of points that none beats: no other is as good and as fast, and better in one of the two."""
    sign = 1 if higher else -1

    def beats(a: Point, b: Point) -> bool:
        good, fast = sign * (a.value - b.value), b.seconds - a.seconds
        return good >= 0 and fast >= 0 and (good > 0 or fast > 0)

    return tuple(point.method for point in points if not any(beats(other, point) for other in points))


def fronts(record: Mapping[str, Any]) -> list[Front]:
    """Of each task, length and measure of the summary, over the methods that were timed.

    Dense attention stands at the seconds of the better dense, as every speed-up does, and once more at sdpa's.
    """
    found = []
    for length in record["settings"]["lengths"]:
        taken = {each["method"]: each["seconds"] for each in record["prefill"] if each["length"] == length}
        marks = [(name, name, seconds) for name, seconds in taken.items() if name != BASELINE]
        if BASELINE in taken:
            better = min(taken[name] for name in (BASELINE, KERNEL) if name in taken)
            marks.append((BASELINE, BASELINE, better))
            marks += [(_SDPA, BASELINE, taken[BASELINE])] if better < taken[BASELINE] else []
        for task, measure in summary_tasks(dict(record), length):
            points = [
                Point(method=mark, value=own["value"], seconds=at, verdict=own["verdict"], few=own.get("few", False))
                for mark, name, at in sorted(marks, key=lambda each: each[2])
                if (own := figure(dict(record), task, length, name, measure)) is not None
            ]
            if task != ALL and len(points) > 1:
                front = front_of(points, higher=MEASURES[measure])
                found.append(Front(task=task, length=length, measure=measure, points=tuple(points), front=front))
    return found


def sentences(front: Front) -> str:
    """A front in sentences: who is on it, who is worse than dense, and who could not be told apart from it."""
    others = [point for point in front.points if point.method not in (BASELINE, _SDPA)]
    worse = [point.method for point in others if point.verdict == "worse"]
    few = [point.method for point in others if point.few]
    alike = [point.method for point in others if not point.verdict and not point.few]
    said = [f"Beaten by none in both time and quality: {', '.join(front.front)}."]
    said += [f"Worse than dense: {', '.join(worse)}."] if worse else []
    said += [f"Too few prompts to tell from dense: {', '.join(few)}."] if few else []
    said += [f"Not told apart from dense by these prompts: {', '.join(alike)}."] if alike else []
    return " ".join(said)


def section(record: Mapping[str, Any]) -> str:
    """The part of a page: a chart for each task, and what it shows in words; empty where nothing was timed."""
    parts = []
    for one in fronts(record):
        series = [
            Series(name=point.method, x=[point.seconds], y=[point.value], place=at)
            for at, point in enumerate(one.points)
        ]
        chart = lines(
            series, title=f"{one.task}, {one.length}", x_label="seconds to the first token", y_label=one.measure
        )
        head = f"<h3>{escape(one.task)}, {one.length:,} tokens: {escape(one.measure)}</h3>"
        parts.append(f"{head}{chart}{legend(series)}<p>{escape(sentences(one))}</p>")
    return f"<h2>Quality against time</h2>{''.join(parts)}" if parts else ""
