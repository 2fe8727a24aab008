"""Old artifacts stay readable: a golden file for every schema version, and the steps between them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import artifacts
from artifacts import ArtifactError, migrations, store, strict_yaml
from artifacts.hashing import content_sha256
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
    back = artifacts.load_arrays(GOLDEN / "v1.yaml")
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)


@pytest.mark.skipif(SCHEMA_VERSION != 1, reason="version 1 is no longer written")
def test_golden_v1_is_what_save_writes(tmp_path, make, arrays):
    artifacts.save(make(), tmp_path / "v1.yaml", arrays)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in GOLDEN.glob("v1.*"))
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (GOLDEN / path.name).read_bytes()


def renamed(fields):
    """A step as a later version could need: dense_below had another name before."""
    prefill = dict(fields["prefill"])
    prefill["dense_below"] = prefill.pop("dense_under")
    return fields | {"schema_version": SCHEMA_VERSION, "prefill": prefill}


@pytest.fixture
def older(tmp_path, monkeypatch):
    """A file of an imagined version before the current one, and a headwise that knows the step from it."""
    monkeypatch.setattr(migrations, "SCHEMA_VERSION", 2)
    monkeypatch.setattr(store, "SCHEMA_VERSION", 2)
    monkeypatch.setitem(migrations.MIGRATIONS, 1, renamed)
    for path in GOLDEN.glob("v1.*"):
        shutil.copy(path, tmp_path)
    fields = strict_yaml.parse((tmp_path / "v1.yaml").read_text())
    fields["prefill"]["dense_under"] = fields["prefill"].pop("dense_below")
    fields["content_sha256"] = content_sha256(fields)
    (tmp_path / "v1.yaml").write_text(strict_yaml.dump(fields))
    return tmp_path / "v1.yaml"


def test_an_older_file_is_read_through_its_step(older, make):
    artifact = artifacts.load(older)
    assert artifact.prefill == make().prefill
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
