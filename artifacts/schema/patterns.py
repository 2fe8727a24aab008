"""Records of the attention patterns an artifact can name.

The record of a kind has its fields, short name, letter and color, and the tiles that it computes at
its sizes. kernels.patterns implements the same kinds and sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from artifacts.schema.fields import LARGEST, Count, Coverage, Record, matching

# Tile size of the kernels, in queries and in keys.
TILE = 64
DEFAULT_LAST_Q = 64

# Effects on a head whose pattern is converted to a form that is not equivalent.
Effect = Literal[
    "keeps less", "computes more", "chooses otherwise", "not carried over", "filled in", "same"
]

Sink = Annotated[Count, Field(description="the first keys, in tokens")]
Window = Annotated[
    Count, Field(description="the last keys before each query, itself included, in tokens")
]
AtMost = Annotated[
    Coverage | None,
    Field(
        description=(
            "take only as much as holds this share, at most the sizes (FlexPrefill, XAttention; "
            "`_c95` in the name); null: the sizes"
        )
    ),
]


def num_tiles(length: int) -> int:
    """Number of tiles of `length` tokens."""
    return -(-length // TILE)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Key tiles that each row of query tiles computes.

    Attributes:
        near: number of nearest diagonals of tiles, including the row's own tile.
        columns: number of first keys in tokens.
    """

    near: int
    columns: int = 0


def nearest(window: int, length: int) -> int:
    """Number of tile diagonals that a window of `window` tokens touches at `length` tokens."""
    return min(num_tiles(window - 1), num_tiles(length) - 1) + 1


class PatternRecord(Record):
    """Base of the kinds. A kind sets the class variables that are not right for it as they are."""

    named: ClassVar[str]
    """Short name, made of the sizes; of a float all digits."""
    letter: ClassVar[str]
    """One character in the map of a page, no other kind's."""
    color: ClassVar[str]
    """Color in pattern maps, no other kind's. Those of Okabe and Ito are distinct with any
    color vision."""
    lettered: ClassVar[bool] = True
    """Maps write the letter on the color, which comes near to a pale shade of another kind's."""
    covers: ClassVar[Mapping[str, int]] = {}
    """Tokens that a unit of each size covers; other fields cover none."""
    growing: ClassVar[tuple[str, ...]] = ()
    """Sizes that grow in proportion on prompts longer than `prefill.length`."""
    local: ClassVar[bool] = False
    """The last queries see sinks and a window alone, whatever the prompt."""

    def layout(self, length: int) -> Layout | None:
        """Tiles computed on a prompt of `length` tokens; None if sizes do not determine them.

        For patterns that depend on the prompt, these are the first columns and nearest diagonals.
        """
        return None


class Dense(PatternRecord):
    """the whole causal area; named `dense`"""

    named: ClassVar[str] = "dense"
    letter: ClassVar[str] = "D"
    color: ClassVar[str] = "#D55E00"
    lettered: ClassVar[bool] = False

    kind: Literal["dense"] = Field(default="dense", description=__doc__)

    def layout(self, length: int) -> Layout:
        """See PatternRecord.layout."""
        return Layout(near=num_tiles(length))


class AShape(PatternRecord):
    """the first keys and a window before each query (MInference 1.0); named `a_1024_4096`"""

    named: ClassVar[str] = "a_{sink}_{window}"
    letter: ClassVar[str] = "A"
    color: ClassVar[str] = "#E69F00"
    lettered: ClassVar[bool] = False
    covers: ClassVar[Mapping[str, int]] = {"sink": 1, "window": 1}
    growing: ClassVar[tuple[str, ...]] = ("window",)
    local: ClassVar[bool] = True

    kind: Literal["a_shape"] = Field(default="a_shape", description=__doc__)
    sink: Sink
    window: Window

    def layout(self, length: int) -> Layout:
        """See PatternRecord.layout."""
        return Layout(near=nearest(self.window, length), columns=self.sink)


class VerticalSlash(PatternRecord):
    """the columns and diagonals of most attention (MInference 1.0); named `vs_1000_6096`"""

    named: ClassVar[str] = "vs_{vertical}_{slash}"
    letter: ClassVar[str] = "V"
    color: ClassVar[str] = "#0072B2"
    lettered: ClassVar[bool] = False
    covers: ClassVar[Mapping[str, int]] = {"vertical": 1, "slash": 1}
    growing: ClassVar[tuple[str, ...]] = ("vertical", "slash")

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

    def layout(self, length: int) -> Layout:
        """See PatternRecord.layout."""
        near = nearest(max(self.slash, TILE), length)
        return Layout(near=near, columns=self.vertical)


class BlockSparse(PatternRecord):
    """the blocks whose mean-pooled keys score highest (MInference 1.0); named `bs_100`"""

    named: ClassVar[str] = "bs_{blocks}"
    letter: ClassVar[str] = "B"
    color: ClassVar[str] = "#009E73"
    lettered: ClassVar[bool] = False
    covers: ClassVar[Mapping[str, int]] = {"blocks": TILE}
    growing: ClassVar[tuple[str, ...]] = ("blocks",)

    kind: Literal["block_sparse"] = Field(default="block_sparse", description=__doc__)
    blocks: Count = Field(
        description="blocks of 64 keys; a query's own and the first are always among them"
    )
    coverage: AtMost = None

    def layout(self, length: int) -> Layout:
        """See PatternRecord.layout."""
        # The first tile and the row's own tile are always included.
        return Layout(near=max(self.blocks, 2) - 1, columns=TILE)


class SkipSoftmax(PatternRecord):
    """all scores, but values only where scores are high enough (BLASST); named `skip_40`"""

    named: ClassVar[str] = "skip_{scale_factor}"
    letter: ClassVar[str] = "K"
    color: ClassVar[str] = "#882255"

    kind: Literal["skip_softmax"] = Field(default="skip_softmax", description=__doc__)
    scale_factor: float = Field(
        gt=0.0,
        le=LARGEST,
        description=(
            "on K keys a tile is skipped where no query has a weight of at least this / K of that "
            "of its highest key in its own tile or the first; from K on nothing is skipped"
        ),
    )


AnyPattern = Dense | AShape | VerticalSlash | BlockSparse | SkipSoftmax
Pattern = Annotated[AnyPattern, Field(discriminator="kind")]
RECORDS: dict[str, type[PatternRecord]] = {
    cls.model_fields["kind"].default: cls for cls in get_args(AnyPattern)
}
KINDS: tuple[str, ...] = tuple(RECORDS)
KindName = Annotated[str, matching("|".join(KINDS), f"one of {', '.join(KINDS)}")]


def pattern_name(pattern: AnyPattern) -> str:
    """Return the short canonical name, such as a_1024_4096.

    The suffix _q32 is a last_q of 32, and _c95 is a coverage of 0.95.
    """
    fields = dict(pattern)
    name = pattern.named.format(
        **{
            field: _exact(value) if isinstance(value, float) else value
            for field, value in fields.items()
        }
    )
    if (last_q := fields.get("last_q", DEFAULT_LAST_Q)) != DEFAULT_LAST_Q:
        name += f"_q{last_q}"
    if (coverage := fields.get("coverage")) is not None:
        name += f"_c{_exact(coverage, 100)}"
    return name


def grown(pattern: AnyPattern, searched: int | None, length: int) -> AnyPattern:
    """Scale the sizes of a pattern to a longer prompt.

    The growing sizes are multiplied by the ratio of the lengths, both in whole tiles.
    kernels.patterns scales its patterns in the same way.

    Args:
        pattern: pattern with its sizes at `searched` keys.
        searched: number of keys in the search; None leaves the sizes unchanged.
        length: number of keys.
    """
    if searched is None or num_tiles(length) <= num_tiles(searched):
        return pattern
    ratio = num_tiles(length) / num_tiles(searched)
    sizes = {name: min(round(getattr(pattern, name) * ratio), LARGEST) for name in pattern.growing}
    return pattern.model_copy(update=sizes)


def _exact(value: float, times: int = 1) -> str:
    """Format exactly, 99.5 for 0.995 times 100, so that two values never have the same name."""
    return f"{(Decimal(repr(value)) * times).normalize():f}"
