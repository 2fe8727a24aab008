"""--workers: copies share the work, end with the first process, and it alone writes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from artifacts import HeadwiseError
from search.workers import check_starter, is_worker, threads_for, workers
from tests.search.work_runs import SECONDS, Runs


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    started = Runs(tmp_path)
    yield started
    started.close()


def workers_of(runs: Runs) -> set[int]:
    return {pid for _, pid in runs.lines("ready")}


def wait_for_workers(runs: Runs, count: int) -> None:
    deadline = time.monotonic() + SECONDS
    while len({pid for _, pid in runs.lines("begin unit")}) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + SECONDS
    while any(is_there(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {pids}"
        time.sleep(0.05)


@pytest.mark.slow
def test_copies_share_the_work_and_the_first_process_writes(runs: Runs) -> None:
    first = runs.start("--workers", "2", "--seconds", "0.5")
    assert runs.finish(first) == ""
    assert len(workers_of(runs)) == 2
    assert {pid for _, pid in runs.lines("begin trial")} == workers_of(runs)
    assert set(runs.begun().values()) == {1} and len(runs.begun()) == 18
    assert [pid for _, pid in runs.lines("wrote")] == [first.pid]
    wait_until_gone(workers_of(runs))


@pytest.mark.slow
def test_a_copy_that_dies_is_told_and_its_work_is_done_by_others(runs: Runs) -> None:
    first = runs.start("--workers", "2", "--seconds", "0.5")
    wait_for_workers(runs, 2)
    (copy,) = workers_of(runs) - {first.pid}
    os.kill(copy, signal.SIGKILL)
    said = runs.finish(first)
    assert f"worker 2 of 2 (process {copy}) was killed by signal 9; the others go on" in said
    assert len(runs.begun()) == 18 and sum(runs.begun().values()) <= 19
    assert runs.lines("wrote")


@pytest.mark.slow
def test_an_interruption_ends_the_copies(runs: Runs) -> None:
    first = runs.start("--workers", "2", "--seconds", "0.5")
    wait_for_workers(runs, 2)
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=SECONDS)
    assert first.returncode == 130
    assert "the same command goes on from there" in said and "Traceback" not in said
    assert "worker 2" not in said
    wait_until_gone(workers_of(runs))
    runs.finish(runs.start("--workers", "2"))
    assert runs.lines("wrote")


@pytest.mark.slow
def test_copies_end_when_the_first_process_is_killed(runs: Runs) -> None:
    first = runs.start("--workers", "2", "--seconds", "0.5")
    wait_for_workers(runs, 2)
    runs.kill(first)
    wait_until_gone(workers_of(runs))
    assert not runs.lines("wrote")


def test_threads_are_split_and_never_more_than_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for told, count, threads in [("", 1, 8), ("", 3, 2), ("", 20, 1), ("1", 2, 1), ("16", 2, 4), ("4,2", 1, 4)]:
        monkeypatch.setenv("OMP_NUM_THREADS", told)
        assert threads_for(count) == threads, (told, count)


def test_this_process_gets_its_share_of_threads_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("subprocess.Popen", Sleeper)
    before = torch.get_num_threads()
    with workers(2, "search.heads", ["--model", "tiny", "--workers", "2"]):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == before
    assert Sleeper.command[1:] == ["-m", "search.heads", "--model", "tiny", "--workers", "2"]
    assert Sleeper.environment["OMP_NUM_THREADS"] == "2"


class Sleeper:
    """A process that ends when it is told to."""

    pid = 1
    command: list[str] = []  # noqa: RUF012
    environment: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, command: list[str], *, env: dict[str, str], **_: object) -> None:
        Sleeper.command, Sleeper.environment = command, env
        self._ended = False

    def terminate(self) -> None:
        self._ended = True

    def wait(self, timeout: float | None = None) -> int:
        while not self._ended:
            time.sleep(0.01)
        return -signal.SIGTERM


def test_one_worker_and_a_copy_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    with workers(1, "search.heads", []):
        assert not is_worker()
    monkeypatch.setenv("HEADWISE_WORKER", f"2:{os.getppid()}")
    with workers(4, "search.heads", []):
        assert is_worker()
        check_starter()
    monkeypatch.setenv("HEADWISE_WORKER", "2:1")
    if os.getppid() != 1:
        with pytest.raises(HeadwiseError, match="the process that started this worker is gone"):
            check_starter()


def test_less_than_one_worker_is_refused() -> None:
    with pytest.raises(HeadwiseError, match="--workers must be at least 1, got 0"), workers(0, "search.heads", []):
        pass
