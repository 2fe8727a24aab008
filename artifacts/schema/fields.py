"""Fields that records share: their base class, counts, sizes, fractions and names."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

# Upper limit of prompt lengths and sizes. Values in a file have to be small enough for arithmetic.
LARGEST = 2**31 - 1
# Maximum number of layers, and of heads in a layer; and of query heads in all layers together.
# Models have up to 16,128 query heads.
MOST = 4_096
MOST_HEADS = 65_536


class Record(BaseModel):
    """Base of every record: immutable, no unknown fields, no conversions, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def together(record: BaseModel, first: str, second: str) -> None:
    """Raise ValueError if only one of two fields is set."""
    if (getattr(record, first) is None) != (getattr(record, second) is None):
        raise ValueError(f"{first} and {second} go together: set both or neither")


def matching(pattern: str, wanted: str) -> AfterValidator:
    """Validator of a full match; errors show `wanted` instead of the regular expression."""
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            raise ValueError(f"must be {wanted}")
        return value

    return AfterValidator(check)


def one_of(wanted: str) -> WrapValidator:
    """Validator of a union; errors show `wanted` instead of a line for each of its types."""

    def check(value: Any, accept: ValidatorFunctionWrapHandler) -> Any:
        try:
            return accept(value)
        except ValidationError:
            raise ValueError(f"must be {wanted}") from None

    return WrapValidator(check)


def _share(value: float) -> float:
    # Means of float32 fractions can exceed 1 by a rounding error.
    if not 0.0 <= value <= 1.0001:
        raise ValueError("must be from 0 to 1")
    return min(value, 1.0)


T = TypeVar("T")
# Accept lists, which YAML has: strict mode accepts only tuples.
Items = Annotated[tuple[T, ...], Field(strict=False)]
Text = Annotated[str, Field(min_length=1)]
Natural = Annotated[int, Field(ge=0, le=LARGEST)]
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Few = Annotated[int, Field(ge=1, le=MOST)]
Share = Annotated[float, AfterValidator(_share)]
Coverage = Annotated[float, Field(gt=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
AtLeast0 = Annotated[float, Field(ge=0.0)]
Budget = Annotated[
    Natural | Annotated[float, Field(ge=0.0, le=1.0)],
    one_of("a whole number of tokens, or a fraction of them from 0.0 to 1.0"),
]
Sha256 = Annotated[str, matching("[0-9a-f]{64}", "a SHA-256 of 64 lower-case hex digits")]
PatternName = Annotated[
    str,
    matching(
        "[A-Za-z][A-Za-z0-9_.-]{0,63}",
        "a letter and then up to 63 letters, digits, '_', '.' or '-'",
    ),
]
Rows = Items[Items[PatternName] | None]


class Imported(Record):
    """The file of another tool that a section was taken over from."""

    format: Annotated[
        str, matching("[a-z][a-z0-9_]{0,31}", "a lower-case letter and then letters, digits or '_'")
    ] = Field(
        description="the file's format, such as minference: a name of `headwise convert --from`"
    )
    file: Text = Field(description="the file's bare name")
    sha256: Sha256 = Field(description="of the file's bytes")
    scores: Literal["recall", "other"] | None = Field(
        default=None,
        description="what the file's scores are: shares of the attention kept, others, or none",
    )
