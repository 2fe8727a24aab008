"""Reads NVIDIA machine code as nvdisasm shows it: loops, and what the hot one is made of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_TENSOR = ("HGMMA", "HMMA", "UTCHMMA", "UTCQMMA", "QGMMA")
_ACCUMULATED = re.compile(r"HGMMA\.64x(\d+)x16")


@dataclass(frozen=True, kw_only=True)
class Code:
    """Counts of instructions: all of them, and by what they do."""

    instructions: int
    tensor: int
    exponentials: int
    async_copies: int
    bulk_copies: int
    local: int

    @classmethod
    def of(cls, names: Sequence[str]) -> Code:
        """Counted from the instructions' names."""

        def count(*starts: str) -> int:
            return sum(name.startswith(starts) for name in names)

        return cls(
            instructions=len(names),
            tensor=count(*_TENSOR),
            exponentials=count("MUFU.EX2"),
            async_copies=count("LDGSTS"),
            bulk_copies=count("UTMALDG", "UBLKCP"),
            local=count("LDL", "STL"),
        )


def whole(text: str) -> Code:
    """Everything that the kernel holds."""
    return Code.of([name for name, _ in _instructions(text)])


def hot_loop(text: str) -> Code | None:
    """The loop that multiplies the most and stands in no other, the leanest of those that are equal; None without any.

    A kernel of attention has one for tiles, one for columns and one for its own tiles. Those for values that are not
    finite stand in another, which goes through a few columns of the output at a time.
    """
    found = [(not nested, work, -len(names), names) for names, nested in _innermost(text) if (work := _work(names))]
    return Code.of(max(found)[3]) if found else None


def _work(names: Sequence[str]) -> int:
    """Matrix work in units of one instruction, by its width where its name says that."""
    wide = [int(found[1]) for name in names if (found := _ACCUMULATED.match(name))]
    return sum(wide) or sum(name.startswith(_TENSOR) for name in names)


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if found := _INSTRUCTION.match(line):
            yield found[1], found[2]


def _innermost(text: str) -> Iterator[tuple[list[str], bool]]:
    """The names in each loop that holds no other, from a label to the last branch back; and whether one holds it."""
    names: list[str] = []
    labels: dict[str, int] = {}
    loops: dict[int, int] = {}
    for line in text.splitlines():
        if found := _LABEL.match(line):
            labels[found[1]] = len(names)
        elif found := _INSTRUCTION.match(line):
            names.append(found[1])
            back = _TARGET.search(found[2])
            if found[1].startswith("BRA") and back and back[1] in labels:
                loops[labels[back[1]]] = len(names)
    for start, end in loops.items():
        others = [loop for loop in loops.items() if loop != (start, end)]
        if not any(start <= other < end for other, _ in others):
            yield names[start:end], any(other <= start and end <= until for other, until in others)
