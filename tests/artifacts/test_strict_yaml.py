"""The YAML of artifacts: every JSON value comes back exactly, from other readers too; nothing else enters."""

from __future__ import annotations

import math
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from artifacts import ArtifactError
from artifacts.strict_yaml import MAX_DEPTH, MAX_KEYS, MAX_LIST, MAX_TEXT, MAX_VALUES, dump, parse

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
WORDS = """
    null ~ true no Off Y NULL 1e5 12e45 1.5e5 +1 1. .5 0b1 0o17 0X1f _1 1__0 1:30 -12:30:45.6 +.INF .NaN
    1.0e+5 -0 0x1F 010 1_000 12:30:45 2025-01-31 2025-1-1T1:2:3Z .nan .inf - ? : << = !x &x *x #x %x @x
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
SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
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
        ("1.0e-5", 1e-5),
        ("-12.0", -12.0),
        ("3.11.2", "3.11.2"),
        ("12e45x", "12e45x"),
        ("nothing", "nothing"),
        ("'1'", "1"),
        ('"null"', "null"),
        ("null", None),
        ("-.inf", -math.inf),
    ],
)
def test_plain_scalars_that_all_readers_read_alike(text, value):
    assert parse(f"a: {text}") == {"a": value}


UNCLEAR = """
    no No yes ON off y N True FALSE Null NULL << = 1:30 -1:30:00 0x1F 0X1f 0b101 0o17 017 007 00 +1 1_000 1_0.5 1. .5
    -.5 1e5 1e-5 1E5 1.5e5 01.5 +1.5 1_000.0 .NaN .INF +.inf -.Inf 2025-01-31 2025-1-1 2025-01-31T12:00:00Z
"""


@pytest.mark.parametrize("text", UNCLEAR.split())
def test_plain_scalars_that_readers_disagree_about_are_refused(text):
    with pytest.raises(ArtifactError, match=r"line 2: readers disagree about .*: quote a text"):
        parse(f"a: 1\nb: [{text}]")
    with pytest.raises(ArtifactError, match=r"line 1: the key .* needs quotes"):
        parse(f"{text}: 1")
    assert parse(f"'{text}': \"{text}\"") == {text: text}
    assert parse(dump({text: text})) == {text: text} == yaml.safe_load(dump({text: text}))


@pytest.mark.parametrize("text", ["null", "~", "true", "false", "1", "-12", "0.5", "1.0e-05"])
def test_a_key_without_quotes_is_text_to_every_reader(text):
    with pytest.raises(ArtifactError, match=r"line 1: the key .* needs quotes"):
        parse(f"{text}: 1")


@pytest.mark.parametrize("text", [str(2**53 + 1), str(-(2**53) - 1), "9" * 40, "9" * 5000])
def test_numbers_that_readers_round_are_refused(text):
    with pytest.raises(ArtifactError, match=r"is beyond 2\^53, and readers round it"):
        parse(f"a: {text}")


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


BOUNDS = [
    ("[" + "1, " * MAX_LIST + "1]", f"a list of {MAX_LIST + 1} entries ends here"),
    ("{" + "".join(f"k{i}: 1, " for i in range(MAX_KEYS)) + "k: 1}", f"a mapping of {MAX_KEYS + 1} entries ends here"),
    ("[" + ("[" + "1, " * 3999 + "1], ") * (MAX_VALUES // 4000) + "]", f"more than {MAX_VALUES} values"),
    ("'" + "x" * (MAX_TEXT + 1) + "'", f"a text of {MAX_TEXT + 1} characters"),
    ("x" * (MAX_TEXT + 1), f"a text of {MAX_TEXT + 1} characters"),
]


@pytest.mark.parametrize(("text", "why"), BOUNDS, ids=["list", "mapping", "values", "quoted", "plain"])
def test_bounds(text, why):
    with pytest.raises(ArtifactError, match=why):
        parse(text)


def test_what_is_just_within_the_bounds_is_read():
    assert len(parse("[" + "1, " * (MAX_LIST - 1) + "1]")) == MAX_LIST
    assert len(parse("{" + "".join(f"k{i}: 1, " for i in range(MAX_KEYS)) + "}")) == MAX_KEYS
    assert len(parse("x" * MAX_TEXT)) == MAX_TEXT
    assert parse(str(2**53)) == 2**53


@pytest.mark.parametrize("before", ["", "a: 1\n", "a: 1\r", "# a\u2028", "\ufeff", "\x85"])
def test_no_directives(before):
    with pytest.raises(ArtifactError, match="a line that starts with % is not allowed"):
        parse(f"{before}%YAML 1.1\n---\na: 1")


def test_percent_signs_within_lines_are_text():
    assert parse("a: 5%\nb: '%'\nc: x %TAG") == {"a": "5%", "b": "%", "c": "x %TAG"}


def test_without_the_c_parser_the_same(monkeypatch, saved):
    import artifacts.strict_yaml as strict_yaml

    text = saved.read_text()
    fast = parse(text)
    monkeypatch.setattr(strict_yaml, "_Loader", yaml.SafeLoader)
    assert parse(text) == fast
