from __future__ import annotations

import copy
import struct

import pytest
import rfc8785
import yaml
from hypothesis import given
from hypothesis import strategies as st

from artifacts.store.hashing import canonical_json, content_sha256
from tests.artifacts.conftest import hash_by_other_tools


def test_canonical_form():
    value = {"b": [1, 1.0, 1e-05, True, None], "a": "é", "": {}}
    assert canonical_json(value) == '{"":{},"a":"é","b":[1,1,0.00001,true,null]}'.encode()
    assert canonical_json((1, 2)) == canonical_json([1, 2])


def test_keys_are_sorted_by_utf_16():
    # U+10000 is written as two units from D800 on, which come before E000.
    value = {"\ue000": 1, "\U00010000": 2}
    assert canonical_json(value) == rfc8785.dumps(value) == '{"\U00010000":2,"\ue000":1}'.encode()


WHOLE = st.integers(-(2**53) + 1, 2**53 - 1)
# Every float there is, not only those that are likely.
FLOATS = (
    st.binary(min_size=8, max_size=8)
    .map(lambda data: struct.unpack("<d", data)[0])
    .filter(lambda x: x - x == 0)
)
NUMBERS = (
    WHOLE
    | FLOATS
    | st.floats(-1e22, 1e22)
    | st.sampled_from([-0.0, 1e21, 1e-6, 1e-7, 123456789012345680000.0])
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
)


@given(VALUES)
def test_another_implementation_of_rfc_8785_writes_the_same(value):
    assert canonical_json(value) == rfc8785.dumps(value)


def test_the_hash_of_a_file_by_other_tools_alone(saved):
    """As docs/artifact.md says it, with PyYAML and rfc8785."""
    fields = yaml.safe_load(saved.read_text())
    assert fields["content_sha256"] == hash_by_other_tools(copy.deepcopy(fields))


@pytest.mark.parametrize("number", [2**53 + 1, -(2**53) - 1, 10**40])
def test_numbers_that_a_float_rounds_are_refused(number):
    with pytest.raises(ValueError, match=r"at most 2\^53"):
        canonical_json({"a": [number]})


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_lacks_are_refused(number):
    with pytest.raises(ValueError, match="must be finite"):
        canonical_json({"a": [number]})


def test_keys_are_text():
    with pytest.raises(TypeError, match="keys must be text, got 1"):
        canonical_json([{1: 2}])


def fields(make):
    return make().model_dump(mode="json")


LEFT_OUT = [
    ("content_sha256",),
    ("created_at",),
    ("search", "command"),
    ("evidence", "measurements", 0, "command"),
    ("sidecar", "file"),
]


def every_leaf(value, path=()):
    if isinstance(value, dict | list) and value:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from every_leaf(inner, (*path, key))
    else:
        yield path


def test_every_field_counts_but_five(make):
    whole = fields(make) | {"sidecar": {"file": "a.safetensors", "sha256": "d" * 64}}
    base = content_sha256(whole)
    without_effect = []
    for path in every_leaf(whole):
        changed = canonical_copy(whole)
        target = changed
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = "another value"
        if content_sha256(changed) == base:
            without_effect.append(path)
    assert sorted(map(str, without_effect)) == sorted(map(str, LEFT_OUT))


def canonical_copy(value):
    import json

    return json.loads(canonical_json(value))


def test_key_order_does_not_count(make):
    whole = fields(make)
    assert content_sha256(dict(reversed(whole.items()))) == content_sha256(whole)
