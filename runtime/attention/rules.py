"""What a mask function of transformers says, told by what it is made of: causal, and over a window.

Not by what it says of some places: an overlay may say otherwise elsewhere.

Shapes: B batch, Q query length, K key length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

# A row's runs of real slots: [start, end) of each.
Rows = tuple[tuple[tuple[int, int], ...], ...]


class Run(NamedTuple):
    """Neighbours in a row that have one number: the slots [begin, end)."""

    number: int
    begin: int
    end: int


def runs(numbers: Tensor) -> list[list[Run]]:
    """All runs of each row of (B, n) integers, or booleans."""
    batch, length = numbers.shape
    changes = torch.nn.functional.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0), value=True)[
        :, :length
    ]
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
    """A causal mask. window: how many tokens a query sees, itself included; None for all."""

    window: int | None = None


def rule_of(mask_function: Callable[..., Any]) -> Rule | None:
    """The rule that a mask function is, None where it is causal in another way, or not at all."""
    said: dict[str, list[Any]] = {"causal": [], "window": [], "other": []}
    for kind, value in _said(mask_function):
        said[kind].append(value)
    if said["other"] or not said["causal"]:
        return None
    return Rule(min(said["window"], default=None))


def _said(function: Any) -> Iterator[tuple[str, Any]]:
    """What transformers joined to this function, each by its kind: see Rule. What is "other" no
    rule is made of."""
    maker, held = _made_by(function)
    match maker:
        case "causal_mask_function":
            yield "causal", function
        case "and_masks":
            for each in held["mask_functions"]:
                yield from _said(each)
        case "sliding_window_overlay":
            yield "window", int(held["sliding_window"])
        case _:
            yield "other", function


def _made_by(function: Any) -> tuple[str | None, dict[str, Any]]:
    """Which of transformers' functions a mask function is or was made by, and what it holds; None
    for any other."""
    from transformers import masking_utils

    code = getattr(function, "__code__", None)
    if code is None or getattr(function, "__module__", None) != masking_utils.__name__:
        return None, {}
    held = zip(
        code.co_freevars, [cell.cell_contents for cell in function.__closure__ or ()], strict=True
    )
    return function.__qualname__.split(".")[0], dict(held)
