"""What a kind of task is: how it is written, what it can be told, and which function makes its prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from artifacts import HeadwiseError
from artifacts.errors import shorten

Family = Literal["retrieval", "chain", "in-context", "copying", "aggregation", "text", "other"]
FAMILIES: tuple[str, ...] = get_args(Family)


@dataclass(frozen=True)
class Parameter:
    """What a task can be told after an @, as in `needle@depth=0.5`; `low` and `high` are bounds, both included."""

    name: str
    type: type[float] | type[int] | type[str]
    says: str
    low: float = 0
    high: float = float("inf")

    def read(self, text: str, kind: str) -> float | int | str:
        """The value that a user wrote; HeadwiseError where it is none."""
        if self.type is str:
            return text
        try:
            value = self.type(text)
        except ValueError:
            value = None
        if value is None or not self.low <= float(value) <= self.high:
            what = "a whole number" if self.type is int else "a number"
            bounds = f"from {self.low:g} to {self.high:g}" if self.high < float("inf") else f"of at least {self.low:g}"
            raise HeadwiseError(f"{self.name} of the task {kind!r} must be {what} {bounds}, got {shorten(text)}")
        return value


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of task.

    maker: `module:function`; imported when prompts are made. It is called with an Encoder, the file or None, length,
        samples and seed, then by name with `fixed` and the parameters that were given.
    asks, scored, source: for people: what a prompt asks, the metric in words, the paper.
    family: what it is about, so that limits can be set and figures read by it.
    exact: whether prompts always have the length asked for; those of a suite may be shorter, where that is wanted.
    """

    name: str
    maker: str
    asks: str
    scored: str
    source: str
    takes_file: Literal["no", "may", "must"] = "no"
    parameters: tuple[Parameter, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    family: Family = "retrieval"
    exact: bool = True

    @property
    def usage(self) -> str:
        """How it is written, such as `needle[@depth=D][:FILE]`."""
        told = ",".join(f"{parameter.name}={parameter.name[0].upper()}" for parameter in self.parameters)
        file = {"no": "", "may": "[:FILE]", "must": ":FILE"}[self.takes_file]
        return self.name + (f"[@{told}]" if told else "") + file
