"""The attention patterns an artifact can name: the same kinds and sizes as kernels.patterns, as data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

KINDS = ("dense", "a_shape", "vertical_slash", "block_sparse")
DEFAULT_LAST_Q = 64


class Record(BaseModel):
    """Base of every part of an artifact: immutable, no unknown fields, no converted types, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Dense(Record):
    """The whole causal area."""

    kind: Literal["dense"] = "dense"


class AShape(Record):
    """The first `sink` tokens and the last `window` tokens before each query (MInference 1.0, A-shape)."""

    kind: Literal["a_shape"] = "a_shape"
    sink: int = Field(ge=1)
    window: int = Field(ge=1)


class VerticalSlash(Record):
    """`vertical` key columns and `slash` diagonals, chosen by the last `last_q` queries.

    MInference 1.0, Algorithm 2.
    """

    kind: Literal["vertical_slash"] = "vertical_slash"
    vertical: int = Field(ge=1)
    slash: int = Field(ge=1)
    last_q: int = Field(default=DEFAULT_LAST_Q, ge=1, le=1024)


class BlockSparse(Record):
    """`blocks` blocks of 64 keys for each block of 64 queries, chosen by mean pooling.

    MInference 1.0, Algorithm 3.
    """

    kind: Literal["block_sparse"] = "block_sparse"
    blocks: int = Field(ge=1)


Pattern = Annotated[Dense | AShape | VerticalSlash | BlockSparse, Field(discriminator="kind")]


def pattern_name(pattern: Dense | AShape | VerticalSlash | BlockSparse) -> str:
    """The short canonical name: dense, a_1024_4096, bs_100, vs_1000_6096, vs_1000_6096_q32 (last_q 32)."""
    match pattern:
        case AShape(sink=sink, window=window):
            return f"a_{sink}_{window}"
        case VerticalSlash(vertical=vertical, slash=slash, last_q=last_q):
            return f"vs_{vertical}_{slash}" + ("" if last_q == DEFAULT_LAST_Q else f"_q{last_q}")
        case BlockSparse(blocks=blocks):
            return f"bs_{blocks}"
        case Dense():
            return "dense"
