"""The attention patterns an artifact can name: the same kinds and sizes as kernels.patterns, as
data.

A static pattern's entries are too many for a page: its record names the arrays of the sidecar that
hold them."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Literal, get_args

from pydantic import Field

from artifacts.schema.fields import LARGEST, Count, Coverage, Record, matching

# The kernels compute in tiles of so many queries by so many keys.
TILE = 64
DEFAULT_LAST_Q = 64
DEFAULT_REPRESENTATIVES = 4

Sink = Annotated[Count, Field(description="the first keys, in tokens")]
Window = Annotated[
    Count, Field(description="the last keys before each query, itself included, in tokens")
]
AtMost = Annotated[
    Coverage | None,
    Field(
        description="take only as much as holds this share, at most the sizes "
        "(FlexPrefill, XAttention; `_c95` in the "
        "name); null: the sizes"
    ),
]
# No dot, which ends the name inside an array's; short enough for static_<name> to be a pattern's
# name.
IndicesName = Annotated[
    str,
    matching(
        "[A-Za-z0-9][A-Za-z0-9_-]{0,47}",
        "a letter or digit and then up to 47 letters, digits, '_' or '-'",
    ),
]


class Dense(Record):
    """the whole causal area; named `dense`"""

    kind: Literal["dense"] = Field(default="dense", description=__doc__)


class AShape(Record):
    """the first keys and a window before each query (MInference 1.0); named `a_1024_4096`"""

    kind: Literal["a_shape"] = Field(default="a_shape", description=__doc__)
    sink: Sink
    window: Window


class TriShape(Record):
    """an A-shape whose last queries see every key (SCBench); named `tri_1024_4096_128`"""

    kind: Literal["tri_shape"] = Field(default="tri_shape", description=__doc__)
    sink: Sink
    window: Window
    last: Count = Field(description="the last queries, which see every key")


class Dilated(Record):
    """the first keys, and every n-th tile of a window; named `dil_1024_4096_2`"""

    kind: Literal["dilated"] = Field(default="dilated", description=__doc__)
    sink: Sink
    window: Window
    dilation: Count = Field(
        description="n: of the window's tiles of 64 keys every n-th, the query's own among them"
    )


class Strided(Record):
    """an A-shape, and diagonals of tiles beyond it; named `str_1024_4096_8`"""

    kind: Literal["strided"] = Field(default="strided", description=__doc__)
    sink: Sink
    window: Window
    stride: Count = Field(
        description="beyond the window every `stride`-th diagonal of tiles of 64 keys"
    )


class Static(Record):
    """columns and diagonals that are the same on every prompt; named `static_NAME`"""

    kind: Literal["static"] = Field(default="static", description=__doc__)
    indices: IndicesName = Field(
        description="the name of the sidecar's arrays that list them, see [Arrays](#arrays)"
    )

    @property
    def arrays(self) -> tuple[str, str]:
        """The names of its arrays: key columns in tokens, diagonals in 64-token tiles from the
        query's own."""
        return f"static.{self.indices}.columns", f"static.{self.indices}.diagonals"


class VerticalSlash(Record):
    """the columns and diagonals of most attention (MInference 1.0); named `vs_1000_6096`"""

    kind: Literal["vertical_slash"] = Field(default="vertical_slash", description=__doc__)
    vertical: Count = Field(description="key columns; the first 64 are always among them")
    slash: Count = Field(description="diagonals; the nearest 64 are always among them")
    last_q: int = Field(
        default=DEFAULT_LAST_Q,
        ge=1,
        le=1024,
        description=(
            "the last queries, by whose attention is chosen; other than 64 `_q32` in the name"
        ),
    )
    coverage: AtMost = None


class BlockSparse(Record):
    """the blocks whose mean-pooled keys score highest (MInference 1.0); named `bs_100`"""

    kind: Literal["block_sparse"] = Field(default="block_sparse", description=__doc__)
    blocks: Count = Field(
        description="blocks of 64 keys; a query's own and the first are always among them"
    )
    coverage: AtMost = None


class MemoryUnits(Record):
    """sinks, a window and tiles looked up in the past (InfLLM); named `mu_128_4096_32`"""

    kind: Literal["memory_units"] = Field(default="memory_units", description=__doc__)
    sink: Count = Field(description="the first keys, in whole tiles of 64 tokens")
    window: Window
    units: Count = Field(
        description="tiles of 64 keys between sinks and window that 64 queries look up"
    )
    representatives: Count = Field(
        default=DEFAULT_REPRESENTATIVES,
        description=(
            "keys that stand for a tile: those that the queries after it "
            "want; other than 4 `_r8` in the name"
        ),
    )


class SkipSoftmax(Record):
    """all scores, but values only where scores are high enough (BLASST); named `skip_40`"""

    kind: Literal["skip_softmax"] = Field(default="skip_softmax", description=__doc__)
    scale_factor: float = Field(
        gt=0.0,
        le=LARGEST,
        description="on K keys a tile is skipped where no query has a weight of at "
        "least this / K of that of its "
        "highest key in its own tile or the first; from K on nothing is skipped",
    )


AnyPattern = (
    Dense
    | AShape
    | TriShape
    | Dilated
    | Strided
    | Static
    | VerticalSlash
    | BlockSparse
    | MemoryUnits
    | SkipSoftmax
)
Pattern = Annotated[AnyPattern, Field(discriminator="kind")]
KINDS: tuple[str, ...] = tuple(cls.model_fields["kind"].default for cls in get_args(AnyPattern))
KindName = Annotated[str, matching("|".join(KINDS), f"one of {', '.join(KINDS)}")]

# How each kind is named by its sizes.
NAMES = {
    "dense": "dense",
    "a_shape": "a_{sink}_{window}",
    "tri_shape": "tri_{sink}_{window}_{last}",
    "dilated": "dil_{sink}_{window}_{dilation}",
    "strided": "str_{sink}_{window}_{stride}",
    "static": "static_{indices}",
    "vertical_slash": "vs_{vertical}_{slash}",
    "block_sparse": "bs_{blocks}",
    "memory_units": "mu_{sink}_{window}_{units}",
    "skip_softmax": "skip_",
}


def pattern_name(pattern: AnyPattern) -> str:
    """The short canonical name, such as a_1024_4096.

    With _q32 for a last_q of 32, _c95 for a coverage of 0.95 and _r8 for 8 representatives.
    """
    fields = dict(pattern)
    name = NAMES[pattern.kind].format(**fields)
    if isinstance(pattern, SkipSoftmax):
        name += _exact(pattern.scale_factor)
    if (last_q := fields.get("last_q", DEFAULT_LAST_Q)) != DEFAULT_LAST_Q:
        name += f"_q{last_q}"
    if (coverage := fields.get("coverage")) is not None:
        name += f"_c{_exact(coverage, 100)}"
    if (count := fields.get("representatives", DEFAULT_REPRESENTATIVES)) != DEFAULT_REPRESENTATIVES:
        name += f"_r{count}"
    return name


def _exact(value: float, times: int = 1) -> str:
    """Exact, 99.5 for 0.995 times 100, so that two values never share a name."""
    return f"{(Decimal(repr(value)) * times).normalize():f}"
