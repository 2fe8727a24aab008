"""Old artifacts stay readable: a golden file for every schema version, and the steps between them."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import numpy as np
import pytest

import artifacts
from artifacts import ArtifactError, migrations, strict_yaml
from artifacts.hashing import content_sha256
from artifacts.kv_cache import POLICY_KINDS
from artifacts.patterns import KINDS
from artifacts.schema import SCHEMA_VERSION

GOLDEN = Path(__file__).parent / "golden"


def test_every_version_has_its_golden_file_and_its_step():
    assert [path.name for path in sorted(GOLDEN.glob("*.yaml"))] == [f"v{n}.yaml" for n in range(1, SCHEMA_VERSION + 1)]
    assert sorted(migrations.MIGRATIONS) == list(range(1, SCHEMA_VERSION))


def test_golden_v1(make, arrays):
    artifact = artifacts.load(GOLDEN / "v1.yaml")
    expected = make()
    for field in ("created_at", "model", "search", "patterns", "prefill", "evidence"):
        assert getattr(artifact, field) == getattr(expected, field)
    assert artifact.schema_version == SCHEMA_VERSION
    assert artifact.content_sha256 == content_sha256(artifact.model_dump(mode="json"))
    back = artifacts.load_arrays(GOLDEN / "v1.yaml")
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)


def as_version_3(artifact):
    """The fields of a migrated artifact, those of version 4 checked to say nothing and taken out."""
    fields = artifact.model_dump(mode="json")
    search, prefill = fields["search"], fields["prefill"]
    assert fields.pop("schema_version") == SCHEMA_VERSION and fields.pop("costs") == []
    assert prefill.pop("growth") is None and prefill.pop("front") is None
    assert (search.pop("allocation"), search.pop("cost"), search.pop("n_trials")) == ("heads", None, None)
    (search["calibration"]["task"],) = search["calibration"].pop("tasks")
    return fields


def test_golden_v2():
    """Every kind of pattern, and decode; the sections of later versions are empty."""
    artifact = artifacts.load(GOLDEN / "v2.yaml")
    written = strict_yaml.parse((GOLDEN / "v2.yaml").read_bytes())
    fields = as_version_3(artifact)
    assert fields.pop("kv_cache") is None and fields["prefill"].pop("imported") is None
    assert written.pop("schema_version") == 2
    assert fields.pop("content_sha256") != written.pop("content_sha256")
    assert fields == written
    assert {pattern.kind for pattern in artifact.patterns.values()} == set(KINDS) - {"memory_units"}
    assert artifact.content_sha256 == content_sha256(artifact.model_dump(mode="json"))
    assert artifacts.load_arrays(GOLDEN / "v2.yaml").keys() == {
        "chosen.recall",
        "static.mean.columns",
        "static.mean.diagonals",
    }


def test_version_2_of_the_day_that_brought_version_3(tmp_path):
    """It had the new sections already: nothing of them is lost."""
    shutil.copy(*GOLDEN.glob("v3.*.safetensors"), tmp_path)
    fields = strict_yaml.parse((GOLDEN / "v3.yaml").read_bytes()) | {"schema_version": 2}
    fields["content_sha256"] = content_sha256(fields)
    (tmp_path / "cfg.yaml").write_text(strict_yaml.dump(fields))
    assert artifacts.load(tmp_path / "cfg.yaml") == artifacts.load(GOLDEN / "v3.yaml")


def test_golden_v3(every_kind):
    """Every kind of pattern and policy; one task, a budget for each head, and nothing that version 4 brought."""
    artifact = artifacts.load(GOLDEN / "v3.yaml")
    now = every_kind[0]
    for field in ("created_at", "model", "patterns", "decode", "kv_cache", "evidence"):
        assert getattr(artifact, field) == getattr(now, field)
    fields = as_version_3(artifact)
    written = strict_yaml.parse((GOLDEN / "v3.yaml").read_bytes())
    assert written.pop("schema_version") == 3 and fields.pop("content_sha256") != written.pop("content_sha256")
    assert fields == written
    assert artifact.content_sha256 == content_sha256(artifact.model_dump(mode="json"))


def test_what_was_imported_has_no_search_in_any_version(tmp_path):
    fields = strict_yaml.parse((GOLDEN / "v3.yaml").read_bytes()) | {"search": None, "sidecar": None}
    imported = {"format": "minference", "file": "x.json", "sha256": "a" * 64, "scores": None}
    fields["patterns"] = {name: p for name, p in fields["patterns"].items() if p["kind"] != "static"}
    rows = [row and ["dense" if name == "static_mean" else name for name in row] for row in fields["prefill"]["layers"]]
    fields["prefill"] |= {"imported": imported, "layers": rows}
    fields["content_sha256"] = content_sha256(fields)
    (tmp_path / "cfg.yaml").write_text(strict_yaml.dump(fields))
    assert artifacts.load(tmp_path / "cfg.yaml").search is None


def test_golden_v4(tmp_path, every_kind):
    """Every kind of pattern and policy, and what save() writes today, byte for byte."""
    artifact, arrays = every_kind
    saved = artifacts.save(artifact, tmp_path / "v4.yaml", arrays)
    assert artifacts.load(GOLDEN / "v4.yaml") == saved
    assert {pattern.kind for pattern in saved.patterns.values()} == set(KINDS)
    assert {policy.kind for policy in saved.kv_cache.policies.values()} == set(POLICY_KINDS)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in GOLDEN.glob("v4.*"))
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (GOLDEN / path.name).read_bytes()


def test_a_step_leaves_its_input_alone():
    for number, step in migrations.MIGRATIONS.items():
        fields = strict_yaml.parse((GOLDEN / f"v{number}.yaml").read_text())
        before = copy.deepcopy(fields)
        assert step(fields)["schema_version"] == number + 1 and fields == before


def renamed(fields):
    """A step as a later version could need: dense_below had another name before."""
    prefill = dict(fields["prefill"])
    prefill["dense_below"] = prefill.pop("dense_under")
    return fields | {"schema_version": SCHEMA_VERSION, "prefill": prefill}


@pytest.fixture
def older(tmp_path, monkeypatch):
    """A file of an imagined version right before the current one, and a headwise that knows the step from it."""
    monkeypatch.setitem(migrations.MIGRATIONS, SCHEMA_VERSION - 1, renamed)
    current = GOLDEN / f"v{SCHEMA_VERSION}.yaml"
    for path in GOLDEN.glob(f"{current.stem}.*"):
        shutil.copy(path, tmp_path)
    fields = strict_yaml.parse(current.read_text()) | {"schema_version": SCHEMA_VERSION - 1}
    fields["prefill"]["dense_under"] = fields["prefill"].pop("dense_below")
    fields["content_sha256"] = content_sha256(fields)
    (tmp_path / current.name).write_text(strict_yaml.dump(fields))
    return tmp_path / current.name


def test_an_older_file_is_read_through_its_step(older, every_kind):
    artifact = artifacts.load(older)
    assert artifact.prefill == every_kind[0].prefill
    assert artifact.content_sha256 == content_sha256(artifact.model_dump(mode="json"))


def test_an_older_file_is_checked_as_it_was_written(older):
    older.write_text(older.read_text().replace("seed: 7", "seed: 8"))
    with pytest.raises(ArtifactError, match="was changed after it was written"):
        artifacts.load(older)


def test_steps_are_chained_and_leave_their_input_alone(monkeypatch):
    monkeypatch.setattr(migrations, "SCHEMA_VERSION", 3)
    monkeypatch.setattr(
        migrations,
        "MIGRATIONS",
        {
            1: lambda fields: fields | {"schema_version": 2, "path": "one"},
            2: lambda fields: fields | {"schema_version": 3, "path": fields["path"] + ", two"},
        },
    )
    given = {"schema_version": 1}
    assert migrations.migrate(given) == {"schema_version": 3, "path": "one, two"}
    assert given == {"schema_version": 1}


@pytest.mark.parametrize("version", [None, "1", 1.0, True, 0, -1])
def test_no_version(version):
    with pytest.raises(ArtifactError, match="schema_version: must be a whole number"):
        migrations.migrate({"schema_version": version})
