from __future__ import annotations

import pytest

from artifacts.hashing import canonical_json, content_sha256


def test_canonical_form():
    value = {"b": [1, 1.0, 1e-05, True, None], "a": "é", "": {}}
    assert canonical_json(value) == '{"":{},"a":"é","b":[1,1.0,1e-05,true,null]}'.encode()
    assert canonical_json((1, 2)) == canonical_json([1, 2])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_lacks_are_refused(number):
    with pytest.raises(ValueError, match="JSON"):
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
    ("evidence", 0, "command"),
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
