"""Which sequences lie end to end in a row: by the mask function that transformers makes of position_ids that restart.

Shapes: B batch, Q query length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

# A row's sequences: [start, end) of each.
Rows = tuple[tuple[tuple[int, int], ...], ...]


def packed_rows(mask_function: Callable[..., Any], batch: int, length: int) -> Rows | None:
    """The sequences of each row, end to end, where the function is causal within each of them and nothing else.

    It is told by what it is made of, not by what it says of some places: an overlay may say otherwise elsewhere.
    """
    parts = _parts(mask_function)
    if parts is None or not any(callable(part) for part in parts):
        return None
    numbers = [part for part in parts if isinstance(part, Tensor)]
    if len(numbers) != 1:
        return None
    number = numbers[0]
    if number.shape != (batch, length):
        return None
    changed = (number[:, 1:] != number[:, :-1]).nonzero().tolist()
    cuts: list[list[int]] = [[0] for _ in range(batch)]
    for row, last in changed:
        cuts[row].append(last + 1)
    return tuple(tuple(zip(row, [*row[1:], length], strict=True)) for row in cuts)


def _parts(function: Any) -> list[Any] | None:
    """What transformers joined to this function: causal functions, and for each packing the number of each token's
    sequence, (B, Q); None where there is anything else in it.
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
        case "packed_sequence_mask_function":
            return [held["packed_sequence_mask"]]
        case "remap_positions_for_packed_sequence":
            # Positions count within a sequence: before in one is before in the other.
            return [causal] if held["mask_function"] is causal else None
        case _:
            return None
