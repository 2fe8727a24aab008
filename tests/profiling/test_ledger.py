"""The resume file: resumes after a kill, repeats damaged jobs, and separates settings."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from artifacts import HeadwiseError
from profiling.ledger import Ledger
from profiling.models.identity import Identity
from profiling.ranks import Ranks
from profiling.values import from_bytes, to_bytes

ROOT = Path(__file__).resolve().parents[2]
MODEL = Identity(name="tiny", key="0" * 64)
SETTINGS = {"length": 4096, "tasks": ("text", "vt"), "limit": math.inf, "none": math.nan}
VALUE = {
    "error": 0.1 + 0.2,
    "worst": math.inf,
    "heads": [3, None, True, "x"],
    "curves": [np.arange(6.0).reshape(2, 3)],
}


@pytest.fixture
def out(tmp_path):
    with Ledger(tmp_path / "cfg.yaml", "heads", MODEL, settings=SETTINGS) as ledger:
        for layer in range(3):
            ledger.put(ledger.unit(f"layer {layer}", {"seed": 0}), {"error": 0.1 + layer / 3})
    return tmp_path / "cfg.yaml"


def only(out: Path) -> Path:
    return out.with_name("cfg.yaml.heads.ledger")


def test_values_round_trip_bit_for_bit():
    for dtype in ("float32", "float16", "int64", "bool", ">f8"):
        for shape in ((), (0, 3), (2, 5)):
            array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
            back = from_bytes(to_bytes([array.T]))[0]
            assert back.dtype == array.dtype.newbyteorder("=") and back.shape == array.T.shape
            np.testing.assert_array_equal(back, array.T)
    array = np.array([np.nan, -0.0, np.inf, 1e-45], dtype=np.float32)
    back = from_bytes(to_bytes({"a": array, "b": (array[3], math.nan), "c": VALUE}))
    assert back["a"].tobytes() == array.tobytes() and back["b"][0] == float(array[3])
    assert math.isnan(back["b"][1])
    assert back["c"]["error"] == VALUE["error"] and back["c"]["heads"] == VALUE["heads"]
    back["a"][0] = 1  # writable
    for wrong in ({1: 2}, {"__array__": 1}, object(), b"x", {"a": {3}}):
        with pytest.raises(TypeError):
            to_bytes(wrong)


def test_ledger_put_is_stored_for_the_next_process(out):
    with Ledger(out, "heads", MODEL, settings=SETTINGS) as ledger:
        assert len(ledger) == 3 and ledger.unit("layer 2", {"seed": 0}) in ledger
        assert ledger.get(ledger.unit("layer 2", {"seed": 0})) == {"error": 0.1 + 2 / 3}
        put = ledger.put(ledger.unit("array"), VALUE)
        got = ledger.once(ledger.unit("array"), lambda: pytest.fail("it is stored"))
        assert put["heads"] == got["heads"]
        assert put["curves"][0].tobytes() == got["curves"][0].tobytes()
        new = ledger.once(ledger.unit("new"), lambda: (1, 2))
        assert new == ledger.get(ledger.unit("new")) == [1, 2]
        with pytest.raises(ValueError, match="None"):
            ledger.put(ledger.unit("none"), None)
        ledger.remove()
    with pytest.raises(KeyboardInterrupt), Ledger(out, "heads", MODEL):
        raise KeyboardInterrupt
    # A run that finished nothing leaves nothing.
    assert list(out.parent.iterdir()) == []


def test_ledger_unit_depends_on_name_inputs_and_settings(out):
    with Ledger(out, "heads", MODEL, settings=SETTINGS) as ledger:
        same = ledger.unit("layer 0", {"seed": 0})
        assert ledger.get(same) is not None
        for name, inputs in (("layer 0", {"seed": 1}), ("layer 0", None), ("layer 9", {"seed": 0})):
            assert ledger.get(ledger.unit(name, inputs)) is None
    with Ledger(out, "filters", MODEL, settings=SETTINGS) as other_command:
        assert not len(other_command)


@pytest.mark.parametrize("package", ["headwise", "torch", "transformers"])
def test_ledger_unit_of_another_package_version_is_not_reused(out, package, monkeypatch):
    def other_version(name):
        return "99" if name == package else version(name)

    monkeypatch.setattr("profiling.environment.version", other_version)
    with Ledger(out, "heads", MODEL, settings=SETTINGS) as ledger:
        assert ledger.get(ledger.unit("layer 0", {"seed": 0})) is None


def test_ledger_get_of_a_damaged_file_is_none(out):
    with Ledger(out, "heads", MODEL, settings=SETTINGS) as ledger:
        unit = ledger.unit("layer 1", {"seed": 0})
        file = only(out) / f"{unit.key}.unit"
        whole, value = file.read_bytes(), ledger.get(unit)
        for at in range(len(whole)):
            file.write_bytes(whole[:at])
            assert ledger.get(unit) is None
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            assert ledger.get(unit) is None
        assert ledger.once(unit, lambda: value) == value and file.read_bytes() == whole
        # A whole file under another unit's name.
        os.replace(file, only(out) / f"{ledger.unit('layer 7').key}.unit")
        assert ledger.get(ledger.unit("layer 7")) is None


def test_ledger_unit_of_another_model_is_not_reused(out):
    other = Identity(name="tiny", key="1" * 64)
    with pytest.raises(HeadwiseError, match=r"its sha256 of the model is '0+', not '1+'"):
        Ledger(out, "heads", other, settings=SETTINGS)
    # Without settings jobs of several models are kept together.
    for model in (MODEL, other):
        with Ledger(out, "evaluate", model) as ledger:
            assert ledger.get(ledger.unit("prompt")) is None
            ledger.put(ledger.unit("prompt"), {"loss": 1.0})
    assert len(ledger) == 2


def test_ledger_of_an_unknown_model_resumes_nothing_and_leaves_other_jobs(out, capsys):
    before = {path: path.read_bytes() for path in only(out).iterdir()}
    unknown = Identity(name="tiny", key="2" * 64, unknown="lm_head has a hook of its own")
    for _ in range(2):
        with Ledger(out, "heads", unknown, settings=SETTINGS) as ledger:
            assert "be resumed: lm_head has a hook of its own\n" in capsys.readouterr().err
            assert ledger.get(ledger.unit("layer 0", {"seed": 0})) is None
            value = ledger.put(ledger.unit("layer 0", {"seed": 0}), {"error": 1.0})
            assert ledger.get(ledger.unit("layer 0", {"seed": 0})) == value
        assert not ledger.folder.exists()
    assert {path: path.read_bytes() for path in only(out).iterdir()} == before


def test_ledger_rank_that_comes_late_keeps_half_written_files_of_others(tmp_path):
    class Late(Ranks):
        """The first of two ranks; the other one writes as soon as it may."""

        barriers = 0

        def barrier(self):
            self.barriers += 1
            if self.barriers == 2:
                (tmp_path / "cfg.yaml.heads.ledger" / ".other.tmp").write_text("half")

    folder = tmp_path / "cfg.yaml.heads.ledger"
    folder.mkdir()
    (folder / ".killed.tmp").write_text("half")
    with Ledger(tmp_path / "cfg.yaml", "heads", MODEL, ranks=Late()):
        assert [path.name for path in folder.glob(".*.tmp")] == [".other.tmp"]


@pytest.mark.parametrize("content", [b"", b"[]"])
def test_ledger_rewrites_damaged_settings(out, content):
    (only(out) / "settings.json").write_bytes(content)
    with Ledger(out, "heads", MODEL, settings=SETTINGS) as ledger:
        assert ledger.get(ledger.unit("layer 0", {"seed": 0})) is not None
    assert json.loads((only(out) / "settings.json").read_text())["tasks"] == ["text", "vt"]


_HOLDER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from profiling.ledger import Ledger
MODEL = SimpleNamespace(name="tiny", key="0" * 64, unknown=None)
ledger = Ledger(Path(sys.argv[1]), "heads", MODEL)
for number in range(400):
    arrays = {"array": np.zeros(300_000), "number": number}
    ledger.put(ledger.unit(f"unit {number}"), arrays)
    print(number, flush=True)
time.sleep(600)
"""


def test_ledger_killed_loses_the_job_in_progress_and_its_lock(tmp_path):
    out = tmp_path / "cfg.yaml"
    command = [sys.executable, "-c", _HOLDER, str(out)]
    reported = -1
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        for line in holder.stdout:
            reported = int(line)
            if reported == 10:
                for fresh in (False, True):
                    with pytest.raises(HeadwiseError, match="another process"):
                        Ledger(out, "heads", MODEL, fresh=fresh)
            if reported == 20:
                holder.send_signal(signal.SIGKILL)
    with Ledger(out, "heads", MODEL) as ledger:
        values = [ledger.get(ledger.unit(f"unit {number}")) for number in range(400)]
        assert all(value is not None for value in values[: reported + 1])
        assert sum(value is not None for value in values) <= reported + 2
        assert not list(ledger.folder.glob("*.tmp")) and not list(ledger.folder.glob(".*"))
        with pytest.raises(HeadwiseError, match="another process"):
            Ledger(out, "heads", MODEL)


def test_ledger_without_a_writable_folder_is_refused(tmp_path):
    (tmp_path / "cfg.yaml.heads.ledger").write_text("a file")
    with pytest.raises(HeadwiseError, match=r"cfg\.yaml\.heads\.ledger"):
        Ledger(tmp_path / "cfg.yaml", "heads", MODEL)
    with pytest.raises(HeadwiseError, match="no such file"):
        Ledger(tmp_path / "none" / "cfg.yaml", "heads", MODEL)
