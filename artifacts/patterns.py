"""The attention patterns an artifact can name: the same kinds and sizes as kernels.patterns, as data.

A static pattern's entries are too many for a page: its record names the arrays of the sidecar that hold them.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Literal

from pydantic import Field

from artifacts.fields import Count, Coverage, Record, matching

KINDS = (
    "dense",
    "a_shape",
    "tri_shape",
    "dilated",
    "strided",
    "static",
    "vertical_slash",
    "block_sparse",
    "memory_units",
)
# The kernels compute in tiles of so many queries by so many keys.
TILE = 64
DEFAULT_LAST_Q = 64
DEFAULT_REPRESENTATIVES = 4
_SINK = "the first keys, in tokens"
_WINDOW = "the last keys before each query, itself included, in tokens"
_COVERAGE = "take only as much as holds this share, at most the sizes; null: the sizes"

KindName = Annotated[str, matching("|".join(KINDS), f"one of {', '.join(KINDS)}")]
# No dot, which ends the name inside an array's; short enough for static_<name> to be a pattern's name.
IndicesName = Annotated[
    str,
    matching("[A-Za-z0-9][A-Za-z0-9_-]{0,47}", "a letter or digit and then up to 47 letters, digits, '_' or '-'"),
]


class Dense(Record):
    """The whole causal area."""

    kind: Literal["dense"] = Field(default="dense", description="the whole causal area; named `dense`")


class AShape(Record):
    """The first `sink` tokens and the last `window` tokens before each query (MInference 1.0, A-shape)."""

    kind: Literal["a_shape"] = Field(
        default="a_shape", description="the first keys and a window before each query; named `a_1024_4096`"
    )
    sink: Count = Field(description=_SINK)
    window: Count = Field(description=_WINDOW)


class TriShape(Record):
    """An A-shape whose last `last` queries see every token (SCBench, Tri-shape)."""

    kind: Literal["tri_shape"] = Field(
        default="tri_shape", description="an A-shape whose last queries see every key; named `tri_1024_4096_128`"
    )
    sink: Count = Field(description=_SINK)
    window: Count = Field(description=_WINDOW)
    last: Count = Field(description="the last queries, which see every key")


class Dilated(Record):
    """The first `sink` tokens, and of the 64-token tiles of the last `window` tokens every `dilation`-th."""

    kind: Literal["dilated"] = Field(
        default="dilated", description="the first keys, and every n-th tile of a window; named `dil_1024_4096_2`"
    )
    sink: Count = Field(description=_SINK)
    window: Count = Field(description=_WINDOW)
    dilation: Count = Field(description="n: of the window's tiles of 64 keys every n-th, the query's own among them")


class Strided(Record):
    """The first `sink` tokens, the last `window`, and beyond them every `stride`-th diagonal of 64-token tiles."""

    kind: Literal["strided"] = Field(
        default="strided", description="an A-shape, and diagonals of tiles beyond it; named `str_1024_4096_8`"
    )
    sink: Count = Field(description=_SINK)
    window: Count = Field(description=_WINDOW)
    stride: Count = Field(description="beyond the window every `stride`-th diagonal of tiles of 64 keys")


class Static(Record):
    """The columns and diagonals in the sidecar's arrays `static.<indices>.columns` and `static.<indices>.diagonals`."""

    kind: Literal["static"] = Field(
        default="static", description="columns and diagonals that are the same on every prompt; named `static_NAME`"
    )
    indices: IndicesName = Field(description="the name of the sidecar's arrays that list them, see [Arrays](#arrays)")

    @property
    def arrays(self) -> tuple[str, str]:
        """The names of its arrays: key columns in tokens, diagonals in 64-token tiles from the query's own."""
        return f"static.{self.indices}.columns", f"static.{self.indices}.diagonals"


class VerticalSlash(Record):
    """`vertical` key columns and `slash` diagonals, chosen by the last `last_q` queries.

    With a `coverage`, the fewest that hold that share of these queries' attention. MInference 1.0, Algorithm 2;
    FlexPrefill.
    """

    kind: Literal["vertical_slash"] = Field(
        default="vertical_slash",
        description="the columns and diagonals that a prompt's last queries attend to most; named `vs_1000_6096`, "
        "`vs_1000_6096_q32`, `vs_1000_6096_c95`",
    )
    vertical: Count = Field(description="key columns; the first 64 are always among them")
    slash: Count = Field(description="diagonals; the nearest 64 are always among them")
    last_q: int = Field(
        default=DEFAULT_LAST_Q, ge=1, le=1024, description="the last queries, by whose attention is chosen"
    )
    coverage: Coverage | None = Field(default=None, description=_COVERAGE)


class BlockSparse(Record):
    """`blocks` blocks of 64 keys for each block of 64 queries, chosen by mean pooling.

    With a `coverage`, the fewest that hold that share of the attention between the means. MInference 1.0, Algorithm 3;
    XAttention.
    """

    kind: Literal["block_sparse"] = Field(
        default="block_sparse",
        description="for each 64 queries the blocks whose mean-pooled keys score highest; named `bs_100`, `bs_100_c90`",
    )
    blocks: Count = Field(description="blocks of 64 keys; a query's own and the first are always among them")
    coverage: Coverage | None = Field(default=None, description=_COVERAGE)


class MemoryUnits(Record):
    """The first `sink` tokens, the last `window`, and of the 64-token tiles between them the `units` looked up.

    A tile is looked up by the `representatives` of its keys that the queries after it want most. InfLLM, section 3.
    """

    kind: Literal["memory_units"] = Field(
        default="memory_units",
        description="sinks, a window, and tiles of the past looked up; named `mu_128_4096_32`",
    )
    sink: Count = Field(description="the first keys, in whole tiles of 64 tokens")
    window: Count = Field(description=_WINDOW)
    units: Count = Field(description="tiles of 64 keys between sinks and window that 64 queries look up")
    representatives: Count = Field(
        default=DEFAULT_REPRESENTATIVES,
        description="keys that stand for a tile: those that the queries after it want",
    )


AnyPattern = Dense | AShape | TriShape | Dilated | Strided | Static | VerticalSlash | BlockSparse | MemoryUnits
Pattern = Annotated[AnyPattern, Field(discriminator="kind")]


def pattern_name(pattern: AnyPattern) -> str:
    """The short canonical name.

    dense, a_1024_4096, tri_1024_4096_128, dil_1024_4096_2, str_1024_4096_8, static_NAME, vs_1000_6096, bs_100 and
    mu_128_4096_32, with _q32 for a last_q of 32, _c95 for a coverage of 0.95 and _r8 for 8 representatives.
    """
    match pattern:
        case AShape(sink=sink, window=window):
            return f"a_{sink}_{window}"
        case TriShape(sink=sink, window=window, last=last):
            return f"tri_{sink}_{window}_{last}"
        case Dilated(sink=sink, window=window, dilation=dilation):
            return f"dil_{sink}_{window}_{dilation}"
        case Strided(sink=sink, window=window, stride=stride):
            return f"str_{sink}_{window}_{stride}"
        case Static(indices=indices):
            return f"static_{indices}"
        case VerticalSlash(vertical=vertical, slash=slash, last_q=last_q):
            asked = "" if last_q == DEFAULT_LAST_Q else f"_q{last_q}"
            return f"vs_{vertical}_{slash}{asked}{_percent(pattern.coverage)}"
        case BlockSparse(blocks=blocks):
            return f"bs_{blocks}{_percent(pattern.coverage)}"
        case MemoryUnits(sink=sink, window=window, units=units, representatives=count):
            many = "" if count == DEFAULT_REPRESENTATIVES else f"_r{count}"
            return f"mu_{sink}_{window}_{units}{many}"
        case Dense():
            return "dense"


def _percent(coverage: float | None) -> str:
    """_c95 for 0.95, _c99.5 for 0.995: exact, so that two coverages never share a name."""
    return "" if coverage is None else f"_c{(Decimal(repr(coverage)) * 100).normalize():f}"
