"""The YAML of artifacts: every JSON value comes back exactly, from other readers too; nothing else enters."""

from __future__ import annotations

import math
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from artifacts import ArtifactError
from artifacts.strict_yaml import MAX_DEPTH, dump, parse

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
WORDS = """
    null ~ true no Off 1e5 12e45
    1.0e+5 -0 0x1F 010 1_000 12:30:45 2025-01-31 .nan .inf - ? : << = !x &x *x #x %x @x
"""
ODD = [
    "",
    " a",
    "a ",
    "a: b",
    "a #b",
    "a\nb",
    "a\r\nb",
    "\t",
    "\x00",
    "\x7f",
    "\x85",
    "\u2028",
    "\ufeff",
    "é",
    "😀",
]
TRICKY = st.sampled_from([*WORDS.split(), *ODD])
SCALARS = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS | TEXT | TRICKY,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT | TRICKY, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(TEXT | TRICKY, VALUES, max_size=5))
def test_every_value_comes_back(fields):
    text = dump(fields)
    back = parse(text)
    assert back == fields
    assert repr(back) == repr(fields), "1, 1.0 and true are equal but not the same"
    # Another YAML reader must not see something else.
    assert repr(yaml.safe_load(text)) == repr(fields)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("-12.", -12.0),
        ("007", 7.0),
        ("no", "no"),
        ("2025-01-31", "2025-01-31"),
        ("0x1F", "0x1F"),
        ("1_000", "1_000"),
        ("'1'", "1"),
        ('"null"', "null"),
        ("null", None),
        ("-.inf", -math.inf),
    ],
)
def test_plain_scalars_follow_yaml_1_2(text, value):
    assert parse(f"a: {text}") == {"a": value}


def test_shared_parts_are_written_out():
    row = [1, 2]
    assert "&" not in dump({"a": row, "b": row})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: 1\nb: {x: 1, x: 2}", "line 2: the key 'x' is given twice"),
        ("a: &x 1", "line 1: anchor &x"),
        ("a: &x [1]", "line 1: anchor &x"),
        ("a: *x", "line 1: alias *x"),
        ("&x a: 1", "line 1: anchor &x"),
        ("a: !!int 1", "line 1: tag "),
        ("a: !mine {b: 1}", "line 1: tag '!mine'"),
        ("---\na: 1\n---\nb: 2", "line 3: a second document"),
        ("? {a: 1}\n: 2", "line 1: a key must be plain text"),
        ("a: 'x", "not valid YAML"),
        ("a: b: c", "line 1: not valid YAML"),
    ],
)
def test_refused(text, why):
    with pytest.raises(ArtifactError, match=re.escape(why)):
        parse(text)


def test_depth():
    parse("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    with pytest.raises(ArtifactError, match="nested more than"):
        parse("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))


def test_without_the_c_parser_the_same(monkeypatch, saved):
    import artifacts.strict_yaml as strict_yaml

    text = saved.read_text()
    fast = parse(text)
    monkeypatch.setattr(strict_yaml, "_Loader", yaml.SafeLoader)
    assert parse(text) == fast
