"""Starts shared_work in processes of their own, kills them, and reads what they wrote down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120.0


class Runs:
    """Processes that search for the same artifact."""

    def __init__(self, folder: Path, storage: str | None = None) -> None:
        self.out = folder / "cfg.yaml"
        self._storage = storage
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, *options: str, storage: str | None = None) -> subprocess.Popen[str]:
        """One more process."""
        command = [sys.executable, "-m", "tests.search.shared_work", str(self.out), *options]
        if where := storage or self._storage:
            command += ["--storage", where]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        self._processes.append(process)
        return process

    def lines(self, what: str) -> list[tuple[str, int]]:
        """Keys and processes of the log's lines that begin with `what`."""
        log = self.out.with_suffix(".log")
        found = [line for line in log.read_text().splitlines() if line.startswith(what)] if log.exists() else []
        return [(key, int(pid)) for key, _, pid in (line.removeprefix(what + " ").rpartition(" ") for line in found)]

    def begun(self) -> Counter[str]:
        """How often each unit and trial was begun."""
        return Counter(key for kind in ("begin unit", "begin trial") for key, _ in self.lines(kind))

    def wait_for(self, what: str, key: str) -> int:
        """The process that wrote the line, once it is there."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            for found, pid in self.lines(what):
                if found == key:
                    return pid
            time.sleep(0.02)
        raise AssertionError(f"no {what} {key} within {SECONDS} s")

    def finish(self, process: subprocess.Popen[str]) -> str:
        """What a process said on stderr; it must end well."""
        _, said = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, said
        return said

    def kill(self, process: subprocess.Popen[Any]) -> None:
        process.send_signal(signal.SIGKILL)
        process.wait(SECONDS)

    def close(self) -> None:
        """End what a failed test left running."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
