"""Fidelity of a conversion: heads that are the same on both sides, and effects on the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.errors import plural
from artifacts.schema.artifact import Artifact
from artifacts.schema.patterns import Effect

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

# Where a head computes more, it keeps all that it kept: nothing is lost but time.
HARMLESS = ("computes more", "same")


@dataclass(frozen=True, kw_only=True)
class Note:
    """One thing that is not the same on the two sides.

    Attributes:
        effect: what it does to the heads. "same" is a form that differs and an effect that does
            not.
        heads: on how many; 0 where it is about the whole file.
    """

    effect: Effect
    heads: int
    what: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """Fidelity of a conversion.

    Attributes:
        heads: that the file speaks of: query heads, or KV heads, as `unit` says.
        exact: those that are the same on both sides.
        measure: the command that measures what the conversion costs in recall, given a model.
    """

    heads: int
    exact: int
    unit: str = "head"
    notes: tuple[Note, ...] = ()
    measure: str = ""

    @property
    def lossy(self) -> bool:
        """True where anything is lost but time."""
        return any(note.effect not in HARMLESS for note in self.notes)

    def lines(self) -> Iterator[str]:
        """The report for people."""
        yield f"{self.unit}s: {self.exact:,} of {self.heads:,} exactly"
        for note in self.notes:
            if note.heads:
                where = plural(note.heads, self.unit)
            else:
                where = "the file"
            yield f"  {note.effect}: {where}: {note.what}"
        if self.measure:
            yield f"recall: needs the model; {self.measure}"

    def as_json(self) -> dict[str, Any]:
        """The report for programs."""
        return {"lossy": self.lossy, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Import:
    """Artifact and arrays that an import makes, and their fidelity to the file."""

    artifact: Artifact
    arrays: dict[str, Array]
    report: Report


@dataclass(frozen=True, kw_only=True)
class Export:
    """Files that an export makes, and their fidelity to the artifact."""

    files: dict[Path, bytes]
    report: Report


class Notes:
    """Collects notes; the same note of several heads becomes one with their number."""

    def __init__(self) -> None:
        self._heads: dict[tuple[Effect, str], int] = {}

    def heads(self, effect: Effect, what: str, heads: int = 1) -> None:
        """Note it for so many heads more, and not at all for none."""
        if heads:
            self._heads[effect, what] = self._heads.get((effect, what), 0) + heads

    def file(self, effect: Effect, what: str) -> None:
        """Note it for the whole file."""
        self._heads[effect, what] = 0

    def left_out(self, artifact: Artifact, *carried: str) -> None:
        """Note the artifact's sections, beside `carried`, that the format has no place for."""
        there = {
            "prefill": artifact.patterns,
            "decode": artifact.decode,
            "kv_cache": artifact.kv_cache,
        }
        for name, section in there.items():
            if section and name not in carried:
                self.file("not carried over", f"the {name} section has no place in this format")

    def report(self, heads: int, exact: int, unit: str = "head") -> Report:
        """All of it, in the order in which it first came up."""
        notes = tuple(
            Note(effect=effect, heads=count, what=what)
            for (effect, what), count in self._heads.items()
        )
        return Report(heads=heads, exact=exact, unit=unit, notes=notes)
