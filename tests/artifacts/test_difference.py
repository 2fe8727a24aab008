"""diff: what changed, and only that."""

from __future__ import annotations

import json

import numpy as np
import pytest

import artifacts
from artifacts import AShape, load_pair, save
from artifacts.analysis.density import mean_density
from artifacts.analysis.difference import compare
from artifacts.cli.arguments import STDOUT
from artifacts.commands.diff import Config, run
from tests.artifacts.conftest import build_arrays, build_every_kind


@pytest.fixture
def pair(tmp_path, make, arrays):
    """write(**changes) -> two files, the second with the changes."""

    def write(more=None, **changes):
        save(make(), tmp_path / "a.yaml", arrays)
        save(make(**changes), tmp_path / "b.yaml", arrays | (more or {}))
        return {"before": tmp_path / "a.yaml", "after": tmp_path / "b.yaml"}

    return write


def found(files, **options):
    outcome = run(Config(**files, as_json=STDOUT, **options))
    data = json.loads(outcome.text)
    assert data["differs"] == bool(outcome.status)
    return data


def test_the_same(pair, make):
    files = pair(
        created_at="2026-01-01T00:00:00Z",
        search=make().search.model_copy(update={"command": "other"}),
    )
    outcome = run(Config(**files))
    assert (outcome.status, outcome.text) == (0, "no difference\n")
    assert not found(files)["fields"]


def changed_heads(make):
    small = make()
    a, _, c, d = small.prefill.layers[0]
    rows = ((c, d, c, d), None, (a, a, d, "dense"))
    patterns = {
        name: pattern for name, pattern in small.patterns.items() if name in {a, c, d, "dense"}
    }
    return {"patterns": patterns, "prefill": small.prefill.model_copy(update={"layers": rows})}


def test_heads_and_what_it_does_to_density(pair, make):
    files = pair(**changed_heads(make))
    data = found(files, length=8192)
    assert {(change["before"], change["after"]): change["where"] for change in data["heads"]} == {
        ("vs_100_1800", "a_64_512"): {"0": [0]},
        ("vs_30_2048_q32", "bs_9"): {"0": [1]},
        ("a_64_512", "bs_9"): {"2": [2]},
    }
    assert data["total"] == 12 and data["length"] == 8192
    before, after = (mean_density(load_pair(file)[0], 8192) for file in files.values())
    assert data["density"] == [before, after] and before != after
    text = run(Config(**files)).text
    assert "heads      3 of 12 have another pattern\n  vs_100_1800 -> a_64_512: 1: 0 (0)\n" in text
    assert "at 4,096 tokens" in text and "field      patterns.vs_30_2048_q32: {'kind'" in text


def test_a_new_name_is_no_new_pattern_and_a_new_size_is_one(pair, make):
    small = make()
    patterns = dict(small.patterns)
    patterns["nine"] = patterns.pop("bs_9")
    patterns["a_64_512"] = AShape(sink=64, window=640)
    rows = tuple(
        row and tuple("nine" if name == "bs_9" else name for name in row)
        for row in small.prefill.layers
    )
    data = found(pair(patterns=patterns, prefill=small.prefill.model_copy(update={"layers": rows})))
    where = {"0": [2], "2": [2]}
    assert data["heads"] == [{"before": "a_64_512", "after": "a_64_512", "where": where}]


def test_sections_fields_arrays(pair, make):
    decode = build_every_kind()[0].decode.omnikv.model_copy(
        update={"filter_layers": (0,), "dense_layers": ()}
    )
    recall = np.array([[1.0] * 4, [np.nan] * 4, [1.0] * 4])
    data = found(
        pair(
            more={"similarity.mass": np.ones((3, 3)), "chosen.recall": recall},
            decode=artifacts.Decode(omnikv=decode),
            evidence=artifacts.Evidence(),
            prefill=make().prefill.model_copy(update={"dense_below": 5000}),
        )
    )
    assert (data["added"], data["removed"]) == (["decode"], ["evidence.measurements"])
    assert data["fields"] == [{"field": "prefill.dense_below", "before": 4096, "after": 5000}]
    arrays = data["arrays"]
    assert (arrays["added"], arrays["removed"]) == (["similarity.mass"], [])
    assert arrays["changed"] == ["chosen.recall"]
    assert data["heads"] == [] and data["recall"] == [pytest.approx(0.75), 1.0]


def test_growth_front_and_costs(make):
    other, arrays = build_every_kind()
    plain = make(
        model=other.model,
        patterns=other.patterns,
        prefill=other.prefill.model_copy(update={"growth": None, "front": None}),
    )
    found = compare(plain, other, {}, arrays, length=16_384)
    sections = "prefill.growth prefill.front costs decode kv_cache evidence.tasks"
    assert set(found.added) == set(sections.split())
    assert "prefill.growth.length" not in [change.field for change in found.fields]
    assert found.heads == () and found.density[0] != found.density[1]
    front = other.prefill.front.model_copy(update={"dense_cost": 9.0})
    prefill = other.prefill.model_copy(update={"front": front})
    changed = other.model_copy(update={"prefill": prefill})
    (change,) = compare(other, changed, arrays, arrays).fields
    assert (change.field, change.before, change.after) == ("prefill.front.dense_cost", 2.0, 9.0)
    again = other.costs[0].model_copy(update={"command": "another day"})
    assert not compare(other, other.model_copy(update={"costs": (again,)}), arrays, arrays)


def test_kv_heads(make):
    policies = {"f": artifacts.Full(), "s": artifacts.Streaming(sinks=4, window=100)}
    a = make(kv_cache=artifacts.KVCache(policies=policies, layers=("f", "s", ("f", "s"))))
    b = make(kv_cache=artifacts.KVCache(policies=policies, layers=(("f", "s"), "s", ("f", "s"))))
    (change,) = compare(a, b, {}, {}).kv_heads
    assert (change.before, change.after, change.where) == ("f", "s", {0: (1,)})
    assert sum(change.heads for change in compare(a, make(), {}, {}).kv_heads) == 6


def test_unlike_shapes(make):
    other, arrays = build_every_kind()
    found = compare(make(), other, build_arrays(), arrays)
    assert found and found.heads is None
    changes = {change.field: (change.before, change.after) for change in found.fields}
    assert changes["model.num_layers"] == (3, 5)


def test_a_missing_sidecar_is_said(pair, make):
    files = pair(prefill=make().prefill.model_copy(update={"dense_below": 5000}))
    for file in files["before"].parent.glob("b.*.safetensors"):
        file.unlink()
    text = run(Config(**files)).text
    assert text.startswith("sidecar    ") and "is missing from" in text
    assert "dense_below: 4096 -> 5000" in text
