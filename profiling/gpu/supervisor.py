"""Runs a step's pieces in processes of their own: a crash, a hang or an error of the device costs one piece alone.

A worker (profiling.gpu.worker) says in lines of JSON which piece it begins and what came of it. One that dies or takes
too long is replaced, and the next goes on behind the piece that was in hand. A rehearsal holds nothing of size: one
process does its steps in turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from profiling.gpu.steps import Setting, Step

# A process that imports torch and starts a GPU needs this long before its first piece.
_START_SECONDS = 120.0
_LAST_LINES = 12


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a piece: what it found, or what went wrong; and the seconds that it took."""

    piece: str
    seconds: float
    found: dict[str, Any] | None = None
    error: str | None = None


@dataclass(eq=False)
class _Worker:
    """One process, the pieces that it has yet to do, and the one in hand."""

    process: subprocess.Popen[str]
    pieces: list[str]
    lines: queue.Queue[str | None]
    since: float = field(default_factory=time.monotonic)
    piece: str | None = None
    began: bool = False


# Processes that have done a step's pieces and wait for another's.
Idle = list[_Worker]


def run_pieces(
    step: Step,
    pieces: Sequence[str],
    setting: Setting,
    done: Callable[[Outcome], object],
    *,
    deadline: float,
    log: Path,
    environment: Mapping[str, str],
    idle: Idle | None = None,
) -> list[str]:
    """Do the pieces; `done` hears of each that ended. Those that the deadline (time.monotonic) cut off are returned.

    log: a file that takes what the processes say. idle: processes to go on with, and where those go that may do so.
    """
    count = 1 if setting.small else min(step.workers, os.cpu_count() or 1)
    shares = [list(pieces[i::count]) for i in range(count)]
    with log.open("a") as to:
        workers = [_start(step, share, setting, to, environment, idle) for share in shares if share]
        left: list[str] = []
        try:
            while workers:
                time.sleep(0.02)
                for worker in list(workers):
                    over = _listen(worker, step, done, log, idle)
                    if time.monotonic() >= deadline:
                        _end(worker)
                        left += worker.pieces
                        workers.remove(worker)
                    elif over:
                        workers.remove(worker)
                        if worker.pieces:
                            workers.append(_start(step, worker.pieces, setting, to, environment, idle))
        finally:
            for worker in workers:
                _end(worker)
    return left


def end_all(idle: Idle) -> None:
    """End the processes that wait."""
    while idle:
        _end(idle.pop())


def _start(
    step: Step, pieces: list[str], setting: Setting, log: Any, environment: Mapping[str, str], idle: Idle | None
) -> _Worker:
    """A process that does the pieces: one that waits, or a new one."""
    if idle:
        worker = idle.pop()
        worker = _Worker(process=worker.process, pieces=list(pieces), lines=worker.lines)
    else:
        worker = _new(pieces, log, environment)
    stdin = worker.process.stdin
    assert stdin is not None
    try:
        print(json.dumps({"module": step.module, "setting": asdict(setting), "pieces": pieces}), file=stdin, flush=True)
        if idle is None:
            stdin.close()
    except BrokenPipeError:
        pass  # It is dead already, which shows in its lines.
    return worker


def _new(pieces: list[str], log: Any, environment: Mapping[str, str]) -> _Worker:
    process = subprocess.Popen(
        [sys.executable, "-m", "profiling.gpu.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    return _Worker(process=process, pieces=list(pieces), lines=lines)


def _read(stream: Any, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _listen(worker: _Worker, step: Step, done: Callable[[Outcome], object], log: Path, idle: Idle | None) -> bool:
    """Take in what a worker has said; whether it is over, because it waits for more, ended or was ended."""
    while True:
        try:
            line = worker.lines.get_nowait()
        except queue.Empty:
            break
        now = time.monotonic()
        if line is None:
            worker.process.wait()
            if worker.pieces:
                _give_up(worker, f"its process {_how(worker.process.returncode)}: {_tail(log)}", done)
            return True
        said = json.loads(line)
        if "idle" in said:
            if idle is None:
                continue
            idle.append(worker)
            return True
        worker.began = True
        if "begin" in said:
            worker.piece = said["begin"]
        else:
            worker.pieces.remove(said["end"])
            worker.piece = None
            took = now - worker.since
            done(Outcome(piece=said["end"], seconds=took, found=said.get("found"), error=said.get("error")))
        worker.since = now
    limit = step.seconds if worker.piece is not None else _START_SECONDS
    if time.monotonic() - worker.since > limit:
        _end(worker)
        _give_up(worker, f"took more than {limit:.0f} s and was ended", done)
        return True
    return False


def _give_up(worker: _Worker, error: str, done: Callable[[Outcome], object]) -> None:
    """The piece in hand has failed, and all of them where none was ever begun: another process would do no better.

    None has where a process ends between two: it has said before that the device no longer serves it.
    """
    seconds = time.monotonic() - worker.since
    failed = [worker.piece] if worker.piece is not None else [] if worker.began else worker.pieces[:]
    for piece in failed:
        worker.pieces.remove(piece)
        done(Outcome(piece=piece, seconds=seconds, error=error))


def _end(worker: _Worker) -> None:
    """End the process and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()


def _how(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _tail(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-_LAST_LINES:])[-600:]
