"""Who of the processes that share a study is still there: each of them beats, and beats that stop say that it is gone.

Clocks of several machines differ, so nobody reads another's time: a process is gone when its beat has not changed for
a while by one's own clock, or at once where it is known to have run on this very machine and runs no more.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from optuna.storages import BaseStorage

BEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
_PREFIX = "headwise:"


class Alive:
    """The processes of one study as this one sees them.

    stale: seconds without a beat after which a process counts as gone.
    """

    def __init__(self, storage: BaseStorage, study_id: int, *, stale: float = STALE_SECONDS) -> None:
        self.me = _me()["id"]
        self._storage = storage
        self._study_id = study_id
        self._stale = stale
        self._seen: dict[str, tuple[int | None, float]] = {}
        self._beats = 0

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Let the others know that this process is there, until the block ends."""
        stop = threading.Event()

        def run() -> None:
            # A storage that fails for a moment costs a beat; one that fails for longer stops the work itself.
            while not stop.wait(min(BEAT_SECONDS, self._stale / 4)):
                with contextlib.suppress(Exception):
                    self._beat()

        self._beat()
        thread = threading.Thread(target=run, name="beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def gone(self, workers: set[str]) -> set[str]:
        """Those of the workers that will not finish what they began."""
        others = workers - {self.me}
        if not others:
            return set()
        records = self._storage.get_study_system_attrs(self._study_id)
        return {worker for worker in others if self._is_gone(worker, records.get(_PREFIX + worker))}

    def _is_gone(self, worker: str, record: dict[str, Any] | None) -> bool:
        if record is not None and record["machine"] and record["machine"] == _me()["machine"] and not _runs(record):
            return True
        now, beat = time.monotonic(), record["beat"] if record else None
        if worker not in self._seen or self._seen[worker][0] != beat:
            self._seen[worker] = beat, now
        return now - self._seen[worker][1] > self._stale

    def _beat(self) -> None:
        self._beats += 1
        self._storage.set_study_system_attr(self._study_id, _PREFIX + self.me, {**_me(), "beat": self._beats})


@cache
def _me() -> dict[str, Any]:
    """This process: a name that no other has, and what tells on the same machine whether it still runs."""
    return {
        "id": uuid.uuid4().hex[:12],
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
    }


def _machine() -> str | None:
    """What is the same for all processes that see each other's process numbers; None where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _runs(record: dict[str, Any]) -> bool:
    return _started(record["pid"]) == record["started"]


def _started(pid: int) -> str | None:
    """When a process began, in ticks since the machine did; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # Whoever started it may not have asked yet how it ended.
    return None if fields[0] in "ZX" else fields[19]
