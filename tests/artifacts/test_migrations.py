"""Old artifacts stay readable: a golden file for every schema version, and the steps between them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import artifacts
from artifacts import ArtifactError, migrations, strict_yaml
from artifacts.__main__ import main
from artifacts.command_line import FOUND
from artifacts.hashing import content_sha256
from artifacts.kv_cache import POLICY_KINDS
from artifacts.patterns import KINDS
from artifacts.schema import SCHEMA_VERSION

GOLDEN = Path(__file__).parent / "golden"


def test_every_version_has_its_golden_file_and_its_step():
    assert [path.name for path in sorted(GOLDEN.glob("*.yaml"))] == [f"v{n}.yaml" for n in range(1, SCHEMA_VERSION + 1)]
    assert sorted(migrations.MIGRATIONS) == list(range(1, SCHEMA_VERSION))


def test_golden_v1(tmp_path, every_kind):
    """Every kind of pattern and policy, and what save() writes today, byte for byte."""
    artifact, arrays = every_kind
    saved = artifacts.save(artifact, tmp_path / "v1.yaml", arrays)
    assert artifacts.load(GOLDEN / "v1.yaml") == saved
    assert {pattern.kind for pattern in saved.patterns.values()} == set(KINDS)
    assert {policy.kind for policy in saved.kv_cache.policies.values()} == set(POLICY_KINDS)
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
    """A file of an imagined version right before the current one, and a headwise that knows the step from it."""
    monkeypatch.setattr(migrations, "OLDEST", SCHEMA_VERSION - 1)
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


def test_an_older_file_is_found_and_written_anew(older, capsys):
    assert main(["migrate", str(older)]) == FOUND
    assert f"the current one is {SCHEMA_VERSION}; --out FILE writes it" in capsys.readouterr().out
    assert main(["migrate", str(older), "--out", str(older)]) == 0
    assert strict_yaml.parse(older.read_bytes())["schema_version"] == SCHEMA_VERSION


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
