"""Quality against time: of each task the methods that no other one beats in both, and what could not be told apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from profiling.evaluation.record import figure, summary_tasks
from profiling.evaluation.rows import ALL, BASELINE, MEASURES
from profiling.pictures.charts import Series, legend, lines


@dataclass(frozen=True, kw_only=True)
class Point:
    """A method: its value, the seconds of its prefill, and whether it is "better" or "worse" than dense, or ""."""

    method: str
    value: float
    seconds: float
    verdict: str


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
    """Of each task, length and measure of the summary, over the methods that were timed."""
    found = []
    for length in record["settings"]["lengths"]:
        seconds = {each["method"]: each["seconds"] for each in record["prefill"] if each["length"] == length}
        for task, measure in summary_tasks(dict(record), length):
            points = [
                Point(method=name, value=own["value"], seconds=taken, verdict=own["verdict"])
                for name, taken in sorted(seconds.items(), key=lambda item: item[1])
                if (own := figure(dict(record), task, length, name, measure)) is not None
            ]
            if task != ALL and len(points) > 1:
                front = front_of(points, higher=MEASURES[measure])
                found.append(Front(task=task, length=length, measure=measure, points=tuple(points), front=front))
    return found


def told(front: Front) -> str:
    """A front in sentences: who is on it, who is worse than dense, and who could not be told apart from it."""
    others = [point for point in front.points if point.method != BASELINE]
    worse = [point.method for point in others if point.verdict == "worse"]
    alike = [point.method for point in others if not point.verdict]
    said = [f"Beaten by none in both time and quality: {', '.join(front.front)}."]
    said += [f"Worse than dense: {', '.join(worse)}."] if worse else []
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
        parts.append(f"{head}{chart}{legend(series)}<p>{escape(told(one))}</p>")
    return f"<h2>Quality against time</h2>{''.join(parts)}" if parts else ""
