"""The decode section: which layers choose the tokens that the others attend to (OmniKV)."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from artifacts.patterns import Record


def _ascending(layers: tuple[int, ...]) -> tuple[int, ...]:
    if any(b <= a for a, b in pairwise(layers)):
        raise ValueError("must be different layers in ascending order")
    return layers


def _budget(value: int | float) -> int | float:
    if isinstance(value, float) and not 0 < value < 1:
        raise ValueError("must be a whole number of tokens, or a share of the context between 0 and 1")
    return value


Layers = Annotated[tuple[Annotated[int, Field(ge=0)], ...], AfterValidator(_ascending)]
Mass = Annotated[float, Field(ge=0.0, le=1.0001)]


class Similarity(Record):
    """Attention mass kept on held-out prompts: by the chosen filter layers, by evenly spaced ones, by random ones.

    Means over the full-attention layers; `random` is the mean of `random_samples` choices.
    """

    kept: Mass
    evenly_spaced: Mass
    random: Mass
    random_samples: Annotated[int, Field(ge=1)]
    top_k: Annotated[int, Field(ge=1)]
    tasks: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]


class OmniKV(Record):
    """Filter layers attend to everything and choose; the layers after each, up to the next, attend to what it chose.

    dense_layers: attend to everything and choose nothing; so do all before the first filter layer, and none that slides
        is named anywhere.
    selector: whose scores choose: the last query's, or the uniform or exponential mean of the last `window` queries'.
    budget: tokens that a sparse layer attends to, or their share of the context.
    prefill_ratio: tokens of the past that layers served by a filter see in a chunk of a prompt, for each token of the
        chunk; None is all (appendix D.10).
    """

    filter_layers: Annotated[Layers, Field(min_length=1)]
    dense_layers: Layers = ()
    selector: Literal["last", "uniform", "exponential"] = "last"
    window: Annotated[int, Field(ge=1, le=256)] = 16
    budget: Annotated[Annotated[int, Field(ge=1)] | float, AfterValidator(_budget)] = 2048
    prefill_ratio: Annotated[float, Field(gt=0)] | None = None
    similarity: Similarity | None = None

    @model_validator(mode="after")
    def _disjoint(self) -> Self:
        if both := sorted(set(self.filter_layers) & set(self.dense_layers)):
            raise ValueError(f"layer {both[0]} is both in filter_layers and in dense_layers: a filter layer is dense")
        return self


class Decode(Record):
    """What serves decode."""

    omnikv: OmniKV
