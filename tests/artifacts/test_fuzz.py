"""A short run of the fuzzer, and that it finds what it is there to find; `make fuzz N=200000` is a long one."""

from __future__ import annotations

import pytest

from tests.artifacts import fuzz


def test_mutants_are_refused_in_one_line_or_are_what_their_hashes_say():
    seen = fuzz.run(1_500)
    assert sum(seen.values()) >= 1_500
    # Mutants that all end in the same way would be poor ones.
    for kind in ("loaded", "content_sha256", "sidecar.sha256", "sidecar.file", "a field", "not valid YAML"):
        assert seen[kind] > 10, seen


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("artifacts.store._check_content", "the content's hash is another"),
        ("artifacts.sidecar._compare", "the sidecar's hash is another"),
    ],
)
def test_the_fuzzer_sees_a_reader_that_looks_away(monkeypatch, name, expected):
    monkeypatch.setattr(name, lambda *_: None)
    with pytest.raises(AssertionError, match=expected):
        fuzz.run(2_000, shrink=False)


def test_the_fuzzer_sees_a_crash(monkeypatch):
    # A reader that takes the layout for granted.
    monkeypatch.setattr("artifacts.store.to_artifact", lambda fields: fields["model"]["name"].encode())
    with pytest.raises((AttributeError, KeyError, TypeError)):
        fuzz.run(2_000, shrink=False)
