"""merge: each section from where it was asked for, of one model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import artifacts
from artifacts import ArtifactError, HeadwiseError, load_pair, save, update
from artifacts.cli.arguments import STDOUT
from artifacts.commands import merge as verb
from artifacts.commands.merge import Config, run
from tests.artifacts.conftest import build, build_every_kind

POLICIES = {"f": artifacts.Full(), "s": artifacts.Streaming(sinks=4, window=100)}


def omnikv(**changes):
    section = build_every_kind()[0].decode.omnikv
    return artifacts.Decode(
        omnikv=section.model_copy(update={"filter_layers": (0,), "dense_layers": ()} | changes)
    )


@pytest.fixture
def files(tmp_path, arrays):
    cache = artifacts.KVCache(policies=POLICIES, layers=("f", "s", ("f", "s")))
    with_decode = build(decode=omnikv(), evidence=artifacts.Evidence())
    more = {"chosen.recall": np.zeros((3, 4)), "similarity.mass": np.eye(3)}
    save(build(), tmp_path / "a.yaml", arrays)
    save(with_decode, tmp_path / "b.yaml", more)
    save(build(kv_cache=cache), tmp_path / "c.yaml", {"imported.full_attention": np.eye(3, 2)})
    return {name: tmp_path / f"{name}.yaml" for name in ("a", "b", "c", "out")}


def test_prefill_of_a_decode_of_b(files, arrays):
    outcome = run(Config(file=files["a"], decode=str(files["b"]), out=files["out"]))
    merged, beside = load_pair(files["out"])
    a, b = (load_pair(files[name])[0] for name in "ab")
    assert merged.prefill == a.prefill and merged.search == a.search and merged.decode == b.decode
    assert merged.evidence == a.evidence and merged.kv_cache is None
    assert beside.keys() == arrays.keys() | {"similarity.mass"}
    np.testing.assert_array_equal(beside["chosen.recall"], arrays["chosen.recall"])
    assert (
        outcome.text.splitlines()[2] == f"  decode    {files['b']}"
        and "measure the whole again" in outcome.text
    )


def test_prefill_of_b_decode_left_out_kv_cache_of_c(files):
    config = Config(
        file=files["c"], prefill=files["b"], decode="none", out=files["out"], as_json=STDOUT
    )
    data = json.loads(run(config).text)
    merged, beside = load_pair(files["out"])
    assert data["sections"] == {
        "prefill": str(files["b"]),
        "decode": None,
        "kv_cache": str(files["c"]),
    }
    assert merged.decode is None and merged.kv_cache.policies == POLICIES
    assert beside.keys() == {"chosen.recall", "imported.full_attention"}
    assert data["content_sha256"] == merged.content_sha256


def test_cost_tables_go_with_the_search(tmp_path):
    artifact, beside = build_every_kind()
    save(artifact, tmp_path / "a.yaml", beside)
    prefill = artifacts.Prefill(dense_below=0, layers=(None,) * 5)
    save(build(model=artifact.model, patterns={}, prefill=prefill), tmp_path / "b.yaml")
    run(Config(file=tmp_path / "b.yaml", prefill=tmp_path / "a.yaml", out=tmp_path / "out.yaml"))
    merged, arrays = load_pair(tmp_path / "out.yaml")
    assert merged.costs == artifact.costs and merged.prefill == artifact.prefill
    assert {"cost.0.pattern", "cost.0.sparse_seconds"} <= arrays.keys()


def test_in_place_what_another_wrote_meanwhile_is_kept(files, monkeypatch):
    """After the file was read, and before the merge writes, another command adds a section."""
    cache = artifacts.KVCache(policies={"f": artifacts.Full()}, layers=("f",) * 3)
    save(build(kv_cache=cache), files["c"])
    read = verb.load_pair

    def slow(file):
        pair = read(file)
        if file == files["c"]:
            update(
                files["a"],
                lambda artifact, arrays: (artifact.model_copy(update={"decode": omnikv()}), arrays),
            )
        return pair

    monkeypatch.setattr(verb, "load_pair", slow)
    run(Config(file=files["a"], kv_cache=str(files["c"]), out=files["a"]))
    merged, _ = load_pair(files["a"])
    assert merged.kv_cache == cache and merged.decode == omnikv()


def unlike(path, **changes):
    artifact = build(decode=omnikv())
    model = artifact.model.model_copy(update=changes)
    save(artifact.model_copy(update={"model": model}), path)
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weights_sha256": "f" * 64}, f"weights_sha256 is {'b' * 64} in "),
        ({"head_dim": 128, "weights_sha256": "f" * 64}, "head_dim is 64 in "),
        ({"architecture": "Other"}, "architecture is LlamaForCausalLM in "),
        ({"rope": {}}, "rope is {"),
    ],
)
def test_unlike_models_are_refused_by_the_first_field(files, tmp_path, changes, said):
    other = unlike(tmp_path / "d.yaml", **changes)
    with pytest.raises(ArtifactError) as caught:
        run(Config(file=files["a"], decode=str(other), out=files["out"]))
    assert "for unlike models" in str(caught.value) and said in str(caught.value)
    assert not files["out"].exists()


def test_an_import_learns_the_model(files, tmp_path):
    unknown = dict.fromkeys(("architecture", "config_sha256", "weights_sha256", "rope"))
    other = unlike(tmp_path / "d.yaml", name="file", **unknown)
    for more in ({"file": other, "prefill": files["a"]}, {"file": files["a"], "prefill": other}):
        run(Config(**more, out=files["out"]))
        assert load_pair(files["out"])[0].model == load_pair(files["a"])[0].model


@pytest.mark.parametrize(
    ("file", "options", "says"),
    [
        ("a", {"decode": "c.yaml"}, "has no decode section"),
        ("a", {"decode": "none.yaml"}, "no such file"),
        ("a", {"decode": ""}, "--decode: give an artifact's YAML file, or none"),
        ("b", {"kv_cache": "c.yaml"}, r"drops tokens that decode\.omnikv chooses from"),
        ("a", {"out": Path("none/out.yaml")}, "does not exist"),
    ],
)
def test_what_is_refused(files, monkeypatch, file, options, says):
    monkeypatch.chdir(files["out"].parent)
    error = HeadwiseError if "out" in options else ArtifactError
    with pytest.raises(error, match=says):
        run(Config(**{"file": files[file], "out": files["out"], **options}))
    assert not files["out"].exists()
