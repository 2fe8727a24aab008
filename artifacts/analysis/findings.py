"""Findings of lint, and the artifact that its rules look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from artifacts.schema.artifact import Artifact

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Finding of one rule.

    Attributes:
        code: of the rule, to ignore it by.
        severity: "error" is a contradiction or a loss on every prompt, "warning" most likely a
            mistake, "note" worth knowing.
        where: the field or array.
        message: what, why, what to do.
    """

    code: str
    severity: Severity
    where: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """An artifact and its sidecar's arrays."""

    artifact: Artifact
    arrays: Mapping[str, Array] = field(default_factory=dict)

    @property
    def entries(self) -> Mapping[str, Any]:
        """Dtypes and shapes by the sidecar's header, which reads no array; or the arrays."""
        return getattr(self.arrays, "entries", self.arrays)

    @property
    def tables(self) -> dict[str, Array]:
        """The arrays that have a number for each head of the model."""
        shape = (self.artifact.model.num_layers, self.artifact.model.num_heads)
        return {
            name: self.arrays[name] for name, entry in self.entries.items() if entry.shape == shape
        }

    @property
    def named(self) -> int:
        """Heads that have a pattern."""
        return sum(len(row) for row in self.artifact.prefill.layers if row is not None)


Findings = Iterator[Finding]


def error(code: str, where: str, message: str) -> Finding:
    """A contradiction, or a loss on every prompt."""
    return Finding(code=code, severity="error", where=where, message=message)


def warning(code: str, where: str, message: str) -> Finding:
    """Most likely a mistake."""
    return Finding(code=code, severity="warning", where=where, message=message)


def note(code: str, where: str, message: str) -> Finding:
    """Worth knowing."""
    return Finding(code=code, severity="note", where=where, message=message)


def layer_list(numbers: list[int], limit: int = 5) -> str:
    """layer 3, layers 1, 2, 3, or layers 1, 2, 3, 4, 5 and 7 more."""
    shown = ", ".join(map(str, numbers[:limit]))
    if len(numbers) > limit:
        more = f" and {len(numbers) - limit} more"
    else:
        more = ""
    return f"layer{'s' * (len(numbers) > 1)} {shown}{more}"
