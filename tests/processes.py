"""Commands in separate processes, for tests of kills, exit codes and ranks.

They are forks of one server, which has imported the heavy packages and computed nothing. A command
runs as with `python -m`, or under torchrun, whose ranks are forks too.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 120.0
servers = multiprocessing.get_context("forkserver")
servers.set_forkserver_preload(["tests.heavy"])


class Process:
    """A command that runs. Its process is the first of a group, which the ranks of torchrun belong
    to."""

    def __init__(self, module: str, *words: str, ranks: int = 0) -> None:
        """Start `python -m module words` in the checkout; with `ranks`, under torchrun."""
        self._folder = tempfile.TemporaryDirectory()
        arguments = module, words, ranks, self._folder.name
        self._process = servers.Process(target=_run, args=arguments)
        self._process.start()
        self.pid = self._process.pid or 0

    @property
    def code(self) -> int | None:
        """The exit code, below 0 of one that a signal ended; None while it runs."""
        return self._process.exitcode

    def finish(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr, when it has ended."""
        self._process.join(SECONDS)
        assert self.code is not None, f"it runs for more than {SECONDS} s"
        folder = Path(self._folder.name)
        return self.code, (folder / "stdout").read_text(), (folder / "stderr").read_text()

    def kill(self) -> None:
        """kill -9 of the whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join(SECONDS)


def interpret(module: str, *words: str) -> Any:
    """JSON that a module prints in a process in which Triton interprets all of its kernels."""
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _run(module: str, words: tuple[str, ...], ranks: int, folder: str) -> None:
    os.setsid()
    os.chdir(ROOT)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
    if not ranks:
        _as_main(module, *words)
        return
    from torch.distributed.run import main

    launcher = f"--standalone --nproc_per_node {ranks} --start-method fork --run-path"
    main([*launcher.split(), __file__, module, *words])


def _as_main(module: str, *words: str) -> None:
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    # A rank, which ends as an interpreter does: torchrun would report an error that a function of
    # its own raises.
    try:
        _as_main(*sys.argv[1:])
    except Exception:
        traceback.print_exc()
        sys.exit(1)
