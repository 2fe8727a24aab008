"""The candidates of a search with one budget for the model: the same rungs at every length."""

from __future__ import annotations

import pytest

from kernels.index import TILE, num_tiles
from kernels.patterns import KINDS
from search.model.candidates import candidate_grid

# What goes with the length, by kind, and in what it counts.
SIZES = {
    "a_shape": ("window",),
    "vertical_slash": ("vertical", "slash"),
    "block_sparse": ("blocks",),
    "skip_softmax": ("scale_factor",),
    "dense": (),
}


@pytest.mark.parametrize("length", [4096, 8192, 131_072])
def test_a_rung_is_the_same_share_at_every_length(length: int) -> None:
    short = candidate_grid(2048)
    long = candidate_grid(length)
    assert len(short) == len(long)
    for a, b in zip(short, long, strict=True):
        assert (a.kind, getattr(a, "last_q", None)) == (b.kind, getattr(b, "last_q", None))
        assert getattr(a, "coverage", None) == getattr(b, "coverage", None)
        for name in SIZES[a.kind]:
            per = num_tiles(2048) if name == "blocks" else 2048
            of = num_tiles(length) if name == "blocks" else length
            assert abs(getattr(a, name) / per - getattr(b, name) / of) <= 1 / per


def test_from_tiny_to_dense() -> None:
    found = candidate_grid(8192)
    assert found[-1].kind == "dense" and len(set(found)) == len(found)
    assert {pattern.kind for pattern in found} == set(SIZES) <= set(KINDS)
    a_shapes = [pattern for pattern in found if pattern.kind == "a_shape"]
    assert min(pattern.window for pattern in a_shapes) == 128
    assert {pattern.sink for pattern in a_shapes} == {TILE}
    for kind in ("vertical_slash", "block_sparse"):
        coverages = {
            getattr(pattern, "coverage", None) for pattern in found if pattern.kind == kind
        }
        assert coverages == {None, 0.9, 0.95, 0.98}


@pytest.mark.parametrize("length", [1, 128, 130])
def test_short_prompts_have_as_many(length: int) -> None:
    assert len(candidate_grid(length)) == len(candidate_grid(8192))
