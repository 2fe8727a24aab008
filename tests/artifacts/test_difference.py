"""headwise diff: the changes between two artifacts."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO

import numpy as np
import pytest

import artifacts
from artifacts import AShape, HeadwiseError, load_pair, save
from artifacts.analysis.density import mean_density
from artifacts.cli.arguments import STDOUT
from artifacts.commands.diff import Config, run
from tests.artifacts.conftest import build_every_kind


@pytest.fixture
def pair(tmp_path, make, arrays):
    """write(**changes) -> two files, the second with the changes."""

    def write(more=None, **changes):
        save(make(), tmp_path / "a.yaml", arrays)
        save(make(**changes), tmp_path / "b.yaml", arrays | (more or {}))
        return {"before": tmp_path / "a.yaml", "after": tmp_path / "b.yaml"}

    return write


def diff_of(files, **options):
    status, text = printed(files, as_json=STDOUT, **options)
    data = json.loads(text)
    assert status == (3 if data["differs"] else 0)
    return data


def printed(files, **options):
    """Exit status and text of a diff."""
    with redirect_stdout(StringIO()) as out:
        status = run(Config(**files, **options))
    return status, out.getvalue()


def test_diff_of_equal_content_ignores_times_and_commands(pair, make):
    other = {"command": "other"}
    search = make().search.model_copy(update=other)
    (entry,) = make().evidence.measurements
    evidence = artifacts.Evidence(measurements=(entry.model_copy(update=other),))
    files = pair(created_at="2026-01-01T00:00:00Z", search=search, evidence=evidence)
    assert printed(files) == (0, "no difference\n")
    assert diff_of(files)["sections"] == []


def test_diff_counts_heads_by_kind_and_density(pair, make):
    small = make()
    a, _, c, d = small.prefill.layers[0]
    rows = ((c, d, c, d), None, (a, a, d, "dense"))
    patterns = {name: small.patterns[name] for name in (a, c, d, "dense")}
    prefill = small.prefill.model_copy(update={"layers": rows})
    files = pair(patterns=patterns, prefill=prefill)
    data = diff_of(files, length=8192)
    assert data["heads"]["changed"] == 3 and data["length"] == 8192
    before, after = (mean_density(load_pair(file)[0], 8192) for file in files.values())
    assert data["density"] == [before, after] and before != after
    assert data["sections"] == ["search", "patterns", "prefill"]
    old, new = data["heads"]["kinds"]
    assert old == {"vertical_slash": 4, "a_shape": 2, "block_sparse": 1, "dense": 1}
    assert new == {"vertical_slash": 2, "a_shape": 2, "block_sparse": 3, "dense": 1}
    text = printed(files)[1]
    assert "heads      3 have another pattern\n  block_sparse     1 -> 3\n" in text
    assert "at 4,096 tokens" in text and "a_shape" not in text


def test_diff_compares_patterns_by_size_and_not_by_name(pair, make):
    small = make()
    patterns = dict(small.patterns)
    patterns["nine"] = patterns.pop("bs_9")
    patterns["a_64_512"] = AShape(sink=64, window=640)
    rows = tuple(
        row and tuple("nine" if name == "bs_9" else name for name in row)
        for row in small.prefill.layers
    )
    data = diff_of(
        pair(patterns=patterns, prefill=small.prefill.model_copy(update={"layers": rows}))
    )
    assert data["heads"]["changed"] == 2 and data["sections"] == ["patterns", "prefill"]


def test_diff_names_sections_and_arrays_and_evidence(pair, make):
    decode = build_every_kind()[0].decode.omnikv.model_copy(
        update={"filter_layers": (0,), "dense_layers": ()}
    )
    cache = artifacts.KVCache(policies={"f": artifacts.Full()}, layers=("f",) * 3)
    files = pair(
        more={"similarity.mass": np.ones((3, 3))},
        decode=artifacts.Decode(omnikv=decode),
        kv_cache=cache,
        evidence=artifacts.Evidence(verdict=artifacts.Verdict(proven=True)),
    )
    data = diff_of(files)
    assert data["sections"] == ["decode", "kv_cache", "evidence", "sidecar"]
    assert data["heads"]["changed"] == 0
    assert data["evidence"] == [
        "not proven: no gate has run on its patterns",
        "proven: no loss was measured",
    ]
    text = printed(files)[1]
    assert "sections   decode, kv_cache, evidence, sidecar\nevidence   not proven" in text


def test_diff_of_unlike_shapes_compares_no_heads(pair):
    files = pair()
    artifact, arrays = build_every_kind()
    save(artifact, files["after"], arrays)
    data = diff_of(files)
    assert data["differs"] and data["heads"]["changed"] is None and "model" in data["sections"]
    assert "cannot be compared" in printed(files)[1]


def test_diff_names_a_missing_sidecar(pair, make):
    files = pair(prefill=make().prefill.model_copy(update={"dense_below": 5000}))
    for file in files["before"].parent.glob("b.*.safetensors"):
        file.unlink()
    text = printed(files)[1]
    assert text.startswith("sidecar    ") and "is missing from" in text
    assert "sections   prefill\n" in text


def test_diff_refuses_a_length_below_1(pair):
    with pytest.raises(HeadwiseError, match="--length must be at least 1, got 0"):
        run(Config(**pair(), length=0))
