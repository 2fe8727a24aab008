"""Ranks under torchrun: the same result by any number, after any kill; one error line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from artifacts import HeadwiseError
from profiling.ledger import Ledger
from profiling.ranks import Ranks, ranks
from tests.processes import ROOT, SECONDS, Process
from tests.profiling.ranked_work import MODEL, UNITS


class Launch:
    """Launches ranked_work by as many ranks as asked for; 0 is a process without torchrun."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out.json"
        self._running: list[Process] = []

    def start(self, count: int, *options: str) -> Process:
        words = (str(self.out), *options)
        self._running.append(Process("tests.profiling.ranked_work", *words, ranks=count))
        return self._running[-1]

    def finish(self, count: int, *options: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a launch."""
        return self.start(count, *options).finish()

    def begun(self) -> list[tuple[str, str, int]]:
        """Unit, rank and process of each beginning."""
        log = self.out.with_suffix(".log")
        lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        return [(f"unit {unit}", rank, int(pid)) for _, unit, rank, pid in lines]

    def process_at(self, unit: str) -> int:
        """The process that began a unit, once it has."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            for begun, _, pid in self.begun():
                if begun == unit:
                    return pid
            time.sleep(0.02)
        raise AssertionError(f"{unit} was not begun within {SECONDS} s")

    def kill(self) -> None:
        """kill -9 of everything that runs."""
        while self._running:
            self._running.pop().kill()


@pytest.fixture
def launch(tmp_path):
    launched = Launch(tmp_path)
    yield launched
    launched.kill()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Output of one process without torchrun."""
    launched = Launch(tmp_path_factory.mktemp("alone"))
    code, said, complained = launched.finish(0)
    assert code == 0 and said == f"wrote {launched.out}\n", complained
    return launched.out.read_bytes()


def test_ranks_write_what_one_process_writes(launch, alone):
    code, said, complained = launch.finish(3)
    assert code == 0 and said == f"wrote {launch.out}\n", complained
    assert launch.out.read_bytes() == alone
    units, by, _ = zip(*launch.begun(), strict=True)
    assert len(units) == len(set(units)) == UNITS
    assert set(by) == {"0", "1", "2"}
    left = sorted(path.suffix for path in launch.out.parent.iterdir())
    assert left == [".first", ".json", ".log"]


def test_ranks_with_one_killed_end_and_the_next_launch_resumes(launch, alone):
    process = launch.start(2, "--hang", "unit 4")
    killed = launch.process_at("unit 4")
    finished = {unit for unit, _, pid in launch.begun() if pid == killed and unit != "unit 4"}
    os.kill(killed, signal.SIGKILL)
    assert process.finish()[0] != 0
    assert not launch.out.exists()
    launch.out.with_suffix(".log").unlink()
    code, _, complained = launch.finish(3)
    assert code == 0 and launch.out.read_bytes() == alone, complained
    again = {unit for unit, _, _ in launch.begun()}
    assert "unit 4" in again and not again & finished


@pytest.mark.parametrize(
    ("options", "says", "status"),
    [
        # A job of the second rank.
        (("--fail=unit 5", "--grace=0.5"), "error: unit 5", 2),
        (("--all-fail",), "error: this cannot be for anybody", 2),
        (("--bug=unit 6",), "ZeroDivisionError", 1),
    ],
)
def test_ranks_with_a_failure_end_and_report_it_once(launch, options, says, status):
    code, printed, complained = launch.finish(2, *options)
    assert code != 0 and printed == "" and complained.count(says) == 1
    assert "[rank" not in complained, "a traceback of a rank"
    # torchrun's own report, of the rank that failed.
    assert re.search(rf"exitcode +: {status}", complained)
    assert not launch.out.exists()
    if "--all-fail" in options:
        assert not list(launch.out.parent.iterdir())


def test_ranks_report_an_error_of_the_first_rank_once(launch):
    with Ledger(launch.out, "work", MODEL, settings={"seed": 0}) as ledger:
        ledger.put(ledger.unit("unit 0"), 1)
    code, _, complained = launch.finish(2)
    assert code != 0 and complained.count("its seed is 0, not None") == 1


@pytest.mark.slow
@pytest.mark.exhaustive
def test_ranks_time_out_if_one_hangs(launch):
    began = time.monotonic()
    code, _, complained = launch.finish(2, "--hang", "unit 3", "--timeout", "2")
    assert code != 0 and time.monotonic() - began < 60
    assert "another rank was killed or did not answer" in complained


def test_barrier_that_fails_names_reason_and_how_to_resume(monkeypatch):
    def times_out(values):
        raise RuntimeError("a stack\nTimed out waiting 2000ms")

    monkeypatch.setattr("accelerate.utils.gather_object", times_out)
    monkeypatch.setattr("profiling.ranks._GRACE", 0.0)
    with pytest.raises(HeadwiseError, match=r"Timed out waiting.*rerun"):
        Ranks(0, 2).barrier()


def test_ranks_of_one_process_import_no_torch(monkeypatch):
    code = (
        "import sys\nfrom profiling.ranks import ranks\n"
        "with ranks() as r:\n"
        "    assert r.gather({'b': [1], 'a': 2}) == {'a': 2, 'b': [1]} and r.broadcast(3) == 3\n"
        "    r.barrier()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(HeadwiseError, match="WORLD_SIZE"), ranks():
        pass


def test_device_of_each_rank_is_another_gpu(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Ranks().device("cuda") == "cuda" and Ranks(5, 8, 1).device("cuda") == "cuda:1"
    assert Ranks(5, 8, 1).device("cpu") == "cpu" and Ranks(5, 8, 1).device("cuda:0") == "cuda:0"
    with pytest.raises(HeadwiseError, match=r"rank 6 .* 2"):
        Ranks(6, 8, 2).device("cuda")
