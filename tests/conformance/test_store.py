"""Conformance of the store: every kind and policy comes back, and a pair is always whole.

Failures, readers during a write, writers at once, killed writers, and their leftovers.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
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
    pattern_name,
    save,
    update,
)
from artifacts.analysis.sections import save_searched, with_seen
from artifacts.schema.kv_cache import POLICY_KINDS
from artifacts.schema.patterns import KINDS
from artifacts.store import sidecar
from artifacts.store.pair import locked
from artifacts.store.windows import seen_windows
from tests.artifacts.conftest import GOLDEN, arrays, every_kind, files_of, make, names, saved

__all__ = ["arrays", "every_kind", "make", "saved"]

DECODE = Decode(omnikv=OmniKV(filter_layers=(2,)))


def with_decode(artifact, arrays):
    mass = np.ones(3, np.float32)
    return artifact.model_copy(update={"decode": DECODE}), {**arrays, "similarity.mass": mass}


def test_store_golden_file_round_trips_byte_for_byte(tmp_path, every_kind):
    """Every kind of pattern and policy, and what save() writes today of it, byte for byte."""
    artifact, arrays = every_kind
    assert all(name == pattern_name(pattern) for name, pattern in artifact.patterns.items())
    assert {pattern.kind for pattern in artifact.patterns.values()} == set(KINDS)
    assert {policy.kind for policy in artifact.kv_cache.policies.values()} == set(POLICY_KINDS)
    saved = save(artifact, tmp_path / "v1.yaml", arrays)
    assert load(tmp_path / "v1.yaml") == saved and saved.patterns == artifact.patterns
    assert names(tmp_path) == names(GOLDEN.parent)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == GOLDEN.with_name(path.name).read_bytes()


def test_save_of_the_same_content_writes_the_same_bytes(tmp_path, make, arrays):
    written = []
    for run, order in (("one", list(arrays)), ("two", list(arrays)[::-1])):
        # Another layout in memory is the same content.
        columns_first = {name: np.asfortranarray(arrays[name]) for name in order}
        (tmp_path / run).mkdir()
        save(make(), tmp_path / run / "cfg.yaml", columns_first)
        written.append(files_of(tmp_path / run))
    assert written[0] == written[1]


def test_save_and_load_arrays_of_every_layout(tmp_path, make):
    layouts = {
        "scalar": np.array(2.5, dtype=np.float64),
        "empty": np.zeros((0, 3), dtype=np.int64),
        "strided": np.arange(20, dtype=np.int32).reshape(4, 5)[::2, ::-1],
        "big_endian": np.arange(5, dtype=">f4"),
        "half": np.arange(5, dtype=np.float16),
        "flags": np.array([True, False]),
    }
    save(make(), tmp_path / "cfg.yaml", layouts)
    for name, array in load_arrays(tmp_path / "cfg.yaml").items():
        assert array.shape == layouts[name].shape
        np.testing.assert_array_equal(array, layouts[name])


@pytest.mark.parametrize(
    ("limit", "most", "message"),
    [("MAX_SIDECAR", 100, "a sidecar may have"), ("MAX_HEADER", 8, "a sidecar's may have 8")],
)
def test_save_of_arrays_beyond_a_limit_of_sidecars_writes_nothing(
    tmp_path, make, arrays, monkeypatch, limit, most, message
):
    monkeypatch.setattr(sidecar, limit, most)
    with pytest.raises(ArtifactError, match=message):
        save(make(), tmp_path / "cfg.yaml", arrays)
    assert names(tmp_path) == []


@pytest.mark.parametrize("step", ["replace", "fsync", "open"])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_save_that_fails_leaves_the_old_pair(saved, make, arrays, monkeypatch, step, at):
    before = files_of(saved.parent)
    real, calls = getattr(os, step), 0

    def failing(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == at:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    arrays["chosen.recall"][0, 0] = 0.75
    monkeypatch.setattr(os, step, failing)
    try:
        save(make(), saved, arrays)
    except HeadwiseError as error:
        assert "no space left on device" in str(error)
        monkeypatch.undo()
        assert files_of(saved.parent) == before and names(saved.parent) == sorted(before)
    else:
        # Flushing the directory is a courtesy, some steps come fewer times, and what could not be
        # read is not removed.
        monkeypatch.undo()
        assert load_arrays(saved)["chosen.recall"][0, 0] == 0.75
        assert len(names(saved.parent)) <= 2 + (step == "open")


def test_save_interrupted_after_the_rename_leaves_the_new_pair(saved, make, arrays, monkeypatch):
    real = os.replace

    def interrupted(source, target):
        real(source, target)
        if str(target) == str(saved):
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    arrays["chosen.recall"][0, 0] = 0.75
    with pytest.raises(KeyboardInterrupt):
        save(make(), saved, arrays)
    assert load_arrays(saved)["chosen.recall"][0, 0] == 0.75


def test_load_during_a_save_returns_the_new_pair(saved, make, arrays, monkeypatch):
    """A reader has the old YAML already when the old sidecar goes."""
    import artifacts.store.read as store

    real, switched = store.read_yaml, False

    def read(path):
        nonlocal switched
        data = real(path)
        if not switched:
            switched = True
            arrays["chosen.recall"][0, 0] = 0.75
            save(make(), saved, arrays)
        return data

    monkeypatch.setattr(store, "read_yaml", read)
    assert load_arrays(saved)["chosen.recall"][0, 0] == 0.75


def test_update_keeps_other_sections_and_arrays(saved):
    before, arrays = load_pair(saved)
    result = update(saved, with_decode)
    after, retained = load_pair(saved)
    assert after == result and after.decode == DECODE and after.prefill == before.prefill
    assert retained.keys() == arrays.keys() | {"similarity.mass"}
    assert len(names(saved.parent)) == 2


def test_update_into_another_file_keeps_the_first(saved, tmp_path):
    before = files_of(saved.parent)
    out = tmp_path / "other" / "new.yaml"
    out.parent.mkdir()
    assert update(saved, with_decode, out=out) == load(out) and load(out).decode == DECODE
    assert files_of(saved.parent) == before
    # By another name it is still the same file.
    update(saved, with_decode, out=saved.parent / "other" / ".." / saved.name)
    assert load(saved).decode == DECODE


def test_update_that_fails_changes_nothing(saved, tmp_path):
    with pytest.raises(ArtifactError, match=r"none\.yaml: no such file"):
        update(tmp_path / "none.yaml", with_decode)
    before = files_of(saved.parent)

    def broken(artifact, arrays):
        raise OSError("from the change")

    def without_layers(artifact, arrays):
        prefill = artifact.prefill.model_copy(update={"layers": ()})
        return artifact.model_copy(update={"prefill": prefill}), arrays

    with pytest.raises(OSError, match="from the change"):
        update(saved, broken)
    with pytest.raises(ArtifactError, match=r"prefill\.layers has 0 rows"):
        update(saved, without_layers)
    assert files_of(saved.parent) == before


def test_update_waits_for_a_lock_and_then_names_it(saved, make):
    with (
        locked(saved),
        pytest.raises(HeadwiseError, match="another process has been writing it for"),
    ):
        update(saved, with_decode, timeout=0.1)
    assert len(names(saved.parent)) == 2
    update(saved, with_decode, timeout=0.1)
    assert load(saved).decode == DECODE


def test_save_removes_unfinished_files_of_dead_writers_only(saved, make, arrays):
    folder = saved.parent
    (before,) = folder.glob("*.safetensors")
    for name in ("cfg.01234567.safetensors", "mine.safetensors", "cfg.v2.01234567.safetensors"):
        (folder / name).write_bytes(before.read_bytes())
    (folder / ".cfg.yaml.00112233.tmp").write_bytes(b"half")
    (folder / ".cfg.01234567.safetensors.00112233.tmp").write_bytes(b"half")
    foreign = {".other.yaml.00112233.tmp", ".cfg.v2.01234567.safetensors.00112233.tmp"}
    for name in foreign:
        (folder / name).write_bytes(b"another writer's")
    (folder / ".cfg.lock").write_bytes(b"of a dead writer")
    arrays["chosen.recall"][0, 0] = 0.75
    result = save(make(), saved, arrays)
    retained = {"cfg.01234567.safetensors", "mine.safetensors", "cfg.v2.01234567.safetensors"}
    assert names(folder) == sorted({"cfg.yaml", result.sidecar.file} | retained | foreign)
    # The same content has the same sidecar, which stays; without arrays there is none.
    assert save(make(), saved, arrays).sidecar == result.sidecar == load(saved).sidecar
    assert load_arrays(saved)["chosen.recall"][0, 0] == 0.75
    save(make(), saved)
    assert names(folder) == sorted({"cfg.yaml"} | retained | foreign)


def test_save_keeps_a_sidecar_of_another_name(saved, make, arrays):
    (sidecar,) = saved.parent.glob("*.safetensors")
    mine = sidecar.rename(saved.with_name("mine.safetensors"))
    saved.write_text(saved.read_text().replace(sidecar.name, mine.name))
    save(make(), saved, arrays)
    assert mine.exists()


@pytest.mark.parametrize("stem", ["cfg+1", "a(b", "[x]"])
def test_save_with_special_characters_in_the_name(tmp_path, make, arrays, stem):
    """Own sidecars and unfinished files are known by the whole stem, whatever it is made of."""
    path = tmp_path / f"{stem}.yaml"
    save(make(), path, arrays)
    (tmp_path / f".{path.name}.00112233.tmp").write_bytes(b"half")
    arrays["chosen.recall"][0, 0] = 0.75
    result = save(make(), path, arrays)
    assert result.sidecar.file == f"{stem}.{result.sidecar.sha256[:8]}.safetensors"
    assert names(tmp_path) == sorted([path.name, result.sidecar.file])


def test_locked_files_of_one_stem_share_a_lock(saved, make):
    """cfg.yaml and cfg.yml would name the same sidecar."""
    other = saved.with_suffix(".yml")
    with (
        locked(saved),
        pytest.raises(HeadwiseError, match="another process is writing it"),
        locked(other, timeout=0),
    ):
        pass


def test_save_does_not_follow_a_link_as_its_lock(saved, make, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (saved.parent / ".cfg.lock").symlink_to(precious)
    says = r"cannot write '.*cfg\.yaml': its lock file \.cfg\.lock: "
    with pytest.raises(HeadwiseError, match=says):
        save(make(), saved)
    assert precious.read_text() == "kept"


def test_save_without_file_locks_writes_a_pair(saved, make, arrays, monkeypatch):
    def unsupported(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    arrays["chosen.recall"][0, 0] = 0.75
    save(make(), saved, arrays)
    assert load_arrays(saved)["chosen.recall"][0, 0] == 0.75
    assert len(names(saved.parent)) == 2


@pytest.mark.slow
def test_save_killed_at_each_call_leaves_a_whole_pair():
    command = [sys.executable, "-m", "tests.artifacts.crash", "30"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for kind, calls in (("before", 20), ("torn", 1)):
        assert report[kind].keys() == {"0", "1"} and report[kind]["0"] > calls
    # Were none killed within a write, there would be no leftovers.
    assert sum(report["random"].values()) == 27 and report["random"]["leftovers"] > 2
    assert report["kept"] > 0


def test_save_searched_keeps_other_sections(saved, make):
    update(saved, with_decode)
    again = make(created_at="2026-01-01T00:00:00Z", evidence=artifacts.Evidence())
    recall = np.array([[0.0] * 4, [np.nan] * 4, [0.0] * 4], np.float32)
    result = save_searched(again, saved, {"chosen.recall": recall})
    artifact, arrays = load_pair(saved)
    assert artifact == result and artifact.decode == DECODE
    assert artifact.created_at.startswith("2026") and artifact.evidence == artifacts.Evidence()
    assert arrays.keys() == {"chosen.recall", "similarity.mass"}
    np.testing.assert_array_equal(arrays["chosen.recall"], recall)


def test_save_searched_keeps_windows_seen_for_other_sections(saved, make, arrays):
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


def test_save_searched_of_another_model_replaces_all(saved, make):
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
