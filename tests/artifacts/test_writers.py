"""Writers at once, killed writers, and their leftovers: nothing is lost, no pair is torn."""

from __future__ import annotations

import errno
import fcntl
import json
import subprocess
import sys

import numpy as np
import pytest

import artifacts
from artifacts import (
    ArtifactError,
    Decode,
    HeadwiseError,
    OmniKV,
    load,
    load_arrays,
    load_pair,
    save,
    update,
)
from artifacts.analysis.sections import save_searched, with_seen
from artifacts.store.pair import locked
from artifacts.store.windows import seen_windows
from tests.artifacts.conftest import files_of, names

DECODE = Decode(omnikv=OmniKV(filter_layers=(2,)))


def with_decode(artifact, arrays):
    mass = np.ones(3, np.float32)
    return artifact.model_copy(update={"decode": DECODE}), {**arrays, "similarity.mass": mass}


def test_update_keeps_what_it_is_not_about(saved):
    before, arrays = load_pair(saved)
    result = update(saved, with_decode)
    after, kept = load_pair(saved)
    assert after == result and after.decode == DECODE and after.prefill == before.prefill
    assert kept.keys() == arrays.keys() | {"similarity.mass"}
    assert len(names(saved.parent)) == 2


def test_update_into_another_file_leaves_the_first_alone(saved, tmp_path):
    before = files_of(saved.parent)
    out = tmp_path / "other" / "new.yaml"
    out.parent.mkdir()
    assert update(saved, with_decode, out=out) == load(out) and load(out).decode == DECODE
    assert files_of(saved.parent) == before
    # By another name it is still the same file.
    update(saved, with_decode, out=saved.parent / "other" / ".." / saved.name)
    assert load(saved).decode == DECODE


def test_update_needs_a_whole_artifact_and_a_change_that_works(saved, tmp_path):
    with pytest.raises(ArtifactError, match=r"none\.yaml: no such file"):
        update(tmp_path / "none.yaml", with_decode)
    before = files_of(saved.parent)

    def broken(artifact, arrays):
        raise OSError("of its own")

    def without_layers(artifact, arrays):
        prefill = artifact.prefill.model_copy(update={"layers": ()})
        return artifact.model_copy(update={"prefill": prefill}), arrays

    with pytest.raises(OSError, match="of its own"):
        update(saved, broken)
    with pytest.raises(ArtifactError, match=r"prefill\.layers has 0 rows"):
        update(saved, without_layers)
    assert files_of(saved.parent) == before


def test_a_lock_that_is_held_is_waited_for_and_then_named(saved, make):
    with (
        locked(saved),
        pytest.raises(HeadwiseError, match="another process has been writing it for"),
    ):
        update(saved, with_decode, timeout=0.1)
    assert len(names(saved.parent)) == 2
    update(saved, with_decode, timeout=0.1)
    assert load(saved).decode == DECODE


def test_what_a_dead_writer_left_unfinished_is_cleared_away_and_nothing_else(saved, make, arrays):
    folder = saved.parent
    (before,) = folder.glob("*.safetensors")
    for name in ("cfg.01234567.safetensors", "mine.safetensors", "cfg.v2.01234567.safetensors"):
        (folder / name).write_bytes(before.read_bytes())
    (folder / ".cfg.yaml.00112233.tmp").write_bytes(b"half")
    (folder / ".cfg.01234567.safetensors.00112233.tmp").write_bytes(b"half")
    others = {".other.yaml.00112233.tmp", ".cfg.v2.01234567.safetensors.00112233.tmp"}
    for name in others:
        (folder / name).write_bytes(b"another writer's")
    (folder / ".cfg.lock").write_bytes(b"of a dead writer")
    arrays["chosen.recall"][0, 0] = 0.75
    result = save(make(), saved, arrays)
    kept = {"cfg.01234567.safetensors", "mine.safetensors", "cfg.v2.01234567.safetensors"}
    assert names(folder) == sorted({"cfg.yaml", result.sidecar.file} | kept | others)
    # The same content has the same sidecar, which stays; without arrays there is none.
    assert save(make(), saved, arrays).sidecar == result.sidecar == load(saved).sidecar
    assert load_arrays(saved)["chosen.recall"][0, 0] == 0.75
    save(make(), saved)
    assert names(folder) == sorted({"cfg.yaml"} | kept | others)


def test_a_name_that_save_did_not_give_removes_no_file(saved, make, arrays):
    (sidecar,) = saved.parent.glob("*.safetensors")
    mine = sidecar.rename(saved.with_name("mine.safetensors"))
    saved.write_text(saved.read_text().replace(sidecar.name, mine.name))
    save(make(), saved, arrays)
    assert mine.exists()


@pytest.mark.parametrize("stem", ["cfg+1", "a(b", "[x]"])
def test_a_name_with_signs_is_the_name_of_both_files(tmp_path, make, arrays, stem):
    """Own sidecars and unfinished files are known by the whole stem, whatever it is made of."""
    path = tmp_path / f"{stem}.yaml"
    save(make(), path, arrays)
    (tmp_path / f".{path.name}.00112233.tmp").write_bytes(b"half")
    arrays["chosen.recall"][0, 0] = 0.75
    result = save(make(), path, arrays)
    assert result.sidecar.file == f"{stem}.{result.sidecar.sha256[:8]}.safetensors"
    assert names(tmp_path) == sorted([path.name, result.sidecar.file])


def test_files_of_one_stem_share_a_lock_and_sidecars(saved, make):
    """cfg.yaml and cfg.yml would name the same sidecar."""
    other = saved.with_suffix(".yml")
    with (
        locked(saved),
        pytest.raises(HeadwiseError, match="another process is writing it"),
        locked(other, timeout=0),
    ):
        pass


def test_a_link_in_place_of_the_lock_is_not_followed(saved, make, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (saved.parent / ".cfg.lock").symlink_to(precious)
    says = r"cannot write '.*cfg\.yaml': its lock file \.cfg\.lock: "
    with pytest.raises(HeadwiseError, match=says):
        save(make(), saved)
    assert precious.read_text() == "kept"


def test_without_locks_in_the_file_system_there_is_still_a_pair(saved, make, arrays, monkeypatch):
    def unsupported(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    arrays["chosen.recall"][0, 0] = 0.75
    save(make(), saved, arrays)
    assert load_arrays(saved)["chosen.recall"][0, 0] == 0.75
    assert len(names(saved.parent)) == 2


@pytest.mark.slow
def test_killed_at_each_call_and_at_any_instant_a_whole_pair_is_there():
    command = [sys.executable, "-m", "tests.artifacts.crash", "60"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for kind, calls in (("before", 20), ("torn", 1)):
        assert report[kind].keys() == {"0", "1"} and report[kind]["0"] > calls
    # Were none killed within a write, there would be no leftovers.
    assert sum(report["random"].values()) == 54 and report["random"]["leftovers"] > 5
    assert report["kept"] > 0


def test_a_search_keeps_the_sections_of_others(saved, make):
    update(saved, with_decode)
    again = make(created_at="2026-01-01T00:00:00Z", evidence=artifacts.Evidence())
    recall = np.array([[0.0] * 4, [np.nan] * 4, [0.0] * 4], np.float32)
    result = save_searched(again, saved, {"chosen.recall": recall})
    artifact, arrays = load_pair(saved)
    assert artifact == result and artifact.decode == DECODE
    assert artifact.created_at.startswith("2026") and artifact.evidence == artifacts.Evidence()
    assert arrays.keys() == {"chosen.recall", "similarity.mass"}
    np.testing.assert_array_equal(arrays["chosen.recall"], recall)


def test_a_search_keeps_what_the_searches_of_kept_sections_have_seen(saved, make, arrays):
    first, second, third = (digit * 64 for digit in "123")
    update(saved, lambda artifact, there: with_seen(*with_decode(artifact, there), [first, second]))
    again, fresh = with_seen(make(), arrays, [second, third])
    save_searched(again, saved, fresh)
    artifact, there = load_pair(saved)
    assert seen_windows(there) == {first, second, third}
    assert artifact.search.calibration.seen_windows == 3
    update(saved, lambda artifact, there: (artifact.model_copy(update={"decode": None}), there))
    save_searched(again, saved, fresh)
    assert seen_windows(load_pair(saved)[1]) == {second, third}
    prefill = artifact.prefill.model_copy(update={"layers": (None,) * 3})
    imported = make(search=None, prefill=prefill, patterns={})
    assert with_seen(imported, {}, [first]) == (imported, {})


def test_a_search_of_another_model_or_over_no_artifact_replaces_all(saved, make):
    update(saved, with_decode)
    renamed = make().model.model_copy(update={"name": "elsewhere/tiny"})
    assert save_searched(make(model=renamed), saved, {}).decode == DECODE
    other = make().model.model_copy(update={"weights_sha256": "e" * 64})
    assert save_searched(make(model=other), saved, {}).decode is None
    for text in ("", "nonsense: 1", "[" * 100):
        saved.write_text(text)
        assert save_searched(make(), saved, {}) == load(saved)
    saved.unlink()
    assert save_searched(make(), saved, {}) == load(saved)
    before = files_of(saved.parent)
    with pytest.raises(ArtifactError, match=r"prefill\.layers\[0\]\[0\]: no pattern is called"):
        save_searched(make().model_copy(update={"patterns": {}}), saved, {})
    assert files_of(saved.parent) == before
