"""Growth of sizes with the length, from curves whose power is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from artifacts import Growth
from kernels.index import num_tiles
from kernels.patterns import Pattern
from search.model.candidates import candidate_grid
from search.model.curves import Curves
from search.model.growth import GROWING, fit

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
    found = np.broadcast_to(values, spread.shape) * spread
    zero = np.zeros_like(found)
    squared = {"text_fisher": zero, "first_order": zero, "answer_fisher": zero}
    return Curves(
        change=found,
        error=found,
        recall=found,
        tiles=found,
        **squared,
        text_tokens=0,
        texts=0,
        asked=0,
    )


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
    share: float = 1 / 32,
) -> Growth:
    candidates = {length: candidate_grid(length) for length in lengths}
    curves = {length: curves_of(candidates[length], length, power, noise) for length in lengths}
    chosen = np.full((LAYERS, HEADS), rung(candidates[max(lengths)], max(lengths), kind, share))
    growth = fit(curves, candidates, chosen, max(lengths))
    assert growth is not None and growth.length == max(lengths)
    return growth


@pytest.mark.parametrize("kind", list(GROWING))
@pytest.mark.parametrize("power", [0.25, 0.8])
def test_a_known_power_is_found(kind: str, power: float) -> None:
    powers = fitted(power, kind).powers
    assert set(powers) == {kind}
    assert powers[kind] == pytest.approx(dict.fromkeys(GROWING[kind], power), abs=0.06)


def test_through_noise_and_over_three_lengths() -> None:
    powers = fitted(0.5, lengths=(2048, SHORT, LONG), noise=0.1).powers
    assert powers["a_shape"]["window"] == pytest.approx(0.5, abs=0.15)


@pytest.mark.parametrize(("power", "told"), [(-0.1, 0.0), (1.2, 1.0)])
def test_powers_are_clipped(power: float, told: float) -> None:
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
def test_what_tells_nothing_of_a_power_gives_none(lengths: tuple[int, ...], chosen: Any) -> None:
    candidates = {length: candidate_grid(length) for length in lengths}
    curves = {length: curves_of(candidates[length], length, 0.5) for length in lengths}
    assert fit(curves, candidates, np.broadcast_to(chosen, (LAYERS, HEADS)), LONG) is None
