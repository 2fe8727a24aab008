"""Options of headwise bench, and the sizes that it measures.

Imports no torch, so that a wrong option is refused at once.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from artifacts import HeadwiseError
from artifacts.cli import arguments
from artifacts.cli.options import arg, at_least, check_ranges, option, shared

# Tokens of a prompt, and of new ones behind a past.
_LENGTHS = (4096, 8192, 16_384, 32_768)
_CHUNKS = (16, 64, 200, 1000)
# Below this length dense attention serves anyway.
DEFAULT_LENGTHS = {"cpu": (2048, 4096, 8192, 16_384), "cuda": (8192, 32_768, 131_072, 524_288)}


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of one timed call; dtype by torch's name.

    Attributes:
        past: tokens before, whose keys are there.
    """

    length: int
    head_dim: int
    heads: int
    kv_heads: int
    dtype: str
    device: str
    seed: int = 0
    past: int = 0

    def __post_init__(self) -> None:
        for name in ("length", "head_dim"):
            if (value := getattr(self, name)) < 1:
                raise HeadwiseError(f"{name.replace('_', ' ')} must be at least 1, got {value}")

    @property
    def dense_flops(self) -> float:
        """Both products over the causal half, and over the past."""
        return 2.0 * (self.length**2 + 2 * self.length * self.past) * self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Every combination is measured; heads are pairs of query and KV heads."""

    device: str
    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    dtypes: tuple[str, ...]
    densities: tuple[float, ...]
    repeats: int
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.lengths) < 256:
            raise HeadwiseError(
                f"--length must be at least 256 with --costs, got {min(self.lengths)}"
            )

    def sizes(self) -> Iterator[Size]:
        """Short ones first: an interrupted table is of use."""
        for length, head_dim, (heads, kv_heads), dtype in itertools.product(
            self.lengths, self.head_dims, self.heads, self.dtypes
        ):
            yield Size(
                length=length,
                head_dim=head_dim,
                heads=heads,
                kv_heads=kv_heads,
                dtype=dtype,
                device=self.device,
                seed=self.seed,
            )


def head_pair(text: str) -> tuple[int, int]:
    """Read H/G, such as 32/8."""
    heads, slash, kv_heads = text.partition("/")
    if not (
        slash
        and heads.isdigit()
        and kv_heads.isdigit()
        and int(kv_heads)
        and int(heads) % int(kv_heads) == 0
    ):
        raise argparse.ArgumentTypeError(
            f"must be H/G with H a multiple of G, such as 32/8, got {text!r}"
        )
    return int(heads), int(kv_heads)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Options of the measurement; empty ones take defaults by what is measured.

    Attributes:
        heads: pairs of query and KV heads.
    """

    what: str = arg(nargs="?", choices=("attention", "decode"), default="attention")
    length: tuple[int, ...] = shared(
        arguments.add_length,
        "tokens (default 4096 8192 16384 32768; with --past 16 64 200 1000; "
        "with --costs by device)",
        several=True,
        default=(),
    )
    past: int = option(
        "tokens before those of --length, whose keys are there", default=0, within=at_least(0)
    )
    head_dims: tuple[int, ...] = arg(
        "--head-dims", type=int, nargs="+", default=(64, 128), help="(default 64 128)"
    )
    heads: tuple[tuple[int, int], ...] = arg(
        "--heads",
        type=head_pair,
        nargs="+",
        metavar="H/G",
        default=(),
        help="query and KV heads (default 9/3; with --costs 8/2, too)",
    )
    density: tuple[float, ...] = arg(
        "--density",
        type=float,
        nargs="+",
        default=(),
        help="what the patterns are sized for (default 0.12; with --costs 0.03 0.06 0.12 0.25 0.5)",
    )
    paper_sizes: bool = option(
        "the sizes that MInference 1.0 names", default=False, action="store_true", advanced=True
    )
    chosen: int = option(
        "decode: how many keys are chosen", default=2048, within=at_least(1), advanced=True
    )
    costs: Path | None = option(
        "write what attention costs as a table, a .safetensors file; a killed run goes on",
        default=None,
        metavar="FILE",
    )
    table: Path | None = option(
        "with --attach: a table that was measured before; measures nothing",
        default=None,
        metavar="FILE",
        advanced=True,
    )
    attach: Path | None = option(
        "put the table into this artifact, next to those it has",
        default=None,
        metavar="ARTIFACT",
        advanced=True,
    )
    fresh: bool = shared(arguments.add_fresh, default=False)
    dtype: str = shared(arguments.add_dtype, default="auto")
    device: str = shared(arguments.add_device, default="auto")
    repeats: int = option("timed rounds, interleaved", default=5, within=at_least(1), advanced=True)
    seed: int = shared(arguments.add_seed, default=0)

    def __post_init__(self) -> None:
        check_ranges(self)
        for density in self.density:
            if not 0 < density <= 1:
                raise HeadwiseError(f"--density must be above 0 and at most 1, got {density}")
        if self.density and self.paper_sizes:
            raise HeadwiseError("--paper-sizes are sizes of their own: leave --density away")
        if self.attach is None and self.table is not None:
            raise HeadwiseError(
                "--table measures nothing: name the artifact that it goes into with --attach"
            )
        if self.attach is not None and (self.costs is None) == (self.table is None):
            raise HeadwiseError(
                "--attach puts a table into an artifact: give one of --costs and --table"
            )
        if self.past and (self.what == "decode" or self.costs is not None):
            raise HeadwiseError("--past is of attention alone: decode and --costs have none")
        # Before anything is measured: the last size may be the one that cannot be.
        _ = self.sizes

    @property
    def sizes(self) -> list[Size]:
        """Every size that is measured, short ones first."""
        return [
            Size(
                length=length,
                past=self.past,
                head_dim=head_dim,
                heads=heads,
                kv_heads=kv_heads,
                dtype=self.dtype,
                device=self.device,
                seed=self.seed,
            )
            for length in self.length or (_CHUNKS if self.past else _LENGTHS)
            for head_dim in self.head_dims
            for heads, kv_heads in self.heads or ((9, 3),)
        ]

    def grid(self) -> Grid:
        """The table's sizes."""
        if self.device.startswith("cuda"):
            device = "cuda"
        else:
            device = "cpu"
        lengths = DEFAULT_LENGTHS[device]
        return Grid(
            device=self.device,
            lengths=self.length or lengths,
            head_dims=self.head_dims,
            heads=self.heads or ((9, 3), (8, 2)),
            dtypes=(self.dtype,),
            densities=self.density or (0.03, 0.06, 0.12, 0.25, 0.5),
            repeats=self.repeats,
            seed=self.seed,
        )
