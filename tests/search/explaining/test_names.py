"""Names of patterns and of families, read back."""

from __future__ import annotations

import pytest

import artifacts as a
from artifacts import HeadwiseError
from search.explaining.names import kind_of, pattern_of, sized

PATTERNS = [
    a.Dense(),
    a.AShape(sink=1, window=2),
    a.TriShape(sink=1, window=2, last=3),
    a.Dilated(sink=1, window=2, dilation=3),
    a.Strided(sink=1, window=2, stride=3),
    a.VerticalSlash(vertical=3, slash=4),
    a.VerticalSlash(vertical=3, slash=4, last_q=32, coverage=0.995),
    a.BlockSparse(blocks=3, coverage=0.29),
    a.MemoryUnits(sink=1, window=2, units=3),
    a.MemoryUnits(sink=1, window=2, units=3, representatives=8),
    a.SkipSoftmax(scale_factor=4),
    a.SkipSoftmax(scale_factor=32.7681),
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=a.pattern_name)
def test_a_name_tells_its_pattern(pattern: a.Pattern) -> None:
    assert pattern_of(a.pattern_name(pattern)) == pattern
    assert kind_of(a.pattern_name(pattern)) == pattern.kind


def test_coverages_come_back_exactly() -> None:
    for thousandths in range(1, 1000):
        pattern = a.BlockSparse(blocks=1, coverage=thousandths / 1000)
        assert pattern_of(a.pattern_name(pattern)) == pattern


def test_every_kind_has_a_name_that_is_read() -> None:
    assert {pattern.kind for pattern in PATTERNS} | {"static"} == set(a.patterns.KINDS)
    assert kind_of(a.pattern_name(a.Static(indices="some"))) == "static"


@pytest.mark.parametrize(
    "name", ["", "vs", "vs_1", "vs_1_2_3", "vs_01_2", "xy_1_2", "vs_1_2_z3", "a_0_4", "dense_1", "static_x"]
)
def test_what_names_no_pattern_is_refused(name: str) -> None:
    with pytest.raises(HeadwiseError, match="is not the name of a pattern"):
        pattern_of(name)


def test_a_family_tells_the_kind_and_the_head_the_sizes() -> None:
    assert kind_of("vertical_slash_30_2048") == "vertical_slash"
    assert sized("a_shape_1024_4096", {"sink": 80, "window": 321}) == a.AShape(sink=80, window=321)
