"""The pair of files: round trips, failures and readers during a write."""

from __future__ import annotations

import os

import numpy as np
import pytest

from artifacts import HeadwiseError, load, load_arrays, pattern_name, save
from artifacts.schema.kv_cache import POLICY_KINDS
from artifacts.schema.patterns import KINDS
from tests.artifacts.conftest import GOLDEN, files_of, names


def test_golden_v1(tmp_path, every_kind):
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


def test_same_content_same_bytes(tmp_path, make, arrays):
    written = []
    for run, order in (("one", list(arrays)), ("two", list(arrays)[::-1])):
        # Another layout in memory is the same content.
        laid_out = {name: np.asfortranarray(arrays[name]) for name in order}
        (tmp_path / run).mkdir()
        save(make(), tmp_path / run / "cfg.yaml", laid_out)
        written.append(files_of(tmp_path / run))
    assert written[0] == written[1]


def test_arrays_of_every_layout(tmp_path, make):
    given = {
        "scalar": np.array(2.5, dtype=np.float64),
        "empty": np.zeros((0, 3), dtype=np.int64),
        "strided": np.arange(20, dtype=np.int32).reshape(4, 5)[::2, ::-1],
        "big_endian": np.arange(5, dtype=">f4"),
        "half": np.arange(5, dtype=np.float16),
        "flags": np.array([True, False]),
    }
    save(make(), tmp_path / "cfg.yaml", given)
    for name, array in load_arrays(tmp_path / "cfg.yaml").items():
        assert array.shape == given[name].shape
        np.testing.assert_array_equal(array, given[name])


@pytest.mark.parametrize("step", ["replace", "fsync", "open"])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_failure_leaves_the_old_pair_and_nothing_else(saved, make, arrays, monkeypatch, step, at):
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


def test_interrupted_right_after_the_switch_the_new_pair_is_whole(saved, make, arrays, monkeypatch):
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


def test_a_reader_between_yaml_and_sidecar_takes_the_new_pair(saved, make, arrays, monkeypatch):
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
