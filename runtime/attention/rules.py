"""What a mask function of transformers says, told by what it is made of: causal, over a window, within sequences.

Not by what it says of some places: an overlay (pictures in the prompt, say) may say otherwise elsewhere.

Shapes: B batch, Q query length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

# A row's sequences: [start, end) of each.
Rows = tuple[tuple[tuple[int, int], ...], ...]


class Rule(NamedTuple):
    """A causal mask.

    window: how many tokens a query sees, itself included; None for all. packed: the number of each token's sequence,
    (B, Q), where several lie end to end in a row (position_ids that restart); None where a row is one sequence.
    """

    window: int | None = None
    packed: Tensor | None = None

    def rows(self, batch: int, length: int) -> Rows | None:
        """The packed sequences of each row; None where they are of a call of another shape."""
        number = self.packed
        if number is None or number.shape != (batch, length):
            return None
        changed = (number[:, 1:] != number[:, :-1]).nonzero().tolist()
        cuts: list[list[int]] = [[0] for _ in range(batch)]
        for row, last in changed:
            cuts[row].append(last + 1)
        return tuple(tuple(zip(row, [*row[1:], length], strict=True)) for row in cuts)


def rule_of(mask_function: Callable[..., Any]) -> Rule | None:
    """The rule that a mask function is, None where it is causal in another way, or not at all."""
    parts = _parts(mask_function)
    if parts is None or not any(callable(part) for part in parts):
        return None
    windows = [part for part in parts if isinstance(part, int)]
    numbers = [part for part in parts if isinstance(part, Tensor)]
    if len(numbers) > 1:
        return None
    return Rule(min(windows, default=None), numbers[0] if numbers else None)


def _parts(function: Any) -> list[Any] | None:
    """What transformers joined to this function: causal functions, windows, and for each packing the number of each
    token's sequence, (B, Q); None where there is anything else in it.
    """
    from transformers import masking_utils

    causal = masking_utils.causal_mask_function
    if function is causal:
        return [causal]
    code = getattr(function, "__code__", None)
    if code is None or getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    held = dict(zip(code.co_freevars, [cell.cell_contents for cell in function.__closure__ or ()], strict=True))
    match function.__qualname__.split(".")[0]:
        case "and_masks":
            joined = [_parts(part) for part in held["mask_functions"]]
            return None if None in joined else [part for parts in joined if parts is not None for part in parts]
        case "sliding_window_overlay":
            return [int(held["sliding_window"])]
        case "packed_sequence_mask_function":
            return [held["packed_sequence_mask"]]
        case "remap_positions_for_packed_sequence":
            # Positions count within a sequence: before in one is before in the other, and as far.
            return _parts(held["mask_function"])
        case _:
            return None
