"""What a mask function of transformers says, told by what it is made of: causal, over a window, within sequences.

Not by what it says of some places: an overlay may say otherwise elsewhere.

Shapes: B batch, Q query length, K key length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

# A row's sequences, or its spans: [start, end) of each.
Rows = tuple[tuple[tuple[int, int], ...], ...]


class Run(NamedTuple):
    """Neighbours in a row that have one number: the slots [begin, end)."""

    number: int
    begin: int
    end: int


def runs(numbers: Tensor) -> list[list[Run]]:
    """All runs of each row of (B, n) integers, or booleans."""
    batch, length = numbers.shape
    changes = torch.nn.functional.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0), value=True)[:, :length]
    begins = changes.nonzero()
    found = torch.cat([begins, numbers[begins.unbind(1)][:, None]], dim=1).tolist()
    rows: list[list[Run]] = [[] for _ in range(batch)]
    for (row, begin, number), (_, end, _) in pairwise([*found, (batch, 0, 0)]):
        # The next one begins with 0 where it is the next row's.
        rows[row].append(Run(number, begin, end or length))
    return rows


def real_slots(real: Tensor) -> Rows:
    """The runs of real slots in each row of (B, n) booleans."""
    return tuple(tuple((run.begin, run.end) for run in row if run.number) for row in runs(real))


class Rule(NamedTuple):
    """A causal mask.

    window: how many tokens a query sees, itself included; None for all. packed: the number of each token's sequence,
    (B, Q), where several lie end to end in a row (position_ids that restart); None where a row is one sequence.
    blocks: the number of each token's block, (B, K), whose tokens see each other both ways (an image); -1 for none.
    """

    window: int | None = None
    packed: Tensor | None = None
    blocks: Tensor | None = None

    def spans(self, ranges: Sequence[tuple[int, int]]) -> Rows | None:
        """The blocks among each row's slots [start, end); None where one does not lie in one piece."""
        rows = []
        for row, (start, end) in enumerate(ranges):
            blocks = [] if self.blocks is None else runs(self.blocks[row : row + 1, start:end])[0]
            found = [run for run in blocks if run.number >= 0]
            if len({run.number for run in found}) < len(found):
                return None
            rows.append(tuple((start + run.begin, start + run.end) for run in found))
        return tuple(rows)

    def rows(self, batch: int, length: int) -> Rows | None:
        """The packed sequences of each row; None where they are of a call of another shape."""
        number = self.packed
        if number is None or number.shape != (batch, length):
            return None
        return tuple(tuple((run.begin, run.end) for run in row) for row in runs(number))


def rule_of(mask_function: Callable[..., Any]) -> Rule | None:
    """The rule that a mask function is, None where it is causal in another way, or not at all."""
    said: dict[str, list[Any]] = {"causal": [], "window": [], "packed": [], "blocks": [], "other": []}
    for kind, value in _said(mask_function):
        said[kind].append(value)
    packed, blocks = said["packed"], said["blocks"]
    if said["other"] or not said["causal"] or len(packed) + len(blocks) > 1:
        return None
    return Rule(min(said["window"], default=None), next(iter(packed), None), next(iter(blocks), None))


def _said(function: Any) -> Iterator[tuple[str, Any]]:
    """What transformers joined to this function, each by its kind: see Rule. What is "other" no rule is made of."""
    maker, held = _made_by(function)
    match maker:
        case "causal_mask_function":
            yield "causal", function
        case "and_masks":
            for each in held["mask_functions"]:
                yield from _said(each)
        case "or_masks":
            # Outside of blocks such a mask is what the first part is.
            first, *others = held["mask_functions"]
            yield from _said(first)
            for each in others:
                maker, held = _made_by(each)
                yield ("blocks", held["block_sequence_ids"]) if maker == "blockwise_overlay" else ("other", each)
        case "sliding_window_overlay":
            yield "window", int(held["sliding_window"])
        case "packed_sequence_mask_function":
            yield "packed", held["packed_sequence_mask"]
        case "remap_positions_for_packed_sequence":
            # Positions count within a sequence: before in one is before in the other, and as far.
            yield from _said(held["mask_function"])
        case _:
            yield "other", function


def _made_by(function: Any) -> tuple[str | None, dict[str, Any]]:
    """Which of transformers' functions a mask function is or was made by, and what it holds; None for any other."""
    from transformers import masking_utils

    code = getattr(function, "__code__", None)
    if code is None or getattr(function, "__module__", None) != masking_utils.__name__:
        return None, {}
    held = zip(code.co_freevars, [cell.cell_contents for cell in function.__closure__ or ()], strict=True)
    return function.__qualname__.split(".")[0], dict(held)
