"""Settings by model: lengths and difficulties at which tasks show differences, as measured.

A task shows differences where dense attention is right in 40% to 90% of its prompts, and more often
than guessing. Where no setting does, the forced choice is its score: whether the right answer is
likelier than each wrong one. settings.json holds what was found for the models that come as
packages; evaluations use it by default.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Where dense attention has to be for a task to show what a method loses, and what it could win.
LOW = 0.4
HIGH = 0.9
FILE = Path(__file__).with_name("settings.json")
# A text: what it loses shows on every model.
TEXT = "prose"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A task at a length by one measure, `score` or `choice`: over `count` prompts, or contexts.

    Attributes:
        dense, low, high: of dense attention with its 95% interval.
        chance: what guessing gives.
        difference: of sinks and half a window; None where a task was given up.
    """

    task: str
    length: int
    measure: str
    count: int
    dense: float
    low: float
    high: float
    chance: float = 0.0
    difference: float | None = None

    @property
    def shows(self) -> bool:
        """True if dense attention is between 40% and 90%, and above chance."""
        return LOW <= self.dense <= HIGH and self.above_chance

    @property
    def above_chance(self) -> bool:
        """True if dense attention beats guessing beyond its interval."""
        return self.low > self.chance

    @property
    def asked(self) -> bool:
        """True if the task is a default: it shows a loss, or its forced choice alone can."""
        return self.shows or (
            self.measure == "choice" and self.above_chance and self.difference is not None
        )


@cache
def settings(model: str) -> tuple[Setting, ...]:
    """Read a model's settings, the most telling first; none for a model never measured."""
    return tuple(Setting(**row) for row in json.loads(FILE.read_bytes()).get(model, ()))


def usual_length(rows: Sequence[Setting]) -> int:
    """The length that most settings have, the first of such."""
    return max(rows, key=lambda each: sum(other.length == each.length for other in rows)).length
