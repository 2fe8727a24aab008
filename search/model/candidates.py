"""Candidate grid of a search with one budget for the model: every kind, from tiny to dense.

Sizes are fractions of the prompt's length, so that a candidate means the same at every length.
"""

from __future__ import annotations

from kernels.index import TILE, num_tiles
from kernels.patterns import Pattern, make

_SHARES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4)
# Columns and diagonals that together compute most of the square are dearer than dense attention.
_WIDEST = 3 / 8
_BROAD = (
    (1 / 32, 1 / 32),
    (1 / 32, 1 / 16),
    (1 / 16, 1 / 32),
    (1 / 16, 1 / 16),
    (1 / 32, 1 / 8),
    (1 / 8, 1 / 8),
)
_WINDOWS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8)
_BLOCKS = (1 / 64, 1 / 32, 1 / 16, 3 / 32, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2)
_COVERAGES = (0.9, 0.95, 0.98)
# It multiplies every tile: as dear to score as ten sparse candidates. Of 0.2, 0.04 and 0.008 this
# one alone loses 0.3% more at a quarter of the seconds, by the curves (SmolLM2, 8,192 tokens).
_THRESHOLD = 0.04
# Queries of an estimate: those of the paper, and some more for heads whose last ones are
# not like the rest.
LAST_Q = 64
BROAD_LAST_Q = 256


def candidate_grid(length: int) -> tuple[Pattern, ...]:
    """All candidates at a prompt length, in the same order at every length."""

    def tokens(share: float) -> int:
        return max(1, round(share * length))

    def tiles(share: float) -> int:
        return max(1, round(share * num_tiles(length)))

    pairs = [(v, s) for v in _SHARES for s in _SHARES if v + s < _WIDEST]
    widest = max(_SHARES)
    return (
        *(make("a_shape", sink=TILE, window=tokens(w)) for w in _WINDOWS),
        *(
            make("vertical_slash", vertical=tokens(v), slash=tokens(s), last_q=LAST_Q)
            for v, s in pairs
        ),
        *(
            make("vertical_slash", vertical=tokens(v), slash=tokens(s), last_q=BROAD_LAST_Q)
            for v, s in _BROAD
        ),
        *(
            make(
                "vertical_slash",
                vertical=tokens(widest),
                slash=tokens(widest),
                last_q=LAST_Q,
                coverage=c,
            )
            for c in _COVERAGES
        ),
        *(make("block_sparse", blocks=tiles(b)) for b in _BLOCKS),
        *(make("block_sparse", blocks=tiles(max(_BLOCKS)), coverage=c) for c in _COVERAGES),
        make("skip_softmax", scale_factor=round(_THRESHOLD * length, 3)),
        make("dense"),
    )
