"""python -m tests.artifacts.crash [KILLS]: kills writers and checks the files that they leave.

First a writer dies at each of its system calls, in a process for each, and once more with half of
the bytes written. Then KILLS writers die at random times, the last tenth of them among others that
write into the same file. The pair must always be the old or the new one, no acknowledged entry may
be lost, and the next writer leaves nothing unfinished: at most whole sidecars that no YAML names.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import artifacts
from tests.artifacts.conftest import build

NAMES = "open write pwrite pread fsync close replace unlink chmod fstat stat scandir listdir"
CALLS = (*((os, name) for name in NAMES.split()), (fcntl, "flock"))


def content(number: int) -> tuple[artifacts.Artifact, dict[str, Any]]:
    """Artifact number 0, 1, 2, ...: its seed and its arrays hold the number."""
    artifact = build()
    artifact = artifact.model_copy(
        update={"search": artifact.search.model_copy(update={"seed": number})}
    )
    return artifact, {"number": np.full(4096, number, np.int32)}


def write(path: Path, number: int) -> artifacts.Artifact:
    artifact, arrays = content(number)
    return artifacts.save(artifact, path, arrays)


def number_at(path: Path) -> int:
    """The number of the artifact at `path`; raises where the two files are no pair."""
    artifact, arrays = artifacts.load_pair(path)
    assert (arrays["number"] == artifact.search.seed).all()
    return artifact.search.seed


def die_at(call: int, *, torn: bool) -> None:
    """Die at the call-th call from now on, before it; if `torn`, at the call-th write, with half of
    it written."""
    count = 0

    def counted(real: Any, writes: bool) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += writes or not torn
            if count == call:
                if torn:
                    real(args[0], args[1][: len(args[1]) // 2], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return step

    for module, name in CALLS:
        setattr(module, name, counted(getattr(module, name), name in ("write", "pwrite")))


def at_each_call(folder: Path, *, torn: bool) -> Counter[int]:
    """Counts of finding the old (0) and the new artifact (1), over the calls of one save."""
    seen: Counter[int] = Counter()
    path = folder / "cfg.yaml"
    for call in range(1, 1000):
        write(path, 0)
        if (child := os.fork()) == 0:
            die_at(call, torn=torn)
            write(path, 1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        seen[number_at(path)] += 1
        next_writer_clears(path)
        if status == 0:
            return seen
        assert os.WTERMSIG(status) == signal.SIGKILL, f"call {call} ended with {status}"
    raise AssertionError("the write did not end")


def next_writer_clears(path: Path) -> None:
    """Save once more, look for leftovers, and remove the sidecars that no YAML names."""
    saved = write(path, 2)
    wanted = {path.name, saved.sidecar.file if saved.sidecar else ""}
    unused = set(os.listdir(path.parent)) - wanted
    assert all(re.fullmatch(r"cfg\.[0-9a-f]{8}\.safetensors", name) for name in unused), unused
    assert wanted <= set(os.listdir(path.parent))
    for name in unused:
        (path.parent / name).unlink()


def at_random(folder: Path, kills: int) -> Counter[str]:
    """Counts of killed writers with leftovers and without; each writes until it dies."""
    path = folder / "cfg.yaml"
    chance = random.Random(0)
    seen: Counter[str] = Counter()
    started = time.perf_counter()
    for number in range(8):
        write(path, number)
    seconds = (time.perf_counter() - started) / 8
    for _ in range(kills):
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.write(writing, b"x")
            for turn in range(10**9):
                write(path, turn % 4)
        os.read(reading, 1)
        os.close(reading)
        os.close(writing)
        time.sleep(chance.uniform(0, 3 * seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert number_at(path) in range(8)
        seen["leftovers" if len(os.listdir(folder)) > 2 else "no leftovers"] += 1
        next_writer_clears(path)
    return seen


def among_others(folder: Path, kills: int) -> int:
    """Kill three writers that add entries to one artifact; returns the entries acknowledged."""
    path = folder / "cfg.yaml"
    write(path, 0)
    reading, writing = os.pipe()
    chance = random.Random(1)

    def start() -> int:
        if child := os.fork():
            return child
        for turn in range(10**9):
            name = f"{os.getpid()}.{turn}"
            artifacts.update(
                path, lambda artifact, arrays, name=name: (with_entry(artifact, name), arrays)
            )
            os.write(writing, f"{name}\n".encode())
        raise AssertionError("never comes here")

    children = [start() for _ in range(3)]
    # On a busy machine the first entry takes its time.
    select.select([reading], [], [])
    for _ in range(kills):
        time.sleep(chance.uniform(0, 0.2))
        child = children.pop(chance.randrange(3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        children.append(start())
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os.close(writing)
    with open(reading, encoding="ascii") as stream:
        reported = stream.read().split()
    retained = {entry.name for entry in artifacts.load_pair(path)[0].evidence.measurements}
    assert retained >= set(reported), f"lost: {sorted(set(reported) - retained)}"
    next_writer_clears(path)
    return len(reported)


def with_entry(artifact: artifacts.Artifact, name: str) -> artifacts.Artifact:
    """One more entry of evidence, of that name."""
    entry = artifact.evidence.measurements[0].model_copy(update={"name": name})
    return artifact.model_copy(update={"evidence": artifact.evidence.with_measurements([entry])})


def main(kills: int) -> None:
    """Print one JSON object with the counts."""
    folder = Path(tempfile.mkdtemp())
    try:
        report: dict[str, Any] = {
            "before": at_each_call(folder, torn=False),
            "torn": at_each_call(folder, torn=True),
        }
        report["random"] = at_random(folder, kills - kills // 10)
        print(json.dumps({**report, "kept": among_others(folder, kills // 10)}))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
