"""A pattern is data in artifacts and code in kernels: both know the same kinds and sizes."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import artifacts.schema.patterns as data
import kernels.patterns as code

# The small ones shrink to what must stay one.
SIZES = st.integers(1, 9) | st.integers(1, 10_000)
LENGTHS = st.integers(1, 640) | st.integers(1, 2**24)


def sizes_in_code(cls: type[code.Pattern]) -> dict[str, Any]:
    return {
        field.name: None if field.default is MISSING else field.default for field in fields(cls)
    }


def sizes_in_data(cls: type[data.Record]) -> dict[str, Any]:
    named = {name: field for name, field in cls.model_fields.items() if name != "kind"}
    return {name: None if field.is_required() else field.default for name, field in named.items()}


def test_kinds_have_the_same_sizes_and_defaults_in_both_packages():
    in_data = {kind: sizes_in_data(cls) for kind, cls in data.RECORDS.items()}
    in_code = {kind: sizes_in_code(cls) for kind, cls in code.KINDS.items()}
    assert in_data == in_code


def test_kinds_have_distinct_colors_and_letters():
    records = data.RECORDS.values()
    assert len({cls.letter for cls in records}) == len(records)
    assert len({cls.color for cls in records}) == len(records)


@given(st.data(), st.sampled_from(sorted(data.RECORDS)), LENGTHS, LENGTHS)
def test_grown_sizes_are_the_same_in_both_packages(drawn, kind, searched, length):
    record_class = data.RECORDS[kind]
    assert record_class.growing == code.KINDS[kind].growing
    sizes = {
        name: drawn.draw(SIZES)
        for name, field in record_class.model_fields.items()
        if field.annotation is int and name != "last_q"
    }
    fixed = {}
    if kind == "vertical_slash":
        fixed = {"last_q": 32, "coverage": 0.9}
    if kind == "skip_softmax":
        fixed = {"scale_factor": 3.0}
    record = record_class(**sizes, **fixed)
    assert data.grown(record, None, length) == record
    plan = code.LayerPlan([code.make(**record.model_dump())], 1, length=searched)
    grown = data.grown(record, searched, length)
    assert code.make(**grown.model_dump()) == plan.at(length).patterns[0]
    if length <= searched:
        assert grown == record
