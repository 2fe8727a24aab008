"""Peak memory of a prefill by length: without an artifact and with one, beside what was predicted.

    python -m profiling.memory cfg.yaml --model smollm2 --length 8192 16384 32768 --dense

Each figure comes from a process of its own (profiling.memory_use.peak_memory). `passing` is what is there at most
beside weights and the cache, `predicted` the same by profiling.memory_plan. Prompts are random tokens, so lengths may
go beyond the model's positions.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from artifacts import HeadwiseError, arguments, load
from artifacts.command_line import ArgumentParser, run_command
from artifacts.page_layout import aligned
from profiling.environment import environment
from profiling.memory_plan import plan, shape_of
from profiling.memory_use.peak_memory import peak_apart
from profiling.models.loading import load_config
from profiling.progress import bar
from runtime.new_cache import OFFLOADS


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What to measure. dense: also without an artifact."""

    model: str
    config: Path
    lengths: tuple[int, ...]
    dense: bool = False
    offload: str = "auto"
    dtype: str = "bfloat16"
    device: str = "cpu"
    revision: str | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """Bytes of one prefill beside the model: at most, of those the cache's, and beside that, measured and predicted."""

    method: str
    length: int
    peak: int
    cache: int
    passing: int
    predicted: int | None


def run(config: Memory) -> list[Row]:
    """Measure each length with each method, one process at a time.

    Raises:
        HeadwiseError: the model or the artifact cannot be loaded, or a process failed.
    """
    load(config.config)
    try:
        shape = shape_of(load_config(config.model, revision=config.revision), config.dtype)
    except HeadwiseError as error:
        print(f"no prediction: {error}", file=sys.stderr)
        shape = None
    wanted = ["dense", "headwise"] if config.dense else ["headwise"]
    rows = []
    for length, method in bar([(n, m) for n in config.lengths for m in wanted], leave=True):
        found = peak_apart(
            f"{method} at {length} tokens",
            config.model,
            length,
            config=None if method == "dense" else config.config,
            offload=config.offload,
            dtype=config.dtype,
            device=config.device,
            revision=config.revision,
        )
        rows.append(
            Row(
                method=method,
                length=length,
                peak=found.peak,
                cache=found.cache,
                passing=max(0, found.peak - found.cache),
                predicted=None if shape is None else plan(shape, length).passing,
            )
        )
    return rows


def table(rows: list[Row]) -> str:
    """The figures in MiB, and those that pass also for each token."""
    lines = [["tokens", "method", "peak", "cache", "passing", "predicted", "bytes a token"]]
    for row in rows:
        numbers = (row.peak, row.cache, row.passing, row.predicted)
        mib = ["-" if number is None else f"{number / 2**20:.1f}" for number in numbers]
        lines.append([str(row.length), row.method, *mib, f"{row.passing / row.length:.0f}"])
    return "\n".join(aligned(lines))


def parser() -> ArgumentParser:
    """The command line of python -m profiling.memory."""
    p = ArgumentParser(prog="python -m profiling.memory", description=__doc__)
    arguments.add_model(p)
    arguments.add_artifact(p, old="--config")
    arguments.add_length(p, "tokens of the prompts", several=True, required=True, old="--lengths")
    p.add_argument("--dense", action="store_true", help="also the model without an artifact")
    p.add_argument("--offload", choices=OFFLOADS, default="auto", help="where the cache keeps keys and values")
    arguments.add_dtype(p)
    arguments.add_device(p)
    arguments.add_revision(p)
    arguments.add_json(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    to_json, options["lengths"] = options.pop("json"), tuple(options.pop("length"))
    if min(options["lengths"]) < 1:
        raise HeadwiseError(f"--length must be at least 1, got {min(options['lengths'])}")
    config = Memory(**options)
    rows = run(config)
    record = {
        "command": arguments.as_typed("profiling.memory", argv),
        "rows": [asdict(row) for row in rows],
        "settings": {**asdict(config), "config": config.config.name},
        "environment": environment(config.device),
    }
    arguments.deliver(table(rows), record, to_json)
    return 0


if __name__ == "__main__":
    run_command(main)
