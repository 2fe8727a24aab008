"""python -m profiling.overhead: what an applied artifact costs where it does nothing: short prompts and plain decode.

A prompt below dense_below and a decode step without a decode section are served as without an artifact; the same
forward with one and without is timed in turn, and so is decode by Headwise's own kernel. The time that Python spends in
the attention function is told apart: see profiling.speed.python_time. With --beside, so is what a prefill takes beside
attention: see profiling.speed.beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import transformers

from artifacts import Artifact, Dense, HeadwiseError, Prefill, arguments
from artifacts.command_line import ArgumentParser, run_command
from profiling.environment import environment
from profiling.models.loading import LoadedModel, load_model
from profiling.speed.beside import Beside, beside_attention
from profiling.speed.latency import interleaved, medians, prefill
from profiling.speed.python_time import PythonTime, python_time
from profiling.speed.ratios import Ratio, ratio_of_pairs
from profiling.startup import example
from runtime import Headwise
from runtime.fingerprint import fingerprint
from runtime.layers import attention_layers, heads_of, sliding_layers

_STEPS = 4
# Tokens that prompts are made of: every vocabulary has so many.
_VOCABULARY = 1000
Contexts = dict[str, Callable[[], AbstractContextManager[object]]]


@dataclass(frozen=True, kw_only=True)
class OverheadConfig:
    """Which model, prompts of how many tokens, how often each is timed, and in how many threads.

    beside: lengths of which the time beside attention is measured.
    """

    model: str = "smollm2"
    dtype: str = "bfloat16"
    device: str = "cpu"
    lengths: tuple[int, ...] = (64, 256, 1024, 2048)
    beside: tuple[int, ...] = ()
    repeats: int = 30
    threads: int = 2


@dataclass(frozen=True, kw_only=True)
class Row:
    """One length: seconds without an artifact, and how many times as long each alternative took."""

    what: str
    tokens: int
    plain_s: float
    ratios: dict[str, Ratio]


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """All that was measured."""

    rows: list[Row]
    python: list[PythonTime]
    beside: list[Beside]


def run(config: OverheadConfig) -> Overhead:
    """Measure prefill, decode, and Python's part of a call.

    Raises:
        HeadwiseError: a size that is none, or a model that cannot be loaded or served.
    """
    for name, value in (
        ("repeats", config.repeats),
        ("threads", config.threads),
        *(("length", n) for n in config.lengths),
        *(("beside", n) for n in config.beside),
    ):
        if value < 1:
            raise HeadwiseError(f"--{name} must be at least 1, got {value}")
    torch.set_num_threads(config.threads)
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    headwise = idle(loaded, 1 + max(config.lengths))
    with torch.no_grad():
        rows = [row for tokens in config.lengths for row in _rows(loaded, headwise, tokens, config)]
        python = python_time(loaded.model, headwise, idle(loaded, 1), max(64, *config.lengths))
        return Overhead(rows=rows, python=python, beside=beside_attention(loaded.model, config.beside))


def idle(loaded: LoadedModel, dense_below: int) -> Headwise:
    """An artifact whose patterns serve no prompt below `dense_below`, and keep all of a longer one."""
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    modules = attention_layers(loaded.model)
    slides, row = sliding_layers(modules), ("dense",) * heads_of(loaded.model)[0]
    layers = tuple(row if layer in modules and layer not in slides else None for layer in range(model.num_layers))
    sections = Prefill(dense_below=dense_below, layers=layers)
    # No search found these, and an artifact with patterns says which did.
    search = example(layers=1, heads=1, names=1).search
    return Headwise(Artifact(model=model, search=search, patterns={"dense": Dense()}, prefill=sections))


def _rows(loaded: LoadedModel, headwise: Headwise, tokens: int, config: OverheadConfig) -> list[Row]:
    model = loaded.model
    ids = torch.randint(3, _VOCABULARY, (1, tokens), device=model.device)
    applied: Contexts = {
        "plain": nullcontext,
        "applied": lambda: headwise.apply(model, check_weights=False, dense_kernels=False),
    }
    cache = transformers.DynamicCache(config=model.config)
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def steps() -> None:
        for _ in range(_STEPS):
            model(ids[:, :1], past_key_values=cache, use_cache=True)
        cache.crop(-_STEPS)

    by_kernel: Contexts = applied | {"by kernel": lambda: headwise.apply(model, check_weights=False)}
    how: dict[str, Any] = {"repeats": config.repeats, "device": config.device}
    return [
        _row("prefill", tokens, _timed(applied, lambda: prefill(model, ids), how)),
        _row("decode", tokens, _timed(by_kernel, steps, how)),
    ]


def _timed(contexts: Contexts, run: Callable[[], None], how: dict[str, Any]) -> dict[str, list[float]]:
    """Each second run in a context: the first one after the attention was switched pays for the switch."""

    @contextmanager
    def warmed(context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        with context():
            run()
            yield

    return interleaved({name: partial(warmed, context) for name, context in contexts.items()}, run, **how)


def _row(what: str, tokens: int, seconds: dict[str, list[float]]) -> Row:
    plain = seconds["plain"]
    ratios = {name: ratio_of_pairs(values, plain) for name, values in seconds.items() if name != "plain"}
    return Row(what=what, tokens=tokens, plain_s=medians(seconds)["plain"], ratios=ratios)


def report(config: OverheadConfig, found: Overhead) -> str:
    """A table for people."""
    place = f"{config.model}, {config.dtype}, {config.device}, {config.threads} threads, torch {torch.__version__}"
    lines = [f"{place}, transformers {transformers.__version__}; medians of {config.repeats} rounds, 95% intervals"]
    for row in found.rows:
        told = ", ".join(f"{name} {r.value:.3f} ({r.low:.3f}-{r.high:.3f})" for name, r in row.ratios.items())
        lines.append(f"{row.what:8}{row.tokens:7} tokens  plain {1000 * row.plain_s:9.2f} ms  times as long: {told}")
    for part in found.python:
        lines.append(f"Python in a layer's call, {part.what}: {part.microseconds:.1f} us, {part.own:.1f} us of it ours")
    for one in found.beside:
        times = f"{one.seconds / found.beside[0].seconds:.2f} times what {found.beside[0].tokens} take"
        lines.append(
            f"beside attention{one.tokens:7} tokens{one.seconds:9.2f} s, linear layers {one.linear_s:.2f}: {times}"
        )
    return "\n".join(lines)


def parser() -> ArgumentParser:
    defaults = OverheadConfig()
    made = ArgumentParser(prog="python -m profiling.overhead", description=__doc__)
    arguments.add_model(made, f"{arguments.MODEL} (default %(default)s)", default=defaults.model)
    arguments.add_dtype(made, default=defaults.dtype)
    arguments.add_device(made, default=defaults.device)
    arguments.add_length(made, "tokens of the prompts", several=True, default=defaults.lengths, old="--lengths")
    made.add_argument(
        "--beside", type=int, nargs="+", metavar="N", default=(), help="lengths whose time beside attention is measured"
    )
    made.add_argument("--repeats", type=int, default=defaults.repeats, help="rounds; default: %(default)s")
    made.add_argument("--threads", type=int, default=defaults.threads, help="of the CPU; default: %(default)s")
    arguments.add_json(made)
    return made


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    to_json, lengths = options.pop("json"), tuple(options.pop("length"))
    config = OverheadConfig(**options | {"lengths": lengths, "beside": tuple(options["beside"])})
    found = run(config)
    record = {
        "command": arguments.as_typed("profiling.overhead", argv),
        **asdict(config),
        "environment": environment(config.device),
        **asdict(found),
    }
    arguments.deliver(report(config, found), record, to_json)
    return 0


if __name__ == "__main__":
    run_command(main)
