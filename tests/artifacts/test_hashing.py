from __future__ import annotations

import copy
import struct

import pytest
import rfc8785
from hypothesis import example, given, settings
from hypothesis import strategies as st

from artifacts.store.hashing import canonical_json, content_sha256
from tests.artifacts.conftest import replace_field

WHOLE = st.integers(-(2**53) + 1, 2**53 - 1)
# Every float there is, not only those that are likely.
FLOATS = (
    st.binary(min_size=8, max_size=8)
    .map(lambda data: struct.unpack("<d", data)[0])
    .filter(lambda x: x - x == 0)
)
# Where the layout of a number changes.
EDGES = [-0.0, 1e21, 1e-6, 1e-7, 123456789012345680000.0]
NUMBERS = WHOLE | FLOATS | st.floats(-1e22, 1e22) | st.sampled_from(EDGES)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
)


@settings(max_examples=40)
@given(VALUES)
@example(EDGES)
@example({"b": [1, 1.0, 1e-05, True, None], "a": "é", "": {}})
@example((1, 2))
# U+10000 is written as two units from D800 on, which come before E000.
@example({"\ue000": 1, "\U00010000": 2})
def test_another_implementation_of_rfc_8785_writes_the_same(value):
    assert canonical_json(value) == rfc8785.dumps(value)


def test_canonical_form():
    value = {"b": [1, 1.0, 1e-05, True, None], "a": "é", "": {}}
    assert canonical_json(value) == '{"":{},"a":"é","b":[1,1,0.00001,true,null]}'.encode()
    value = {"\ue000": 1, "\U00010000": 2}
    assert canonical_json(value) == '{"\U00010000":2,"\ue000":1}'.encode()


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        *(([n], ValueError, r"at most 2\^53") for n in (2**53 + 1, -(2**53) - 1, 10**40)),
        *(([float(n)], ValueError, "must be finite") for n in ("nan", "inf", "-inf")),
        ([{1: 2}], TypeError, "keys must be text, got 1"),
    ],
)
def test_what_json_cannot_say_is_refused(value, error, says):
    with pytest.raises(error, match=says):
        canonical_json(value)


LEFT_OUT = {
    "content_sha256",
    "created_at",
    "search.command",
    "evidence.measurements.0.command",
    "sidecar.file",
}


def every_leaf(value, path=()):
    if isinstance(value, dict | list) and value:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from every_leaf(inner, (*path, key))
    else:
        yield path


def test_every_field_counts_but_five_and_their_order_does_not(make):
    sidecar = {"file": "a.safetensors", "sha256": "d" * 64}
    whole = make().model_dump(mode="json") | {"sidecar": sidecar}
    without_effect = set()
    for path in every_leaf(whole):
        changed = copy.deepcopy(whole)
        replace_field(changed, "/".join(map(str, path)), "another value")
        if content_sha256(changed) == content_sha256(whole):
            without_effect.add(".".join(map(str, path)))
    assert without_effect == LEFT_OUT
    assert content_sha256(dict(reversed(whole.items()))) == content_sha256(whole)
