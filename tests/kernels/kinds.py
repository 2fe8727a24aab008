"""Kinds of patterns in this folder's suites: a new one is an entry of KINDS_DRAWN and LAYER."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from kernels.patterns import make

Sizes = dict[str, Any]
_SIZE = st.one_of(st.integers(1, 8), st.integers(1, 700))
_SHARE = st.one_of(st.none(), st.floats(0.01, 1.0))
_FEW = st.integers(1, 9)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Strategies of a kind's fields, and two of its patterns: the large one is nowhere smaller."""

    drawn: dict[str, st.SearchStrategy[Any]]
    large: Sizes
    small: Sizes


KINDS_DRAWN = {
    "dense": Kind(drawn={}, large={}, small={}),
    "a_shape": Kind(
        drawn={"sink": _SIZE, "window": _SIZE},
        large={"sink": 200, "window": 300},
        small={"sink": 70, "window": 10},
    ),
    "vertical_slash": Kind(
        drawn={
            "vertical": _SIZE,
            "slash": _SIZE,
            "last_q": st.integers(1, 100),
            "coverage": _SHARE,
        },
        large={"vertical": 300, "slash": 200},
        small={"vertical": 80, "slash": 150, "coverage": 0.9},
    ),
    "block_sparse": Kind(
        drawn={"blocks": _FEW, "coverage": _SHARE},
        large={"blocks": 6},
        small={"blocks": 5, "coverage": 0.9},
    ),
    "skip_softmax": Kind(
        drawn={"scale_factor": st.floats(0.1, 900)},
        large={"scale_factor": 2.0},
        small={"scale_factor": 70.0},
    ),
}

LAYER = (
    make("vertical_slash", vertical=80, slash=90),
    make("block_sparse", blocks=3),
    make("a_shape", sink=70, window=100),
    make("dense"),
    make("vertical_slash", vertical=600, slash=350, last_q=32),
    make("block_sparse", blocks=1),
    make("a_shape", sink=130, window=1),
    make("vertical_slash", vertical=90, slash=200, coverage=0.8),
    make("block_sparse", blocks=2, coverage=0.5),
    make("vertical_slash", vertical=150, slash=64, last_q=16),
    make("block_sparse", blocks=9, coverage=0.7),
    make("skip_softmax", scale_factor=3.0),
    make("a_shape", sink=1, window=1),
    make("a_shape", sink=1, window=500),
)
"""Every kind, small and large."""
