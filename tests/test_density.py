"""The density of a pattern, counted from data alone, equals that of the kernels' index."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

import artifacts
from artifacts.analysis.density import LONGEST, densities, density, mean_density
from artifacts.schema.fields import LARGEST
from kernels.patterns import Inputs, LayerPlan, make
from kernels.patterns.last_queries import Masses
from kernels.patterns.vertical_slash import Lines, VerticalSlash
from tests.artifacts.conftest import build, build_every_kind

size = st.integers(1, 1500)
FIXED = {
    "dense": {},
    "a_shape": {"sink": size, "window": size},
    "block_sparse": {"blocks": st.integers(1, 30)},
}
ADAPTER: TypeAdapter[Any] = TypeAdapter(artifacts.Pattern)


def by_kernels(kind: str, length: int, tail: int, **sizes: Any) -> float:
    q, k = torch.randn(1, 1, length, 8), torch.randn(1, 1, length, 8)
    index = LayerPlan([make(kind, **sizes)], 1, dense_tail=tail).build(q, k)
    return float(index.computed_tiles()[0, 0]) / index.causal_tiles


@pytest.mark.parametrize("kind", FIXED)
@settings(deadline=None, max_examples=40)
@given(data=st.data(), length=st.integers(1, 1500), tail=st.sampled_from([0, 1, 64, 200]))
def test_density_equals_the_count_of_the_kernels(kind, data, length, tail):
    sizes = {name: data.draw(strategy) for name, strategy in FIXED[kind].items()}
    pattern = ADAPTER.validate_python({"kind": kind, **sizes})
    assert density(pattern, length, dense_tail=tail) == by_kernels(kind, length, tail, **sizes)


def test_density_of_vertical_slash_is_of_near_diagonals():
    length, vertical, slash = 1024, 200, 300
    nearest = torch.arange(length, 0, -1.0)[None, None]
    inputs = Inputs([0], torch.zeros(1, 1, length, 8), torch.zeros(1, 1, length, 8), scale=1.0)
    lines = Lines.read(inputs, masses=Masses(nearest, nearest))
    index = lines([VerticalSlash(vertical=vertical, slash=slash)])
    counted = density(artifacts.VerticalSlash(vertical=vertical, slash=slash), length)
    assert counted == float(index.computed_tiles()[0, 0]) / index.causal_tiles


def test_density_of_a_million_tokens():
    n = (1 << 20) // 64
    window = sum(n - offset for offset in range(65))
    sink = sum(n - 65 - group for group in range(16))
    counted = density(artifacts.AShape(sink=1024, window=4096), 1 << 20)
    assert counted == (window + sink) / (n * (n + 1) // 2)


def test_density_of_the_largest_sizes_is_bounded():
    """Whatever a file says, counting ends: in no time, and within memory."""
    for pattern in (
        artifacts.AShape(sink=LARGEST, window=LARGEST),
        artifacts.VerticalSlash(vertical=LARGEST, slash=LARGEST),
        artifacts.AShape(sink=LARGEST, window=1),
        artifacts.BlockSparse(blocks=LARGEST),
    ):
        assert 0 < (density(pattern, 1 << 20) or 0) <= 1
        assert density(pattern, 1 << 20, dense_tail=10**30) == 1
        assert density(pattern, LONGEST + 1) is None


def test_densities_of_an_artifact_by_row():
    artifact, _ = build_every_kind()
    rows = densities(artifact, 8192)
    assert rows[1] is None and rows[4] is not None and rows[4][:3] == [1.0, 1.0, None]
    assert rows[2] is not None and rows[2][0] == 1.0 and None not in rows[2]
    assert mean_density(artifact, 4095) == 1.0
    flat = [value for row in densities(build(), 4096) for value in row or () if value is not None]
    assert len(flat) == 8 and mean_density(build(), 4096) == pytest.approx(sum(flat) / 8)


def test_mean_density_uses_sizes_at_the_length():
    """A size that grows with the prompt keeps its density."""
    rows: tuple[tuple[str, ...] | None, ...] = (("a_64_16384",) * 4, None, ("a_64_16384",) * 4)
    prefill = artifacts.Prefill(dense_below=0, length=1 << 15, layers=rows)
    pattern = artifacts.AShape(sink=64, window=1 << 14)
    artifact = build(patterns={"a_64_16384": pattern}, prefill=prefill)
    result = mean_density(artifact, 1 << 18)
    assert result == pytest.approx(density(artifacts.AShape(sink=64, window=1 << 17), 1 << 18))
    assert result == pytest.approx(mean_density(artifact, 1 << 15), abs=0.02)
