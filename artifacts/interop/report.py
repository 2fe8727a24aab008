"""Fidelity of a conversion: identical heads, and the effects on the other heads."""

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

# A head that computes more keeps all of its tiles: only time is lost.
HARMLESS = ("computes more", "same")


@dataclass(frozen=True, kw_only=True)
class Note:
    """One difference between the two sides.

    Attributes:
        effect: effect on the heads. "same" is a different form with the same effect.
        heads: number of affected heads; 0 for a note on the whole file.
    """

    effect: Effect
    heads: int
    what: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """Fidelity of a conversion.

    Attributes:
        heads: number of heads in the file: query heads or KV heads, by `unit`.
        exact: number of heads that are the same on both sides.
        measure: command that measures the loss of recall with a model.
    """

    heads: int
    exact: int
    unit: str = "head"
    notes: tuple[Note, ...] = ()
    measure: str = ""

    @property
    def lossy(self) -> bool:
        """True if anything except time is lost."""
        return any(note.effect not in HARMLESS for note in self.notes)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report for a terminal."""
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
        """Return the report as JSON data."""
        return {"lossy": self.lossy, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Import:
    """Artifact and arrays of an import, and their fidelity to the file."""

    artifact: Artifact
    arrays: dict[str, Array]
    report: Report


@dataclass(frozen=True, kw_only=True)
class Export:
    """Files of an export, and their fidelity to the artifact."""

    files: dict[Path, bytes]
    report: Report


class Notes:
    """Collector of notes; it merges equal notes of several heads and counts the heads."""

    def __init__(self) -> None:
        self._heads: dict[tuple[Effect, str], int] = {}

    def heads(self, effect: Effect, what: str, heads: int = 1) -> None:
        """Add `heads` to the count of a note; do nothing for 0 heads."""
        if heads:
            self._heads[effect, what] = self._heads.get((effect, what), 0) + heads

    def file(self, effect: Effect, what: str) -> None:
        """Add a note on the whole file."""
        self._heads[effect, what] = 0

    def left_out(self, artifact: Artifact, *carried: str) -> None:
        """Add notes on the artifact's sections that the format cannot store, except `carried`."""
        there = {
            "prefill": artifact.patterns,
            "decode": artifact.decode,
            "kv_cache": artifact.kv_cache,
        }
        for name, section in there.items():
            if section and name not in carried:
                self.file("not carried over", f"the {name} section has no place in this format")

    def report(self, heads: int, exact: int, unit: str = "head") -> Report:
        """Return the report, with notes in the order of their first use."""
        notes = tuple(
            Note(effect=effect, heads=count, what=what)
            for (effect, what), count in self._heads.items()
        )
        return Report(heads=heads, exact=exact, unit=unit, notes=notes)
