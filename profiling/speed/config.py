"""Options of headwise bench, and the sizes that it measures.

Imports no torch, so that a wrong option is refused at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from artifacts import HeadwiseError
from artifacts.cli.arguments import Device, Dtype, Length, Seed
from artifacts.cli.options import ADVANCED, SHARE, Arg, CommandConfig
from artifacts.errors import shorten


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


class Bench(CommandConfig):
    """Options of the measurement.

    Attributes:
        heads: pairs of query and KV heads.
    """

    length: Annotated[tuple[Length, ...], Arg("tokens (default 4096 8192 16384 32768)")] = (
        4096,
        8192,
        16_384,
        32_768,
    )
    head_dims: Annotated[tuple[int, ...], Arg("(default 64 128)")] = (64, 128)
    heads: Annotated[
        tuple[Annotated[tuple[int, int], BeforeValidator(_head_pair)], ...],
        Arg("query and KV heads (default 9/3)", metavar="H/G"),
    ] = ((9, 3),)
    density: Annotated[
        tuple[Annotated[float, SHARE], ...], Arg("what the patterns are sized for (default 0.12)")
    ] = ()
    paper_sizes: Annotated[bool, Arg("the sizes that MInference 1.0 names", group=ADVANCED)] = False
    dtype: Dtype = "auto"
    device: Device = "auto"
    repeats: Annotated[int, Arg("timed rounds, interleaved", group=ADVANCED), Field(ge=1)] = 5
    seed: Seed = 0
    command: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.density and self.paper_sizes:
            raise HeadwiseError("--paper-sizes are sizes of their own: leave --density away")
        # Before anything is measured: the last size may be the one that cannot be.
        _ = self.sizes
        return self

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
