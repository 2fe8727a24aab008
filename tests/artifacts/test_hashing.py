from __future__ import annotations

import copy

import pytest

from artifacts.store.hashing import canonical_json, content_sha256
from tests.artifacts.conftest import replace_field


def test_canonical_json_sorts_keys_and_formats_numbers():
    value = {"b": [1, 1.0, 1e-05, True, None], "a": "é", "": {}}
    assert canonical_json(value) == '{"":{},"a":"é","b":[1,1,0.00001,true,null]}'.encode()
    value = {"\ue000": 1, "\U00010000": 2}
    assert canonical_json(value) == '{"\U00010000":2,"\ue000":1}'.encode()


@pytest.mark.parametrize(
    "value", [2**53 + 1, -(2**53) - 1, 10**40, float("nan"), float("inf"), -float("inf"), {1: 2}]
)
def test_canonical_json_refuses_values_without_json_form(value):
    with pytest.raises(ValueError, match=r"JSON|JCS|keys"):
        canonical_json([value])


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


def test_content_sha256_covers_all_fields_but_five(make):
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
