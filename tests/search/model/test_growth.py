"""Candidates have the same rungs at every length, and sizes grow with it by curves whose power is
known."""

from __future__ import annotations

import numpy as np
import pytest

from artifacts import Growth
from kernels.index import TILE, num_tiles
from kernels.patterns import KINDS, Pattern
from search.model.candidates import candidate_grid
from search.model.curves import Curves
from search.model.growth import GROWING, fit
from tests.search.model import made

# What goes with the length, by kind, and in what it counts.
SIZES = {
    "a_shape": ("window",),
    "vertical_slash": ("vertical", "slash"),
    "block_sparse": ("blocks",),
    "skip_softmax": ("scale_factor",),
    "dense": (),
}


@pytest.mark.parametrize("length", [4096, 8192, 131_072])
def test_a_rung_is_the_same_share_at_every_length(length):
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


def test_from_tiny_to_dense():
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
def test_short_prompts_have_as_many(length):
    assert len(candidate_grid(length)) == len(candidate_grid(8192))


SHORT = 4096
LONG = 16_384
LAYERS = 2
HEADS = 3


def curves_of(
    candidates: tuple[Pattern, ...], length: int, power: float, noise: float = 0.0
) -> Curves:
    """Curves of a head whose loss depends on its sizes over length ** power alone."""
    rng = np.random.default_rng(length)

    def change(pattern: Pattern) -> float:
        names = GROWING.get(pattern.kind)
        if names is None:
            return 1e-12
        return 1e9 * sum((getattr(pattern, name) / length**power) ** -1.5 for name in names)

    values = np.array([change(pattern) for pattern in candidates])
    spread = np.exp(noise * rng.normal(size=(LAYERS, HEADS, len(candidates))))
    return made.curves_of(values * spread)


def rung(candidates: tuple[Pattern, ...], length: int, kind: str, share: float) -> int:
    """The place of the rung whose sizes are all that share of the length."""
    per = {"block_sparse": num_tiles(length)}.get(kind, length)
    return next(
        c
        for c, pattern in enumerate(candidates)
        if pattern.kind == kind
        and all(getattr(pattern, name) == per * share for name in GROWING[kind])
        and getattr(pattern, "coverage", None) is None
    )


def fitted(
    power: float,
    kind: str = "a_shape",
    lengths: tuple[int, ...] = (SHORT, LONG),
    noise: float = 0.0,
) -> Growth:
    candidates = {length: candidate_grid(length) for length in lengths}
    curves = {length: curves_of(candidates[length], length, power, noise) for length in lengths}
    chosen = np.full((LAYERS, HEADS), rung(candidates[max(lengths)], max(lengths), kind, 1 / 32))
    growth = fit(curves, candidates, chosen, max(lengths))
    assert growth is not None and growth.length == max(lengths)
    return growth


@pytest.mark.parametrize("kind", list(GROWING))
@pytest.mark.parametrize("power", [0.25, 0.8])
def test_a_known_power_is_found(kind, power):
    powers = fitted(power, kind).powers
    assert set(powers) == {kind}
    assert powers[kind] == pytest.approx(dict.fromkeys(GROWING[kind], power), abs=0.06)


def test_through_noise_and_over_three_lengths():
    powers = fitted(0.5, lengths=(2048, SHORT, LONG), noise=0.1).powers
    assert powers["a_shape"]["window"] == pytest.approx(0.5, abs=0.15)


@pytest.mark.parametrize(("power", "told"), [(-0.1, 0.0), (1.2, 1.0)])
def test_powers_are_clipped(power, told):
    assert fitted(power).powers == {"a_shape": {"window": told}}


DENSE = len(candidate_grid(LONG)) - 1


@pytest.mark.parametrize(
    ("lengths", "chosen"),
    [
        # The largest candidate loses too much at the short length: nothing is guessed.
        ((SHORT, LONG), rung(candidate_grid(LONG), LONG, "a_shape", 3 / 8)),
        # One length tells nothing, nor do heads that are dense, or a layer that is left alone.
        ((LONG,), 0),
        ((SHORT, LONG), [[-1], [DENSE]]),
    ],
)
def test_what_tells_nothing_of_a_power_gives_none(lengths, chosen):
    candidates = {length: candidate_grid(length) for length in lengths}
    curves = {length: curves_of(candidates[length], length, 0.5) for length in lengths}
    assert fit(curves, candidates, np.broadcast_to(chosen, (LAYERS, HEADS)), LONG) is None
