"""The YAML of artifacts: every JSON value comes back exactly, and nothing else enters."""

from __future__ import annotations

import re

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from artifacts import ArtifactError
from artifacts.store.strict_yaml import MAX_DEPTH, MAX_VALUES, dump, parse

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
WORDS = """
    null ~ true no Off Y NULL 1e5 12e45 1.5e5 +1 1. .5 0b1 0o17 0X1f _1 1__0 1:30 -12:30:45.6 +.INF
    .NaN
    1.0e+5 -0 0x1F 010 1_000 12:30:45 2025-01-31 2025-1-1T1:2:3Z .nan .inf - ? : << = !x &x *x #x
    %x @x
"""
ODD = ["", " a", "a ", "a: b", "a #b", "a\nb", "a\r\nb", "é", "😀", *"\t\x00\x7f\x85\u2028\ufeff"]
ALL_TRICKY = [*WORDS.split(), *ODD]
TRICKY = st.sampled_from(ALL_TRICKY)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    SCALARS | TEXT | TRICKY,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT | TRICKY, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=50)
@given(st.dictionaries(TEXT | TRICKY, VALUES, max_size=5))
@example({text: text for text in ALL_TRICKY})
def test_dump_and_parse_round_trip_every_value(fields):
    text = dump(fields)
    back = parse(text)
    assert back == fields
    assert repr(back) == repr(fields), "1, 1.0 and true are equal but not the same"
    # Another YAML reader must not see something else.
    assert repr(yaml.safe_load(text)) == repr(fields)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.0e-5", 1e-5),
        ("-12.0", -12.0),
        ("3.11.2", "3.11.2"),
        ("12e45x", "12e45x"),
        ("nothing", "nothing"),
        ("'1'", "1"),
        ('"null"', "null"),
        ("null", None),
    ],
)
def test_parse_accepts_unambiguous_plain_scalars(text, value):
    assert parse(f"a: {text}") == {"a": value}


UNCLEAR = """
    no No yes ON off y N True FALSE Null NULL << = 1:30 -1:30:00 0x1F 0X1f 0b101 0o17 017 007 00 +1
    1_000 1_0.5 1. .5
    -.5 1e5 1e-5 1E5 1.5e5 01.5 +1.5 1_000.0 .NaN .INF +.inf -.Inf .nan .inf 2025-01-31
    2025-01-31T12:00:00Z
"""
BEYOND = f"{2**53 + 1} {-(2**53) - 1} {'9' * 40} {'9' * 5000}"


@pytest.mark.parametrize("text", UNCLEAR.split())
def test_parse_refuses_ambiguous_plain_scalars(text):
    with pytest.raises(ArtifactError, match=r"line 2: readers disagree about .*: quote a text"):
        parse(f"a: 1\nb: [{text}]")
    assert parse(f"'{text}': \"{text}\"") == {text: text}
    assert parse(dump({text: text})) == {text: text} == yaml.safe_load(dump({text: text}))


@pytest.mark.parametrize(
    "text", [*UNCLEAR.split(), "null", "~", "true", "false", "1", "-12", "0.5", "1.0e-05"]
)
def test_parse_refuses_keys_that_are_not_text(text):
    with pytest.raises(ArtifactError, match="line 1: a key must be text"):
        parse(f"{text}: 1")


@pytest.mark.parametrize("text", BEYOND.split(), ids=len)
def test_parse_refuses_numbers_that_readers_round(text):
    with pytest.raises(ArtifactError, match="readers disagree about"):
        parse(f"a: {text}")
    assert parse(str(2**53)) == 2**53


TAGGED = ("a: &x 1", "a: &x [1]", "a: *x", "&x a: 1", "a: !!int 1", "a: !mine {b: 1}", "a: ! x")
MANY = "more than 100000 values, or nested more than 32 deep"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: 1\nb: {x: 1, x: 2}", "line 2: the key 'x' appears twice"),
        *((text, "line 1: anchors, aliases and tags") for text in TAGGED),
        ("---\na: 1\n---\nb: 2", "line 3: not valid YAML, but found another document"),
        ("? {a: 1}\n: 2", "line 1: a key must be text"),
        ("a: 'x", "not valid YAML"),
        ("a: b: c", "line 1: not valid YAML"),
        ("", "the file is empty"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), f"line 1: {MANY}"),
        ("[" * 10**6, f"line 1: {MANY}"),
        ("- " * 10**6, f"line 1: {MANY}"),
        ("[" + "1, " * MAX_VALUES + "1]", f"line 1: {MANY}"),
        ("".join(f"%TAG !a{i}! x\n" for i in range(10**5)), "directives (%TAG) are not allowed"),
        ("".join(f"\x85%TAG !a{i}! x" for i in range(10**5)), "directives (%TAG) are not allowed"),
    ],
    ids=range(19),
)
def test_parse_refuses_unsafe_yaml(text, why):
    with pytest.raises(ArtifactError, match=re.escape(why)):
        parse(text)


def test_parse_accepts_the_largest_allowed_values():
    assert len(parse("[" + "1, " * (MAX_VALUES - 2) + "1]")) == MAX_VALUES - 1
    parse("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    parse("[" + "[], " * MAX_DEPTH + "[]]")


def test_parse_accepts_percent_signs_inside_lines():
    assert parse("a: 5%\nb: '%'\nc: x %TAG") == {"a": "5%", "b": "%", "c": "x %TAG"}
