"""set: a field gets another value, and what it was and of which artifact stays written."""

from __future__ import annotations

import json

import pytest

from artifacts import Artifact, ArtifactError, HeadwiseError, Prefill, load, load_pair, save
from artifacts.__main__ import main
from artifacts.analysis.findings import Case
from artifacts.analysis.lint import lint
from artifacts.commands.set import Config, run


def changed(saved, *changes, out=None):
    run(Config(file=saved, changes=changes, out=out or saved.with_name("new.yaml")))
    return load(out or saved.with_name("new.yaml"))


def test_what_was_set_over_what(saved, capsys):
    before = load(saved)
    out = saved.with_name("new.yaml")
    changes = ["prefill.dense_below=2048", "model.revision=null"]
    assert main(["set", str(saved), *changes, "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    after, arrays = load_pair(out)
    assert after.prefill.dense_below == 2048 and after.model.revision is None
    assert [(edit.field, edit.before, edit.after, edit.over) for edit in after.edits] == [
        ("prefill.dense_below", "4096", "2048", before.content_sha256),
        ("model.revision", '"12e45"', "null", before.content_sha256),
    ]
    assert after.content_sha256 == said["content_sha256"] != before.content_sha256
    assert (after.search, after.evidence) == (before.search, before.evidence)
    assert "chosen.recall" in arrays
    assert load(saved) == before
    again = changed(out, "prefill.dense_below=1024", out=out)
    over = [before.content_sha256] * 2 + [after.content_sha256]
    assert [edit.over for edit in again.edits] == over
    assert "edited" in [finding.code for finding in lint(Case(artifact=again))]


@pytest.mark.parametrize(
    ("change", "read"),
    [
        (
            "prefill.layers[1]=[bs_9, bs_9, bs_9, dense]",
            lambda a: a.prefill.layers[1][3] == "dense",
        ),
        ("patterns.a_64_512.window=640", lambda a: a.patterns["a_64_512"].window == 640),
        ("evidence.measurements[0].name=x", lambda a: a.evidence.measurements[0].name == "x"),
        ("model.rope={rope_theta: 5.0}", lambda a: a.model.rope == {"rope_theta": 5.0}),
    ],
)
def test_paths(saved, change, read):
    assert read(changed(saved, change))


def test_a_pattern_that_no_head_has_any_more_is_refused(saved):
    with pytest.raises(ArtifactError, match=r"patterns\.bs_9 is used by no head"):
        changed(saved, "prefill.layers[0][3]=vs_100_1800")


def test_names_with_dots(tmp_path, every_kind):
    save(every_kind[0], tmp_path / "cfg.yaml", every_kind[1])
    found = changed(tmp_path / "cfg.yaml", "patterns.bs_40_c99.5.blocks=41")
    assert found.patterns["bs_40_c99.5"].blocks == 41


def test_changed_names_no_fields_where_a_table_is_empty(tmp_path, every_kind):
    artifact = every_kind[0]
    origin = {"format": "minference", "file": "f.json", "sha256": "0" * 64}
    layers = (None,) * artifact.model.num_layers
    prefill = Prefill(dense_below=0, layers=layers, imported=origin)
    save(Artifact(model=artifact.model, search=None, patterns={}, prefill=prefill), tmp_path / "a")
    with pytest.raises(ArtifactError, match=r"patterns has no 'x\.blocks', it has: no fields$"):
        changed(tmp_path / "a", "patterns.x.blocks=1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("prefill.dense_below", "a change is FIELD=VALUE"),
        ("prefill.dense_belw=5", r"prefill has no 'dense_belw', it has: dense_below, dense_tail"),
        ("prefill.layers[9]=null", r"prefill\.layers has no '\[9\]', it has: 5 entries"),
        ("prefill.dense_below.x=1", r"prefill\.dense_below has no 'x', it has: no fields"),
        ("prefill.dense_below=4096", r"'prefill\.dense_below': is 4096 already"),
        ("prefill.dense_below=many", r"prefill\.dense_below: must be a whole number, got 'many'"),
        (
            "decode.omnikv.budget=many",
            r"decode\.omnikv\.budget: must be a whole number of tokens, or a share .*'many'$",
        ),
        ("kv_cache.layers[0]=[5, full]", r"kv_cache\.layers\[0\]\[0\]: must be text, got 5$"),
        ("prefill.dense_below=[1", r"prefill\.dense_below.*not valid YAML"),
        ("content_sha256=abc", "is written by headwise, not set"),
        ("model.num_heads=8", r"prefill\.layers\[0\] has 4 names, the model has 8 query heads"),
    ],
)
def test_what_cannot_be_set(tmp_path, every_kind, change, message):
    saved = tmp_path / "cfg.yaml"
    save(every_kind[0], saved, every_kind[1])
    with pytest.raises(HeadwiseError, match=message) as caught:
        changed(saved, change)
    assert str(caught.value).isprintable() and not saved.with_name("new.yaml").exists()
