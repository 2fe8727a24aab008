"""The resume file: what a kill leaves is gone on with, what is damaged is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from artifacts import HeadwiseError
from profiling.journal import Journal

SETTINGS = {"length": 4096, "seed": 0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "cfg.resume.jsonl"
    journal = Journal.open(path, SETTINGS, fresh=False)
    for layer in range(3):
        journal.add(f"0.{layer}", {"error": 0.1 + layer / 3})
    return path


def test_results_survive(path: Path) -> None:
    again = Journal.open(path, SETTINGS, fresh=False)
    assert len(again) == 3
    assert again["0.2"] == {"error": 0.1 + 2 / 3}
    assert "0.3" not in again


def test_every_possible_cut_keeps_whole_lines(path: Path) -> None:
    whole = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(ends[0], len(whole)):
        path.write_bytes(whole[:cut])
        journal = Journal.open(path, SETTINGS, fresh=False)
        assert len(journal) == sum(end <= cut for end in ends) - 1
        journal.add("new", 1)
        assert Journal.open(path, SETTINGS, fresh=False)["new"] == 1


def test_every_damaged_byte_is_found(path: Path) -> None:
    whole = path.read_bytes()
    for at in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            journal = Journal.open(path, SETTINGS, fresh=False)
        except HeadwiseError as error:
            assert "--fresh" in str(error) and "\n" not in str(error)
        else:
            # Only a byte of the last line can turn it into one that was cut off.
            assert [journal[key] for key in ("0.0", "0.1")] == [{"error": 0.1}, {"error": 0.1 + 1 / 3}]


def test_other_settings_are_refused_by_name(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(HeadwiseError, match="its length is 4096, not 8192"):
        Journal.open(path, {**SETTINGS, "length": 8192}, fresh=False)
    assert path.read_bytes() == before


def test_fresh_starts_again(path: Path) -> None:
    path.write_text("rubbish\n")
    assert len(Journal.open(path, SETTINGS, fresh=True)) == 0
    assert len(Journal.open(path, SETTINGS, fresh=False)) == 0


def test_remove_leaves_nothing(path: Path) -> None:
    Journal.open(path, SETTINGS, fresh=False).remove()
    assert list(path.parent.iterdir()) == []
