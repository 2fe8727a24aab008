"""The search space of MInference 1.0, Algorithm 1: families of patterns, grown or shrunk until they meet the budget.

Shapes: H query heads of a layer, Q query length, K key length, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels.index import TILE, SparseIndex, num_tiles, with_dense_tail
from kernels.patterns import KINDS, Pattern, make
from kernels.patterns.a_shape import AShape

PAPER_LENGTH = 30_000
PAPER_BUDGET = "a_shape:1024,4096"
_PAPER_STEP = 50
_PAPER_SPACE: tuple[tuple[str, dict[str, int]], ...] = (
    ("a_shape", {"sink": 1024, "window": 4096}),
    ("vertical_slash", {"vertical": 30, "slash": 2048}),
    ("vertical_slash", {"vertical": 100, "slash": 1800}),
    ("vertical_slash", {"vertical": 500, "slash": 1500}),
    ("vertical_slash", {"vertical": 3000, "slash": 200}),
    ("block_sparse", {"blocks": 100}),
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One entry of the initial space and the line along which ChangeSpace moves it.

    `start` holds the sizes by name. Moving n steps changes the largest size by n * `step` and the others in
    proportion, so that many verticals stay many verticals.
    """

    kind: str
    start: tuple[tuple[str, int], ...]
    step: int

    @property
    def name(self) -> str:
        return "_".join([self.kind, *(str(size) for _, size in self.start)])

    def at(self, n: int) -> Pattern:
        """The pattern n steps away from the start."""
        largest = max(size for _, size in self.start)
        moved = largest + n * self.step
        return make(self.kind, **{name: max(1, round(size * moved / largest)) for name, size in self.start})

    def sized(self, sizes: Sequence[int]) -> Pattern:
        """The pattern of these sizes, in the order of `start`; what is left over is not read."""
        return make(self.kind, **{name: int(size) for (name, _), size in zip(self.start, sizes, strict=False)})

    def sizes_of(self, pattern: Pattern) -> list[int]:
        """The sizes of a pattern of the family, in the order of `start`."""
        return [getattr(pattern, name) for name, _ in self.start]

    def steps(self, length: int) -> tuple[int, int]:
        """The least n whose sizes are positive and the greatest that still changes anything at `length` tokens."""
        largest = max(size for _, size in self.start)
        limit = num_tiles(length) if self.kind == "block_sparse" else length
        return -((largest - 1) // self.step), max(0, -(-(limit - largest) // self.step))


def initial_space() -> tuple[Family, ...]:
    """The paper's space."""
    # 50 tokens are less than a block, and a block is the least that block-sparse can change by.
    return tuple(
        Family(kind=kind, start=tuple(sizes.items()), step=1 if kind == "block_sparse" else _PAPER_STEP)
        for kind, sizes in _PAPER_SPACE
    )


def target_tiles(budget: str, length: int, dense_tail: int) -> int:
    """Tiles a head may compute at `length` tokens, those of the last `dense_tail` queries included.

    Args:
        budget: "a_shape:SINK,WINDOW" for what that pattern computes, or a fraction of dense causal attention.

    Raises:
        HeadwiseError: a budget that cannot be read, is more than dense, or is less than any pattern needs.
    """
    dense, least = _a_shape_tiles(length, length, length, 0), _a_shape_tiles(1, 1, length, dense_tail)
    if budget.startswith("a_shape:"):
        sizes = budget.removeprefix("a_shape:").split(",")
        if len(sizes) != 2 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise HeadwiseError(f"budget {budget!r} must be a_shape:SINK,WINDOW with two positive token counts")
        target = _a_shape_tiles(int(sizes[0]), int(sizes[1]), length, dense_tail)
    else:
        try:
            fraction = float(budget)
        except ValueError:
            raise HeadwiseError(f"budget {budget!r} must be a fraction such as 0.25 or a_shape:SINK,WINDOW") from None
        if not 0 < fraction <= 1:
            raise HeadwiseError(f"budget {budget} must be a fraction of dense attention, above 0 and at most 1")
        target = int(fraction * dense)
    if target < least:
        share = least / dense
        raise HeadwiseError(
            f"budget {budget} is impossible at {length} tokens: the smallest pattern (first and last tile of {TILE} "
            f"keys, {dense_tail} queries dense) computes {share:.3f} of dense attention; ask for more, or for a longer "
            "--length"
        )
    return target


def _a_shape_tiles(sink: int, window: int, length: int, dense_tail: int) -> int:
    # A-shape reads the shapes of q and k alone.
    tensor = torch.empty(1).expand(1, 1, length, 1)
    index = AShape.build_index([AShape(sink=sink, window=window)], [0], tensor, tensor, scale=1.0)
    return int(with_dense_tail(index, dense_tail).computed_tiles())


Builder = Callable[[Sequence[Pattern]], SparseIndex]


def builders(families: Sequence[Family], q: Tensor, k: Tensor, *, scale: float, dense_tail: int) -> dict[str, Builder]:
    """For each kind the function from one pattern a head to their index on these q (1, H, Q, D) and k (1, G, K, D)."""

    def with_tail(build: Builder) -> Builder:
        return lambda patterns: with_dense_tail(build(patterns), dense_tail)

    heads = range(q.shape[1])
    made = {}
    for kind in dict.fromkeys(family.kind for family in families):
        # No size means more than the prompt's length.
        names = {name for family in families if family.kind == kind for name, _ in family.start}
        largest = make(kind, **dict.fromkeys(names, k.shape[2]))
        made[kind] = with_tail(KINDS[kind].prepare([largest for _ in heads], heads, q, k, scale=scale))
    return made


def change_space(family: Family, target: int, build: Builder, *, num_heads: int, length: int) -> list[Pattern]:
    """ChangeSpace for all heads of a layer: each head's largest pattern that computes at most `target` tiles.

    What a pattern computes is counted from its SparseIndex on the layer's own q and k: a head whose diagonals lie
    scattered gets fewer of them than one whose diagonals share tiles. The result is within one step of the target from
    below, or the family's smallest pattern where even that computes more.
    """
    least, most = family.steps(length)
    low, high = [least] * num_heads, [most] * num_heads
    while any(a < b for a, b in zip(low, high, strict=True)):
        middle = [(a + b + 1) // 2 for a, b in zip(low, high, strict=True)]
        tiles = build([family.at(n) for n in middle]).computed_tiles()[0].tolist()
        for head, n in enumerate(middle):
            if low[head] < high[head]:
                if tiles[head] <= target:
                    low[head] = n
                else:
                    high[head] = n - 1
    return [family.at(n) for n in low]
