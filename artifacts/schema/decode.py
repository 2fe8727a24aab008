"""The decode section: filter layers that select tokens for the other layers (OmniKV)."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from artifacts.schema.fields import (
    MOST,
    AtLeast0,
    Budget,
    Count,
    Imported,
    Items,
    Positive,
    Record,
    Share,
    Text,
)
from artifacts.schema.model import ModelInfo


def _ascending(layers: tuple[int, ...]) -> tuple[int, ...]:
    if any(b <= a for a, b in pairwise(layers)):
        raise ValueError("must be different layers in ascending order")
    return layers


def _part(value: int | float) -> int | float:
    if not value or (isinstance(value, float) and value >= 1):
        raise ValueError(
            "must be a whole number of tokens, or a fraction of the context between 0 and 1"
        )
    return value


Layers = Annotated[Items[Annotated[int, Field(ge=0, lt=MOST)]], AfterValidator(_ascending)]


class Similarity(Record):
    """Attention mass kept on held-out prompts: by the filter layers, and by evenly spaced ones."""

    kept: Share = Field(
        description="attention mass kept by the chosen layers, mean over full-attention layers"
    )
    evenly_spaced: Share = Field(description="the same by as many evenly spaced layers")
    error: AtLeast0 | None = Field(
        default=None,
        description=(
            "squared change of the sparse layers' outputs relative to the "
            "residual stream, summed over layers"
        ),
    )
    top_k: Count = Field(description="tokens of each filter that count as kept")
    tasks: Annotated[Items[Text], Field(min_length=1)] = Field(
        description="the held-out prompts' tasks"
    )


class OmniKV(Record):
    """Filter layers attend to everything and choose tokens for the layers up to the next one."""

    filter_layers: Annotated[Layers, Field(min_length=1)] = Field(
        description=(
            "ascending: attend to everything and choose the tokens for the layers after them, each "
            "up to the next filter layer"
        )
    )
    dense_layers: Layers = Field(
        default=(),
        description=(
            "ascending: attend to everything and choose nothing; so do all layers before the first "
            "filter layer. Layers that slide are named nowhere"
        ),
    )
    selector: Literal["last", "uniform", "exponential"] = Field(
        default="last",
        description=(
            "whose scores select the tokens: the last query's, or the mean of the last `window` "
            "queries', weighted equally or halved from each to the previous query"
        ),
    )
    window: Annotated[int, Field(ge=1, le=256)] = Field(
        default=16, description="queries of the selector"
    )
    budget: Annotated[Budget, AfterValidator(_part)] = Field(
        default=2048,
        description="tokens that a sparse layer attends to, or a fraction of the context",
    )
    prefill_ratio: Positive | None = Field(
        default=None,
        description=(
            "in chunked prefill, how many tokens of the past a sparse layer sees for each token of "
            "the chunk (OmniKV, appendix D.10); null: all. A chunk's own tokens are always seen"
        ),
    )
    similarity: Similarity | None = Field(
        default=None, description="what the filter layers keep on held-out prompts"
    )

    @model_validator(mode="after")
    def _disjoint(self) -> Self:
        if both := sorted(set(self.filter_layers) & set(self.dense_layers)):
            raise ValueError(
                f"layer {both[0]} is both in filter_layers and in dense_layers: a filter layer is "
                f"dense"
            )
        return self

    def filter_of(self, layer: int) -> int | None:
        """Return the filter layer of a full-attention layer; None if it attends to everything."""
        before = [at for at in self.filter_layers if at < layer]
        if before and layer not in (*self.filter_layers, *self.dense_layers):
            return before[-1]
        return None

    def validate_for(self, model: ModelInfo) -> None:
        """Raise ValueError if the section does not fit the model."""
        for name in ("filter_layers", "dense_layers"):
            last = max(getattr(self, name), default=0)
            if last >= model.num_layers:
                raise ValueError(
                    f"decode.omnikv.{name} names layer {last}, the model has {model.num_layers} "
                    "layers"
                )


class Decode(Record):
    """The decode section."""

    omnikv: OmniKV = Field(description="OmniKV's filter layers; `headwise filters` writes it")
    imported: Imported | None = Field(
        default=None,
        description="where the section comes from, if it was taken over from another tool's file",
    )
