"""Options of headwise bench, and the sizes that it measures.

Imports no torch, so that a wrong option is refused at once.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from artifacts import HeadwiseError
from artifacts.cli import arguments
from artifacts.cli.options import arg, at_least, check_ranges, option, shared


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of one timed call; dtype by torch's name."""

    length: int
    head_dim: int
    heads: int
    kv_heads: int
    dtype: str
    device: str
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("length", "head_dim"):
            if (value := getattr(self, name)) < 1:
                raise HeadwiseError(f"{name.replace('_', ' ')} must be at least 1, got {value}")

    @property
    def dense_flops(self) -> float:
        """Both products over the causal half."""
        return 2.0 * self.length**2 * self.heads * self.head_dim


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
    """Options of the measurement.

    Attributes:
        heads: pairs of query and KV heads.
    """

    length: tuple[int, ...] = shared(
        arguments.add_length,
        "tokens (default 4096 8192 16384 32768)",
        several=True,
        default=(4096, 8192, 16_384, 32_768),
    )
    head_dims: tuple[int, ...] = arg(
        "--head-dims", type=int, nargs="+", default=(64, 128), help="(default 64 128)"
    )
    heads: tuple[tuple[int, int], ...] = arg(
        "--heads",
        type=head_pair,
        nargs="+",
        metavar="H/G",
        default=((9, 3),),
        help="query and KV heads (default 9/3)",
    )
    density: tuple[float, ...] = arg(
        "--density",
        type=float,
        nargs="+",
        default=(),
        help="what the patterns are sized for (default 0.12)",
    )
    paper_sizes: bool = option(
        "the sizes that MInference 1.0 names", default=False, action="store_true", advanced=True
    )
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
        # Before anything is measured: the last size may be the one that cannot be.
        _ = self.sizes

    @property
    def sizes(self) -> list[Size]:
        """Every size that is measured, short ones first."""
        return [
            Size(
                length=length,
                head_dim=head_dim,
                heads=heads,
                kv_heads=kv_heads,
                dtype=self.dtype,
                device=self.device,
                seed=self.seed,
            )
            for length in self.length
            for head_dim in self.head_dims
            for heads, kv_heads in self.heads
        ]
