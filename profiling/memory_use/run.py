"""Runs headwise memory: peak memory by length and method, measured in processes, or predicted."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from artifacts import HeadwiseError, load
from artifacts.page.layout import aligned
from profiling.memory_use.config import Memory
from profiling.memory_use.peak_memory import peak_apart
from profiling.memory_use.plan import Plan, plan, read_shape, shape_of
from profiling.models.loading import load_config
from profiling.progress import bar


@dataclass(frozen=True, kw_only=True)
class Row:
    """Bytes of one prefill next to the model.

    Attributes:
        peak: at most.
        cache: those of the cache.
        passing: the rest, measured.
        predicted: the rest, predicted.
    """

    method: str
    length: int
    peak: int
    cache: int
    passing: int
    predicted: int | None


def predicted(config: Memory) -> dict[int, Plan]:
    """The plan of each length.

    Raises:
        HeadwiseError: no such configuration, or layers that it does not have.
    """
    assert config.plan is not None
    # A plan is of no machine.
    if config.dtype == "auto":
        dtype = "bfloat16"
    else:
        dtype = config.dtype
    shape = read_shape(config.plan, dtype)
    full = shape.layers - shape.sliding
    if config.banked > full:
        raise HeadwiseError(
            f"--banked must be 0 to {full}, the layers that see all: got {config.banked}"
        )
    return {length: plan(shape, length, banked=config.banked) for length in config.length}


def run(config: Memory) -> list[Row]:
    """Measure each length with each method, one process at a time.

    Args:
        config: one whose device and dtype are decided, see profiling.models.device.

    Raises:
        HeadwiseError: the model or the artifact cannot be loaded, or a process failed.
    """
    assert config.config is not None and config.model is not None
    load(config.config)
    try:
        shape = shape_of(load_config(config.model, revision=config.revision), config.dtype)
    except HeadwiseError as error:
        print(f"no prediction: {error}", file=sys.stderr)
        shape = None
    if config.dense:
        wanted = ["dense", "headwise"]
    else:
        wanted = ["headwise"]
    rows = []
    for length, method in bar([(n, m) for n in config.length for m in wanted], leave=True):
        if method == "dense":
            artifact = None
        else:
            artifact = config.config
        grown = peak_apart(
            f"{method} at {length} tokens",
            config.model,
            length,
            config=artifact,
            offload=config.offload,
            dtype=config.dtype,
            device=config.device,
            revision=config.revision,
        )
        if shape is None:
            predicted = None
        else:
            predicted = plan(shape, length).passing
        rows.append(
            Row(
                method=method,
                length=length,
                peak=grown.peak,
                cache=grown.cache,
                passing=max(0, grown.peak - grown.cache),
                predicted=predicted,
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
