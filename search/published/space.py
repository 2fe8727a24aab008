"""The search space of MInference 1.0, Algorithm 1: patterns that grow or shrink to a budget.

Shapes: H query heads of a layer, S prompt length, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from artifacts import HeadwiseError
from kernels.index import TILE, num_tiles, with_dense_tail
from kernels.patterns import NOT_SIZES, Builder, LayerPlan, Pattern, make

SPACE: tuple[Pattern, ...] = (
    make("a_shape", sink=1024, window=4096),
    make("vertical_slash", vertical=30, slash=2048),
    make("vertical_slash", vertical=100, slash=1800),
    make("vertical_slash", vertical=500, slash=1500),
    make("vertical_slash", vertical=3000, slash=200),
    make("block_sparse", blocks=100),
)
"""Where ChangeSpace starts."""
_STEP = 50


def sizes(pattern: Pattern) -> dict[str, int]:
    """The sizes that ChangeSpace moves, by name."""
    return {name: size for name, size in vars(pattern).items() if name not in NOT_SIZES}


def moved(start: Pattern, steps: int) -> Pattern:
    """The pattern `steps` from its start: the largest size moves, the others in proportion."""
    own = sizes(start)
    largest = max(own.values())
    target = largest + steps * _step(start)
    return replace(
        start, **{name: max(1, round(size * target / largest)) for name, size in own.items()}
    )


def bounds(start: Pattern, length: int) -> tuple[int, int]:
    """The fewest steps with positive sizes, and the most that still matter at `length` tokens."""
    largest = max(sizes(start).values())
    step = _step(start)
    if start.kind == "block_sparse":
        largest_step = num_tiles(length)
    else:
        largest_step = length
    return -((largest - 1) // step), max(0, -(-(largest_step - largest) // step))


def _step(start: Pattern) -> int:
    # 50 tokens are less than a block, and a block is the least that block-sparse can change by.
    if start.kind == "block_sparse":
        return 1
    return _STEP


def change_space(
    start: Pattern, target: int, build: Builder, *, num_heads: int, length: int, dense_tail: int
) -> list[int]:
    """ChangeSpace: steps to each head's largest pattern of at most `target` tiles.

    Tiles are counted from the index on the layer's own q and k: a head whose diagonals lie
    scattered gets fewer of them than one whose diagonals share tiles. A head whose smallest pattern
    computes more gets that one."""
    lowest, highest = bounds(start, length)
    low = [lowest] * num_heads
    high = [highest] * num_heads
    while low != high:
        middle = [(a + b + 1) // 2 for a, b in zip(low, high, strict=True)]
        index = with_dense_tail(build([moved(start, steps) for steps in middle]), dense_tail)
        for head, tiles in enumerate(index.computed_tiles()[0].tolist()):
            if low[head] == high[head]:
                continue
            if tiles <= target:
                low[head] = middle[head]
            else:
                high[head] = middle[head] - 1
    return low


def target_tiles(budget: str, length: int, dense_tail: int) -> int:
    """Tiles a head may compute at `length` tokens, those of the last `dense_tail` queries included.

    Args:
        budget: "a_shape:SINK,WINDOW" for what that pattern computes, or a fraction of dense causal
            attention.

    Raises:
        HeadwiseError: a budget that cannot be read, is more than dense, or is less than any pattern
            needs.
    """
    dense = dense_tiles(length)
    smallest = _a_shape_tiles((1, 1), length, dense_tail)
    if budget.startswith("a_shape:"):
        words = budget.removeprefix("a_shape:").split(",")
        if len(words) != 2 or not all(word.isdecimal() and int(word) > 0 for word in words):
            raise HeadwiseError(
                f"budget {budget!r} must be a_shape:SINK,WINDOW with two positive token counts"
            )
        target = _a_shape_tiles([int(word) for word in words], length, dense_tail)
    else:
        try:
            fraction = float(budget)
        except ValueError:
            raise HeadwiseError(
                f"budget {budget!r} must be a fraction such as 0.25 or a_shape:SINK,WINDOW"
            ) from None
        if not 0 < fraction <= 1:
            raise HeadwiseError(
                f"budget {budget} must be a fraction of dense attention, above 0 and at most 1"
            )
        target = int(fraction * dense)
    if target < smallest:
        raise HeadwiseError(
            f"budget {budget} is impossible at {length} tokens: the smallest pattern (first and "
            f"last tile of {TILE} keys, {dense_tail} queries dense) computes "
            f"{smallest / dense:.3f} of dense attention; ask for more, or for a longer --length"
        )
    return target


def dense_tiles(length: int) -> int:
    """Tiles of dense causal attention."""
    return num_tiles(length) * (num_tiles(length) + 1) // 2


def _a_shape_tiles(sizes: Sequence[int], length: int, dense_tail: int) -> int:
    # An A-shape reads the shapes of q and k alone.
    tensor = torch.empty(1, dtype=torch.float32).expand(1, 1, length, 1)
    plan = LayerPlan([make("a_shape", sink=sizes[0], window=sizes[1])], 1, dense_tail=dense_tail)
    return int(plan.build(tensor, tensor).computed_tiles())
