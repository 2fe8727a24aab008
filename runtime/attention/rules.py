"""What a mask function of transformers says, told by what it is made of: causal, over a window, within sequences.

Not by what it says of some places: an overlay may say otherwise elsewhere.

Shapes: B batch, Q query length, K key length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    parts = _parts(mask_function)
    if parts is None or not any(callable(part) for part in parts):
        return None
    windows = [part for part in parts if isinstance(part, int)]
    packed = [part for part in parts if isinstance(part, Tensor)]
    blocks = [part.blocks for part in parts if isinstance(part, _Blocks)]
    if len(packed) + len(blocks) > 1:
        return None
    return Rule(min(windows, default=None), next(iter(packed), None), next(iter(blocks), None))


class _Blocks(NamedTuple):
    """What lets tokens see others of their block, (B, K), whether before them or after."""

    blocks: Tensor


def _parts(function: Any) -> list[Any] | None:
    """What transformers joined to this function: causal functions, windows, for each packing the number of each token's
    sequence, (B, Q), and what lets tokens see more than that; None where there is anything else in it.
    """
    from transformers import masking_utils

    causal = masking_utils.causal_mask_function
    if function is causal:
        return [causal]
    maker, held = _made_by(function)
    match maker:
        case "and_masks":
            return _joined(held["mask_functions"])
        case "or_masks":
            # Outside of blocks such a mask is what the first part is.
            first, *others = held["mask_functions"]
            base, blocks = _parts(first), [_blocks(other) for other in others]
            return None if base is None or None in blocks else [*base, *blocks]
        case "sliding_window_overlay":
            return [int(held["sliding_window"])]
        case "packed_sequence_mask_function":
            return [held["packed_sequence_mask"]]
        case "remap_positions_for_packed_sequence":
            # Positions count within a sequence: before in one is before in the other, and as far.
            return _parts(held["mask_function"])
        case _:
            return None


def _joined(functions: Sequence[Any]) -> list[Any] | None:
    parts = [_parts(function) for function in functions]
    return None if None in parts else [part for some in parts if some is not None for part in some]


def _blocks(function: Any) -> _Blocks | None:
    maker, held = _made_by(function)
    return _Blocks(held["block_sequence_ids"]) if maker == "blockwise_overlay" else None


def _made_by(function: Any) -> tuple[str | None, dict[str, Any]]:
    """Which of transformers' functions made a mask function, and what that holds; None where another did."""
    from transformers import masking_utils

    code = getattr(function, "__code__", None)
    if code is None or getattr(function, "__module__", None) != masking_utils.__name__:
        return None, {}
    held = zip(code.co_freevars, [cell.cell_contents for cell in function.__closure__ or ()], strict=True)
    return function.__qualname__.split(".")[0], dict(held)
