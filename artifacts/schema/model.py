"""The model section: the model that an artifact is for."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, JsonValue, model_validator

from artifacts.schema.fields import (
    MOST_HEADS,
    Count,
    Few,
    Record,
    Sha256,
    Text,
)


class ModelInfo(Record):
    """The model an artifact is for; runtime.fingerprint makes and compares it.

    A field that an import cannot determine is None and is not compared.
    """

    name: Text = Field(
        description="a hub id, a folder's name, or `general.name` of a GGUF file with hyphens for "
        "spaces"
    )
    revision: Text | None = Field(
        default=None, description="the hub revision, where one was asked for"
    )
    architecture: Text | None = Field(description="the transformers class")
    config_sha256: Sha256 | None = Field(
        description="over the configuration that determines attention (`runtime.fingerprint`)"
    )
    config: dict[str, JsonValue] | None = Field(
        default=None,
        description="the fields that `config_sha256` covers besides those below, so that a field "
        "in which another model differs can be named; null in imports",
    )
    weights_sha256: Sha256 | None = Field(description="over a sample of every weight")
    num_layers: Few = Field(description="layers; at most 65,536 query heads in all")
    num_heads: Few = Field(description="query heads a layer")
    num_kv_heads: Few = Field(description="KV heads a layer; divides `num_heads`")
    head_dim: Annotated[int, Field(ge=1, le=65_536)] = Field(description="channels a head")
    rope: dict[str, JsonValue] | None = Field(
        description="the rotary embedding's parameters, as the configuration has them"
    )
    max_positions: Count = Field(
        description="the longest prompt that the configuration allows, in tokens"
    )

    @property
    def unknown(self) -> tuple[str, ...]:
        """Return the names of the missing hashes, without which any model of the shape matches."""
        return tuple(
            name for name in ("config_sha256", "weights_sha256") if getattr(self, name) is None
        )

    @model_validator(mode="after")
    def _groups(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads ({self.num_heads}), got {self.num_kv_heads}"
            )
        if self.num_layers * self.num_heads > MOST_HEADS:
            raise ValueError(
                f"num_layers * num_heads must be at most {MOST_HEADS}, got {self.num_layers} "
                f"layers of {self.num_heads} query heads"
            )
        return self
