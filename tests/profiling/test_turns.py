"""python -m profiling.turns: a row for each past and turn, and no size that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from artifacts import HeadwiseError
from profiling import turns
from runtime import measured


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is found out stays with the test, and so does the number of threads."""
    monkeypatch.setattr(measured, "folder", lambda: tmp_path)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_every_turn_is_timed_against_both_dense_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "--past 1024 --new 8 70 --heads 2/1 --dtype float32 --repeats 1 --threads 1 --json"
    assert turns.main([*command.split(), str(tmp_path / "turns.json")]) == 0
    record, table = (tmp_path / "turns.json").read_text(), capsys.readouterr().out.splitlines()
    assert len(table) == 3 and all(str(new) in line for new, line in zip((8, 70), table[1:], strict=True))
    found = json.loads(record)["turns"]
    assert [(row["past"], row["new"]) for row in found] == [(1024, 8), (1024, 70)]
    for row in found:
        assert set(row["seconds"]) == {"sdpa", "dense kernel", "headwise"} and min(row["seconds"].values()) > 0
        assert row["against_better"]["value"] > 0
    # Fewer than a tile are no prefill; more are by whichever way was found to be faster.
    assert found[0]["served"] == "decode by kernel"
    assert found[1]["served"] in ("sparse", "short", "dense by kernel")


@pytest.mark.parametrize("name", ["past", "new", "repeats", "threads"])
def test_sizes_that_are_none(name: str) -> None:
    with pytest.raises(HeadwiseError, match=f"--{name} must be at least 1, got"):
        turns.main([f"--{name}", "0"])
