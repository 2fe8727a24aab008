"""Settings by model: the length and difficulty at which a task shows differences on it, as measured.

A task shows differences where dense attention is right in 40% to 90% of its prompts, and more often than guessing.
Where no setting does, the forced choice is its score: whether the right answer is likelier than each wrong one.
settings.json holds what `python -m profiling.difficulty --settings` found for the models that come as packages; reports
and evaluations use it by default.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from artifacts import HeadwiseError
from artifacts.files import atomic_write
from profiling.prompts.prompt import parse_name

# Where dense attention has to be for a task to show what a method loses, and what it could win.
LOW, HIGH = 0.4, 0.9
FILE = Path(__file__).with_name("settings.json")
# A text: what it loses shows on every model.
TEXT = "prose"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A task at a length by one measure, `score` or `choice`: over `count` prompts, or contexts.

    dense, low, high: of dense attention with its 95% interval.
    chance: what guessing gives.
    seconds: processor time of a prompt, or context, under dense attention, with one thread or many as it was run.
    difference and its bounds: of sinks and half a window; None where a task was given up.
    prompts: how many tell a loss of 5 points in 80% of runs, by the spread of that difference.
    telling: how many tell the very loss of half a window; None where it loses nothing.
    """

    task: str
    length: int
    measure: str
    count: int
    dense: float
    low: float
    high: float
    seconds: float
    chance: float = 0.0
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    prompts: int | None = None
    telling: int | None = None

    @property
    def shows(self) -> bool:
        """Whether dense attention is between 40% and 90%, and above chance."""
        return LOW <= self.dense <= HIGH and self.above_chance

    @property
    def above_chance(self) -> bool:
        """Whether dense attention is right more often than guessing, beyond its interval."""
        return self.low > self.chance

    @property
    def asked(self) -> bool:
        """Whether it is asked by default: it shows a loss, or is the forced choice of a task that no score shows."""
        return self.shows or (self.measure == "choice" and self.above_chance and self.difference is not None)

    @property
    def price(self) -> float:
        """Processor seconds until half a window's loss is told; infinite where it never is."""
        return float("inf") if self.telling is None else self.telling * self.seconds


@cache
def settings(model: str) -> tuple[Setting, ...]:
    """The settings of a model by the name it was loaded by, the most telling first; none for a model never measured."""
    return tuple(_read(FILE).get(model, ()))


def usual_length(rows: Sequence[Setting]) -> int:
    """The length that most settings have, the first of such."""
    return max(rows, key=lambda each: sum(other.length == each.length for other in rows)).length


def settled(rows: Iterable[Setting]) -> list[Setting]:
    """Of each kind of task its best setting, the most telling for its time first.

    A score between 40% and 90% comes before a forced choice, and that before anything else; then the longest prompts.
    """
    best: dict[str, Setting] = {}
    for row in sorted(rows, key=_rank):
        best.setdefault(parse_name(row.task), row)
    return sorted(best.values(), key=lambda row: (row.price, row.task))


def _rank(row: Setting) -> tuple[bool, bool, bool, int, float]:
    scored = row.measure == "score"
    return not (scored and row.shows), scored, not row.shows, -row.length, row.price


def keep(file: Path, model: str, rows: Sequence[Setting]) -> None:
    """Add what was measured of a model to a file of settings, each kind's best kept.

    Raises:
        HeadwiseError: the file is no such file, or cannot be written.
    """
    known = _read(file) if file.exists() else {}
    known[model] = settled((*known.get(model, ()), *rows))
    told = {name: [asdict(row) for row in known[name]] for name in sorted(known)}
    atomic_write(file, (json.dumps(told, indent=1) + "\n").encode())


def _read(file: Path) -> dict[str, list[Setting]]:
    try:
        return {model: [Setting(**row) for row in rows] for model, rows in json.loads(file.read_bytes()).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise HeadwiseError(f"{file} holds no settings ({type(error).__name__}); name another file") from None
