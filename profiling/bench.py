"""Speed of the kernels against torch's, side by side in one run, of right results only.

Prefill by torch's attention, by Headwise over every key, and by Headwise with patterns.

    headwise bench --length 4096 8192 --head-dims 64 128 --json out.json
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from artifacts import HeadwiseError
from artifacts.cli.arguments import STDOUT, Device, Dtype, Json, Length, Seed, deliver_json
from artifacts.cli.interrupt import while_importing
from artifacts.cli.options import ADVANCED, SHARE, Arg, CommandConfig
from artifacts.errors import shorten
from profiling.environment import environment
from profiling.speed import baselines

if TYPE_CHECKING:
    from profiling.speed.attention_speed import Size, Speed

_DENSITY = 0.12
_TIMES = ("sdpa ms", "dense ms", "sparse ms", "build ms")
_SPEEDUPS = (*baselines.COLUMNS, "without build", "rate/sdpa")
_HEADER = ("length", "dim", "heads", "pattern", "density", *_TIMES, *_SPEEDUPS)
_WIDTHS = tuple(14 if name == "pattern" else max(len(name), 7) for name in _HEADER)


def _head_pair(value: Any) -> Any:
    """Read H/G, such as 32/8, or check a pair."""
    pair = value
    if isinstance(value, str):
        words = value.split("/")
        pair = tuple(int(word) if word.isdecimal() else 0 for word in words)
    if (
        not isinstance(pair, tuple)
        or len(pair) != 2
        or not all(isinstance(each, int) and each > 0 for each in pair)
        or pair[0] % pair[1]
    ):
        raise HeadwiseError(
            f"--heads must be H/G with H a multiple of G, such as 32/8, got {shorten(value)}"
        )
    return pair


class Config(CommandConfig):
    """Options of the measurement, and where its record goes.

    Attributes:
        heads: pairs of query and KV heads.
    """

    length: Annotated[
        tuple[Annotated[Length, Field(ge=1)], ...],
        Arg("tokens (default 4096 8192 16384 32768)"),
    ] = (4096, 8192, 16_384, 32_768)
    head_dims: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Arg("(default 64 128)")] = (
        64,
        128,
    )
    heads: Annotated[
        tuple[Annotated[tuple[int, int], BeforeValidator(_head_pair)], ...],
        Arg("query and KV heads (default 9/3)", metavar="H/G"),
    ] = ((9, 3),)
    density: Annotated[
        tuple[Annotated[float, SHARE], ...],
        Arg(f"what the patterns are sized for (default {_DENSITY})"),
    ] = ()
    paper_sizes: Annotated[bool, Arg("the sizes that MInference 1.0 names", group=ADVANCED)] = False
    dtype: Dtype = "auto"
    device: Device = "auto"
    repeats: Annotated[int, Arg("timed rounds, interleaved", group=ADVANCED), Field(ge=1)] = 5
    seed: Seed = 0
    as_json: Json = None
    command: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.density and self.paper_sizes:
            raise HeadwiseError("--paper-sizes are sizes of their own: leave --density away")
        return self


def run(config: Config) -> int:
    """Measure every size, and print a line as soon as it is measured."""
    with while_importing():
        from profiling.models.device import settled
    config = settled(config)
    is_shown = config.as_json != STDOUT
    where = environment(config.device) | {"backend": _backend(config)}
    if is_shown:
        print(", ".join(f"{name} {value}" for name, value in where.items()))
        print(_line(_HEADER), flush=True)
    lines = []
    for size, speed in _speeds(config):
        if is_shown:
            print(_line(_cells(size, speed)), flush=True)
        lines.append(asdict(size) | asdict(speed))
    record = {
        "command": config.command,
        "settings": config.settings(),
        "environment": where,
        "lines": lines,
    }
    deliver_json(record, config.as_json)
    return 0


def _backend(config: Config) -> str:
    """Return the kernel backend of the first size.

    Raises:
        HeadwiseError: no backend supports it.
    """
    import torch

    from kernels import registry
    from kernels.call import Operands

    probe = torch.empty(
        (1, 1, 1, config.head_dims[0]), dtype=getattr(torch, config.dtype), device=config.device
    )
    name, reason = registry.fast("attention", Operands(probe, probe, probe))
    if reason is not None:
        raise HeadwiseError(f"nothing to time on {config.device} in {config.dtype}: {reason}")
    return name


def _speeds(config: Config) -> Iterator[tuple[Size, Speed]]:
    """Yield the speed of every pattern at every size, short ones first."""
    from profiling.speed.attention_speed import Size, measure, paper_patterns, patterns_for

    for length, head_dim, (heads, kv_heads) in product(
        config.length, config.head_dims, config.heads
    ):
        size = Size(
            length=length,
            head_dim=head_dim,
            heads=heads,
            kv_heads=kv_heads,
            dtype=config.dtype,
            device=config.device,
            seed=config.seed,
        )
        patterns = paper_patterns()
        if not config.paper_sizes:
            patterns = [
                pattern
                for density in config.density or (_DENSITY,)
                for pattern in patterns_for(length, density)
            ]
        for speed in measure(size, patterns, repeats=config.repeats):
            yield size, speed


def _cells(size: Size, speed: Speed) -> tuple[str, ...]:
    """Cells of a line: speed-ups with the index build, and the first of them without.

    rate/sdpa compares operations on computed tiles a second with SDPA's on the causal half.
    """
    rate = (speed.flops / speed.sparse_seconds) / (size.dense_flops / speed.sdpa_seconds)
    return (
        str(size.length),
        str(size.head_dim),
        f"{size.heads}/{size.kv_heads}",
        speed.pattern,
        f"{speed.density:.3f}",
        f"{1e3 * speed.sdpa_seconds:.1f}",
        f"{1e3 * speed.kernel_seconds:.1f}",
        f"{1e3 * speed.sparse_seconds:.1f}",
        f"{1e3 * speed.build_seconds:.1f}",
        *baselines.cells(speed.over(speed.sparse_seconds + speed.build_seconds)),
        f"{speed.over(speed.sparse_seconds).value:.2f}x",
        f"{rate:.2f}",
    )


def _line(cells: tuple[str, ...]) -> str:
    padded = (cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
    return "  ".join(padded)
