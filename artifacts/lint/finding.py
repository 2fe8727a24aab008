"""A finding: what is odd, why it matters and what to do, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from artifacts.schema import Artifact

if TYPE_CHECKING:
    from artifacts.sidecar import Array

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is odd.

    code: the check's name, to be ignored by. severity: "error" is a contradiction or a loss on every prompt, "warning"
    most likely a mistake, "note" worth knowing. where: the field or array. message: what, why, what to do.
    """

    code: str
    severity: Severity
    where: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a check looks at.

    arrays: the sidecar's; None where it is missing or changed, which `fault` then says. length: a length of prompts to
    look at, in tokens, beside those that the artifact names.
    """

    artifact: Artifact
    arrays: Mapping[str, Array] | None = field(default_factory=dict)
    fault: str | None = None
    length: int | None = None

    @property
    def named(self) -> int:
        """Heads that have a pattern."""
        return sum(len(row) for row in self.artifact.prefill.layers if row is not None)

    def searched(self) -> int | None:
        """The longest prompt that the patterns were searched on; None where they were imported."""
        search = self.artifact.search
        return None if search is None else max(search.calibration.lengths)


def heads(count: int) -> str:
    """1 head, 2 heads, 1,024 heads."""
    return f"{count:,} head{'' if count == 1 else 's'}"


def some(items: list[int], limit: int = 5) -> str:
    """1, 2, 3 and 4 more."""
    shown = ", ".join(map(str, items[:limit]))
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"
