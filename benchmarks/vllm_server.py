"""`vllm serve` as users start it, under concurrent requests, with an artifact and without.

    python benchmarks/vllm_server.py --model FOLDER --config cfg.yaml --json out.json

Both servers are up at once and asked in turn. Retrieval prompts of mixed lengths go to each one by
one, then by several clients at once, round after round. The report has the errors, right answers,
outputs equal to those of the same request alone, tokens a second relative to vLLM's own, the memory
before and after each round, and how each server ends when its worker is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from result import Result, commit, labeled, machine_of, write
from transformers import AutoTokenizer

from artifacts.cli.command import run_command
from artifacts.cli.parser import ArgumentParser
from profiling.environment import environment
from profiling.prompts.kind import Prompt
from profiling.prompts.metrics import score
from profiling.prompts.prompt import Task, make_prompts

_START = 300.0
_TASKS = tuple(map(Task, ("passkey", "kv_retrieval", "line_retrieval")))
_SETTINGS = ("lengths", "streams", "tokens", "times_the_tokens")


class Server:
    """A server of vLLM, and the processes that it has started."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, model: str) -> None:
        self.process = process
        self._at, self._model = f"http://127.0.0.1:{port}", model

    def ready(self) -> bool:
        """True if it answers; an error if it has ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"the server ended with status {self.process.returncode}")
        try:
            with urllib.request.urlopen(f"{self._at}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def ask(self, prompt: list[int], tokens: int) -> str:
        """The text that follows, greedily."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"{self._at}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
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
        pids = [self.process.pid]
        for pid in pids:
            pids += [child for child, parent in parents.items() if parent == pid]
        return pids

    def worker(self) -> int:
        """The process of the engine: the largest."""
        return max(
            self.family()[1:],
            key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]),
        )


@contextmanager
def server(model: str, artifact: str | None, settings: list[str], log: Path) -> Iterator[Server]:
    """A server that is up; it and its processes are gone afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = (
        []
        if artifact is None
        else ["--additional-config", json.dumps({"headwise": {"artifact": artifact}})]
    )
    # The module that `vllm serve` starts: the command itself needs a package named vllm, and vLLM's
    # build for CPUs has another name.
    main = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    # The same prompts are asked again and again: each time they are computed.
    command = [
        *main,
        "--model",
        model,
        "--port",
        str(port),
        "--no-enable-prefix-caching",
        *settings,
        *config,
    ]
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
    """Send all prompts by `streams` clients: outputs in order, errors, seconds, and memory before
    and after."""
    before, began = up.memory(), time.monotonic()

    def one(prompt: list[int]) -> tuple[str | None, float]:
        start = time.monotonic()
        try:
            return up.ask(prompt, tokens), time.monotonic() - start
        except (urllib.error.URLError, OSError) as error:
            print(f"a request of {len(prompt)} tokens failed: {error}", flush=True)
            return None, time.monotonic() - start

    with ThreadPoolExecutor(streams) as clients:
        done = list(clients.map(one, prompts))
    seconds = time.monotonic() - began
    return {
        "outputs": [text for text, _ in done],
        "errors": sum(text is None for text, _ in done),
        "seconds": seconds,
        "slowest": max(taken for _, taken in done),
        "tokens_a_second": (sum(map(len, prompts)) + tokens * len(prompts)) / seconds,
        "memory": [before, up.memory()],
    }


def killed(up: Server, prompt: list[int]) -> dict[str, Any]:
    """Kill the worker in the middle of a request: the client's error and the server's status."""
    with ThreadPoolExecutor(1) as client:
        request = client.submit(up.ask, prompt, 400)
        time.sleep(1)
        start = time.monotonic()
        os.kill(up.worker(), signal.SIGKILL)
        try:
            request.result(120)
            seen = "an answer"
        except (urllib.error.URLError, OSError) as error:
            seen = str(error)
        status = up.process.wait(120)
    return {"client": seen, "status": status, "seconds": time.monotonic() - start}


class ServerRecord:
    """Results of one server."""

    def __init__(self, up: Server, prompts: list[Prompt], tokens: int) -> None:
        self.up, self._prompts, self._tokens = up, prompts, tokens
        self._alone: list[str] = []
        self.rounds: list[dict[str, Any]] = []

    def ask_alone(self) -> dict[str, Any]:
        """Every prompt after the other."""
        start = time.monotonic()
        self._alone = [
            self.up.ask(list(prompt.input_ids), self._tokens) for prompt in self._prompts
        ]
        return {"seconds": time.monotonic() - start, "right": self._right(self._alone)}

    def round(self, streams: int) -> dict[str, Any]:
        """One round of the load, with how many outputs are those of the request alone."""
        done = load(
            self.up, [list(prompt.input_ids) for prompt in self._prompts], streams, self._tokens
        )
        outputs = done.pop("outputs")
        done["right"] = self._right(outputs)
        done["as_alone"] = sum(a == b for a, b in zip(self._alone, outputs, strict=True))
        self.rounds.append(done)
        return done

    def _right(self, outputs: list[str | None]) -> int:
        return sum(
            score(prompt, text or "") == 1
            for prompt, text in zip(self._prompts, outputs, strict=True)
        )

    @property
    def loaded(self) -> float:
        """Seconds under load so far."""
        return sum(each["seconds"] for each in self.rounds)


def prompts_of(tokenizer: Any, count: int, shortest: int, longest: int) -> list[Prompt]:
    """Retrieval prompts of lengths spread evenly between two, those included."""
    prompts = []
    for i in range(count):
        length = shortest + (longest - shortest) * i // max(count - 1, 1)
        task = _TASKS[i % len(_TASKS)]
        prompts += make_prompts(task, tokenizer, length=length, samples=1, seed=i)
    return prompts


def result_of(report: dict[str, Any], versions: dict[str, str]) -> Result:
    """The result file: for each server its summary, and each round."""
    engines, answers, summaries, rates, rounds = [], [], [], [], []
    for name in ("own", "headwise"):
        own = report[name]
        engine = {"engine": name}
        each = own["rounds"]
        alone = own["alone"]
        engines.append(engine | {"alone_seconds": alone["seconds"], "killed": own["killed"]})
        right = [one["right"] for one in each]
        answers.append(engine | {"alone_right": alone["right"], "clients_right": min(right)})
        summary = {
            "failed": sum(one["errors"] for one in each),
            "seconds": round(statistics.median(one["seconds"] for one in each)),
            "slowest_seconds": round(max(one["slowest"] for one in each)),
            "equal_to_alone": [one["as_alone"] for one in each],
            "memory_gb": [round(each[at]["memory"][at] / 1e9, 2) for at in (0, -1)],
        }
        summaries.append(engine | summary)
        middle = statistics.median(one["tokens_a_second"] for one in each)
        rates.append(engine | {"tokens_a_second": round(middle)})
        rounds += [engine | one for one in each]
    settings = {name: report[name] for name in _SETTINGS}
    return Result(
        what="vllm serve under concurrent clients, with an artifact and without",
        command="python benchmarks/vllm_server.py --model FOLDER --config cfg.yaml --json out.json",
        commit=commit(),
        machine=machine_of(environment()),
        versions=versions,
        rows=labeled("settings", [settings])
        + labeled("engine", engines)
        + labeled("answers", answers)
        + labeled("round", summaries)
        + labeled("rates", rates)
        + labeled("rounds", rounds),
    )


def main(argv: list[str] | None = None) -> int:
    """Command line entry point: 1 if a request failed."""
    p = ArgumentParser(description=__doc__)
    p.add_argument("--model", required=True, help="a folder")
    p.add_argument("--config", required=True, help="the artifact")
    p.add_argument("--streams", type=int, default=8, help="clients at once (default 8)")
    p.add_argument("--prompts", type=int, default=16, help="requests of a round (default 16)")
    p.add_argument("--lengths", type=int, nargs=2, default=(200, 8000), metavar=("FROM", "TO"))
    p.add_argument("--tokens", type=int, default=32, help="how many to generate (default 32)")
    p.add_argument("--rounds", type=int, default=3, help="rounds of both in turn (default 3)")
    p.add_argument(
        "--seconds",
        type=float,
        default=180,
        help="load that the artifact has at least (default 180)",
    )
    p.add_argument(
        "--json", type=Path, required=True, help="the figures; the servers' logs are next to it"
    )
    p.add_argument("settings", nargs="*", help="of vllm serve, behind --")
    options = p.parse_args(argv)
    # A command that is stopped stops its servers, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompts = prompts_of(tokenizer, options.prompts, *options.lengths)
    random.Random(0).shuffle(prompts)
    versions = {name: version(name) for name in ("vllm-cpu", "torch", "transformers")}
    report: dict[str, Any] = {
        "lengths": [len(prompt.input_ids) for prompt in prompts],
        "streams": options.streams,
        "tokens": options.tokens,
    }
    with ExitStack() as stack:
        ways = {
            name: ServerRecord(
                stack.enter_context(
                    server(
                        options.model,
                        artifact,
                        options.settings,
                        options.json.with_suffix(f".{name}.log"),
                    )
                ),
                prompts,
                options.tokens,
            )
            for name, artifact in (("own", None), ("headwise", options.config))
        }
        for name, way in ways.items():
            way.up.ask(list(max((prompt.input_ids for prompt in prompts), key=len)), 1)
            alone = way.ask_alone()
            report[name] = {"alone": alone}
            print(f"{name}, {len(prompts)} requests one by one: {alone}", flush=True)
        while (
            len(ways["headwise"].rounds) < options.rounds
            or ways["headwise"].loaded < options.seconds
        ):
            for name, way in ways.items():
                if name == "headwise" or len(way.rounds) < options.rounds:
                    figures = ", ".join(
                        f"{key} {value}" for key, value in way.round(options.streams).items()
                    )
                    print(
                        f"{name}: {len(prompts)} requests by {options.streams} clients: {figures}",
                        flush=True,
                    )
        rates = zip(
            *([each["tokens_a_second"] for each in way.rounds] for way in ways.values()),
            strict=False,
        )
        ratios = [headwise / own for own, headwise in rates]
        report["times_the_tokens"] = ratios
        print(f"tokens a second: {statistics.median(ratios):.2f} times vLLM's own", flush=True)
        for name, way in ways.items():
            report[name] |= {
                "rounds": way.rounds,
                "killed": killed(way.up, list(prompts[0].input_ids)),
            }
            print(f"{name}: worker killed: {report[name]['killed']}", flush=True)
    write(options.json, result_of(report, versions))
    return int(any(each["errors"] for way in ways.values() for each in way.rounds))


if __name__ == "__main__":
    run_command(main)
