"""Reads NVIDIA machine code as nvdisasm shows it: loops, and what the hot one is made of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_TENSOR = ("HGMMA", "HMMA", "UTCHMMA", "UTCQMMA", "QGMMA")
# A wait for asynchronous copies, and how many groups of them may still be under way after it.
_WAIT = re.compile(r"SB0, 0x([0-9a-f]+)")
_ACCUMULATED = re.compile(r"HGMMA\.64x(\d+)x")
# A product of a warp group whose left operand comes from shared memory, too, has one descriptor for both.
_BOTH_SHARED = re.compile(r"\s*R\d+, gdesc")
# Of each row of an operand an instruction reads 32 bytes, whatever the number format; the left operand has 64 rows.
_BYTES_OF_A_ROW, _LEFT_ROWS = 32, 64


@dataclass(frozen=True, kw_only=True)
class Code:
    """Counts of instructions: all of them, and by what they do.

    under_way: the most groups of copies that a wait leaves under way; 0 where all that is copied is waited for at once.
    both_shared: products that read both operands from shared memory; shared_bytes: what all products of a warp group
    (wgmma) read from there. The left operand of the others lies in registers.
    """

    instructions: int
    tensor: int
    exponentials: int
    async_copies: int
    bulk_copies: int
    local: int
    under_way: int
    both_shared: int = 0
    shared_bytes: int = 0

    @classmethod
    def of(cls, code: Sequence[tuple[str, str]]) -> Code:
        """Counted from the instructions' names and operands."""
        names = [name for name, _ in code]
        products = [
            (int(found[1]), bool(_BOTH_SHARED.match(operands)))
            for name, operands in code
            if (found := _ACCUMULATED.match(name))
        ]
        waits = [_WAIT.search(operands) for name, operands in code if name == "DEPBAR.LE"]

        def count(*starts: str) -> int:
            return sum(name.startswith(starts) for name in names)

        return cls(
            instructions=len(names),
            tensor=count(*_TENSOR),
            exponentials=count("MUFU.EX2"),
            async_copies=count("LDGSTS"),
            bulk_copies=count("UTMALDG", "UBLKCP"),
            local=count("LDL", "STL"),
            under_way=max((int(found[1], 16) for found in waits if found), default=0),
            both_shared=sum(both for _, both in products),
            shared_bytes=sum(_BYTES_OF_A_ROW * (columns + _LEFT_ROWS * both) for columns, both in products),
        )


def whole(text: str) -> Code:
    """Everything that the kernel holds."""
    return Code.of(list(_instructions(text)))


def hot_loops(text: str) -> list[Code]:
    """The loops that multiply the most and stand in no other, the leanest first.

    A kernel of attention has one for tiles that need no mask, one for those that do, one for columns and one for its
    own tiles. Those for values that are not finite stand in another, which goes through a few columns of the output at
    a time.
    """
    found = [(not nested, work, -len(code), code) for code, nested in _innermost(text) if (work := _work(code))]
    most = max((each[:2] for each in found), default=None)
    return [Code.of(code) for *_, code in sorted((e for e in found if e[:2] == most), key=lambda e: -e[2])]


def _work(code: Sequence[tuple[str, str]]) -> int:
    """Matrix work in units of one instruction, by its width where its name says that."""
    names = [name for name, _ in code]
    wide = [int(found[1]) for name in names if (found := _ACCUMULATED.match(name))]
    return sum(wide) or sum(name.startswith(_TENSOR) for name in names)


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if found := _INSTRUCTION.match(line):
            yield found[2], found[3]


def _innermost(text: str) -> Iterator[tuple[list[tuple[str, str]], bool]]:
    """The code of each loop that holds no other, from a label to the last branch back; and whether one holds it."""
    code: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    loops: dict[int, int] = {}
    # Where the code that comes in turn is over, and what lies out of line begins.
    over = 0
    for line in text.splitlines():
        if found := _LABEL.match(line):
            labels[found[1]] = len(code)
        elif found := _INSTRUCTION.match(line):
            code.append((found[2], found[3]))
            if found[2] == "EXIT" and not found[1]:
                over = len(code)
            back = _TARGET.search(found[3])
            # From behind the end it is the way back from where a loop waits for a barrier.
            if found[2].startswith("BRA") and back and labels.get(back[1], -1) >= over:
                loops[labels[back[1]]] = len(code)
    for start, end in loops.items():
        others = [loop for loop in loops.items() if loop != (start, end)]
        if not any(start <= other < end for other, _ in others):
            yield code[start:end], any(other <= start and end <= until for other, until in others)
