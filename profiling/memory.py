"""Peak memory of a prefill by length, without an artifact and with one: measured, and predicted.

    headwise memory cfg.yaml --model smollm2 --length 8192 16384 32768 --dense
    headwise memory --plan config.json --length 131072 524288 1048576 --memory 139GB

Each figure comes from a process of its own (profiling.memory_use.peak_memory). `passing` is what is
there at most beside weights and the cache, `predicted` the same from the model's configuration.
Prompts are random tokens, so lengths may go beyond the model's positions. --plan only predicts,
from a config.json, the folder of one, or such JSON on the command line: no weights are read."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from artifacts import HeadwiseError, load
from artifacts.cli import arguments
from artifacts.cli.command import ArgumentParser, run_command
from artifacts.cli.options import add_arguments, at_least, check_ranges, config_of, option, shared
from artifacts.page.layout import aligned
from profiling.environment import environment
from profiling.memory_use.peak_memory import peak_apart
from profiling.memory_use.plan import plan, read_shape, shape_of
from profiling.memory_use.plan import table as plan_table
from profiling.memory_use.sizes import bytes_of
from profiling.models.loading import load_config, settled
from profiling.progress import bar
from runtime.caches.make import OFFLOADS


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What to measure, or with a plan to predict."""

    config: Path | None = shared(arguments.add_artifact, nargs="?", default=None)
    model: str | None = shared(arguments.add_model, required=False, default=None)
    length: tuple[int, ...] = shared(
        arguments.add_length, "tokens of the prompts", several=True, required=True
    )
    dense: bool = option("also the model without an artifact", default=False, action="store_true")
    offload: str = option("where the cache keeps keys and values", default="auto", choices=OFFLOADS)
    plan: str | None = option(
        "only predict: config.json, a folder with one, or its JSON", default=None, metavar="SHAPE"
    )
    banked: int = option(
        "with --plan: layers whose keys and values are offloaded", default=0, within=at_least(0)
    )
    memory: int | None = option(
        "with --plan: bytes of the device, such as 139GB: which rows fit",
        default=None,
        read=lambda text: bytes_of(text, "--memory"),
    )
    dtype: str = shared(arguments.add_dtype, default="auto")
    device: str = shared(arguments.add_device, default="cpu")
    revision: str | None = shared(arguments.add_revision, default=None)

    def __post_init__(self) -> None:
        check_ranges(self)
        if min(self.length) < 1:
            raise HeadwiseError(f"--length must be at least 1, got {min(self.length)}")
        if self.plan is None and (self.config is None or self.model is None):
            raise HeadwiseError(
                "name an artifact and its model with --model, or a configuration with --plan"
            )


@dataclass(frozen=True, kw_only=True)
class Row:
    """Bytes of one prefill beside the model: at most, of those the cache's, and beside that,
    measured and predicted."""

    method: str
    length: int
    peak: int
    cache: int
    passing: int
    predicted: int | None


def predicted(config: Memory) -> str:
    """The plan of each length.

    Raises:
        HeadwiseError: no such configuration, or layers that it does not have.
    """
    assert config.plan is not None
    # A plan is of no machine.
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    shape = read_shape(config.plan, dtype)
    full = shape.layers - shape.sliding
    if config.banked > full:
        raise HeadwiseError(
            f"--banked must be 0 to {full}, the layers that see all: got {config.banked}"
        )
    return plan_table(shape, config.length, config.memory, config.banked)


def run(config: Memory) -> list[Row]:
    """Measure each length with each method, one process at a time.

    Raises:
        HeadwiseError: the model or the artifact cannot be loaded, or a process failed.
    """
    config = settled(config)
    assert config.config is not None and config.model is not None
    load(config.config)
    try:
        shape = shape_of(load_config(config.model, revision=config.revision), config.dtype)
    except HeadwiseError as error:
        print(f"no prediction: {error}", file=sys.stderr)
        shape = None
    wanted = ["dense", "headwise"] if config.dense else ["headwise"]
    rows = []
    for length, method in bar([(n, m) for n in config.length for m in wanted], leave=True):
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
    """The command line of headwise memory."""
    p = ArgumentParser(prog="headwise memory", description=__doc__)
    add_arguments(p, Memory)
    arguments.add_json(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = parser().parse_args(argv)
    config = config_of(Memory, vars(options))
    if config.plan is not None:
        print(predicted(config))
        return 0
    rows = run(config)
    record = {
        "command": arguments.as_typed("memory", argv),
        "rows": [asdict(row) for row in rows],
        "settings": {**asdict(config), "config": config.config and config.config.name},
        "environment": environment(config.device),
    }
    arguments.deliver(table(rows), record, options.json)
    return 0


if __name__ == "__main__":
    run_command(main)
