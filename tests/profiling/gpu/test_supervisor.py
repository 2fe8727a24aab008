"""Pieces of a step in processes of their own: whatever one does, the others are done."""

from __future__ import annotations

import os
import time
from pathlib import Path

from profiling.gpu.steps import Setting, Step
from profiling.gpu.supervisor import Outcome, run_pieces

ROOT = Path(__file__).parents[3]
PIECES = [
    *("first", "raises", "second", "has no memory", "third", "breaks the device", "fourth", "is killed", "fifth"),
    *("leaves", "sixth", "hangs", "last"),
]  # fmt: skip


def done_by(
    tmp_path: Path, pieces: list[str], *, module: str = "tests.profiling.gpu.failing", workers: int = 1,
    seconds: float = 2.0, within: float = 100.0,
) -> tuple[dict[str, Outcome], list[str]]:  # fmt: skip
    outcomes: dict[str, Outcome] = {}
    step = Step(name="failing", title="", module=module, seconds=seconds, workers=workers)
    left = run_pieces(
        step,
        pieces,
        Setting(device="cpu"),
        lambda outcome: outcomes.update({outcome.piece: outcome}),
        deadline=time.monotonic() + within,
        log=tmp_path / "log",
        environment={"PYTHONPATH": str(ROOT)},
    )
    return outcomes, left


def test_each_way_to_fail_costs_one_piece(tmp_path: Path) -> None:
    outcomes, left = done_by(tmp_path, PIECES)
    assert list(outcomes) == PIECES and left == []
    errors = {piece: outcome.error for piece, outcome in outcomes.items() if outcome.error is not None}
    assert errors["raises"] == "ValueError: nothing of the kind"
    assert errors["has no memory"] == "MemoryError: tried to allocate 80 GiB"
    assert errors["breaks the device"].startswith("RuntimeError: CUDA error")
    assert errors["is killed"].startswith("its process was ended by SIGSEGV")
    assert "the last words" in errors["is killed"]
    assert errors["leaves"].startswith("its process ended with status 5")
    assert errors["hangs"] == "took more than 2 s and was ended"
    assert len(errors) == 6
    at = {piece: outcome.found["process"] for piece, outcome in outcomes.items() if outcome.found is not None}
    # An ordinary error leaves the process as it is; after one of the device another one goes on.
    assert at["first"] == at["second"] == at["third"]
    assert len({at[piece] for piece in ("third", "fourth", "fifth", "sixth", "last")}) == 5


def test_what_the_deadline_cuts_off_is_left(tmp_path: Path) -> None:
    outcomes, left = done_by(tmp_path, ["first", "hangs", "last"], seconds=100, within=4)
    assert list(outcomes) == ["first"] and left == ["hangs", "last"]


def test_workers_share_the_pieces(tmp_path: Path) -> None:
    outcomes, _ = done_by(tmp_path, ["a", "b", "c", "is killed"], workers=2)
    at = {piece: outcome.found["process"] for piece, outcome in outcomes.items() if outcome.found is not None}
    assert at["a"] == at["c"] != at["b"]
    assert os.getpid() not in at.values()


def test_a_step_that_cannot_be_loaded_fails_as_a_whole(tmp_path: Path) -> None:
    outcomes, left = done_by(tmp_path, ["first", "second"], module="tests.profiling.gpu.nowhere")
    assert left == [] and list(outcomes) == ["first", "second"]
    assert all("No module named 'tests.profiling.gpu.nowhere'" in str(each.error) for each in outcomes.values())
