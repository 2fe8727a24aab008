"""The kv_cache section: keys and values that each layer and KV head keeps.

    kv_cache:
      policies:
        stream: {kind: streaming, sinks: 4, window: 1020}
        h2o: {kind: h2o, heavy: 0.1, recent: 0.1}
      layers: [stream, h2o, [full, stream, stream], null, ...]

A row is one policy for all KV heads, or one policy per KV head. null is a layer with sliding-window
attention in the model.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Discriminator, Field, Tag, model_validator

from artifacts.schema.fields import Budget, Count, Imported, Items, Natural, Record, matching
from artifacts.schema.model import ModelInfo

PolicyName = Annotated[
    str,
    matching(
        "[A-Za-z0-9][A-Za-z0-9_.-]{0,63}",
        "a letter or digit and then up to 63 letters, digits, '_', '.' or '-'",
    ),
]


class Full(Record):
    """everything is kept"""

    kind: Literal["full"] = Field(default="full", description=__doc__)


class Streaming(Record):
    """the first tokens and the last (StreamingLLM, section 3.2; DuoAttention's streaming heads)"""

    kind: Literal["streaming"] = Field(default="streaming", description=__doc__)
    sinks: Natural = Field(default=4, description="first tokens that are kept")
    window: Count = Field(
        default=1020, description="last tokens that are kept, the newest included"
    )
    positions: Literal["cache", "original"] = Field(
        default="cache",
        description=(
            "a token's position is counted in the cache, so that a stream "
            "never ends, or is that in the text"
        ),
    )


class H2O(Record):
    """each KV head's most attended tokens, and the latest (H2O, section 4 and Algorithm 1)"""

    kind: Literal["h2o"] = Field(default="h2o", description=__doc__)
    heavy: Budget = Field(
        default=0.1,
        description=("the most attended tokens to keep, or their fraction of those seen so far"),
    )
    recent: Budget = Field(
        default=0.1, description="how many of the latest tokens are kept, or their share"
    )
    normalised: bool = Field(
        default=False,
        description=(
            "scores are divided by how many queries could see a token, which else favours old ones"
        ),
    )
    eviction: Literal["top_k", "greedy"] = Field(
        default="top_k",
        description=(
            "keep the best of each call's whole cache, or evict one token "
            "after each query (Algorithm 1)"
        ),
    )

    @model_validator(mode="after")
    def _keeps_some(self) -> Self:
        if self.heavy == 0 and self.recent == 0:
            raise ValueError("keeps nothing: heavy and recent are both 0")
        return self


class SnapKV(Record):
    """of each prompt what its last queries attend to; all that is generated (SnapKV, section 4)"""

    kind: Literal["snapkv"] = Field(default="snapkv", description=__doc__)
    budget: Budget = Field(
        default=1024,
        description="tokens kept of a prompt, the window included, or their fraction of it",
    )
    window: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=64, description="the prompt's last queries, which vote and are kept"
    )
    pool: Annotated[int, Field(ge=1, le=63)] = Field(
        default=7, description="number of neighbours over which votes are averaged, odd"
    )

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        if not self.budget:
            raise ValueError("budget must be more than 0")
        if self.pool % 2 == 0:
            raise ValueError(f"pool must be odd, got {self.pool}")
        if isinstance(self.budget, int) and self.budget <= self.window:
            raise ValueError(
                f"budget must be above its window of {self.window} tokens, got {self.budget}"
            )
        return self


AnyPolicy = Full | Streaming | H2O | SnapKV
Policy = Annotated[AnyPolicy, Field(discriminator="kind")]
POLICY_KINDS: tuple[str, ...] = tuple(
    cls.model_fields["kind"].default for cls in get_args(AnyPolicy)
)
Row = Annotated[
    Annotated[PolicyName, Tag("name")]
    | Annotated[Items[PolicyName], Field(min_length=1), Tag("names")],
    Discriminator(lambda row: "name" if isinstance(row, str) else "names"),
]


class KVCache(Record):
    """Policies by name, and a row for each layer; None for a sliding-window layer."""

    policies: dict[PolicyName, Policy] = Field(
        default_factory=dict, description="the policies in use; an unused one is an error"
    )
    layers: Annotated[Items[Row | None], Field(min_length=1)] = Field(
        description=(
            "a row for each layer: a policy's name for all its KV heads, or a list with one for "
            "each; `null`: the layer slides over a window of the model's own"
        )
    )
    imported: Imported | None = Field(
        default=None,
        description="where the section comes from, if it was taken over from another tool's file",
    )

    def heads(self, layer: int, num_kv_heads: int) -> tuple[str, ...] | None:
        """Return the policy names of a layer by KV head; None for a sliding-window layer."""
        row = self.layers[layer]
        if isinstance(row, str):
            return (row,) * num_kv_heads
        return row

    def validate_for(self, model: ModelInfo) -> None:
        """Raise ValueError if the section does not fit the model."""
        if len(self.layers) != model.num_layers:
            raise ValueError(
                f"kv_cache.layers has {len(self.layers)} rows, the model has {model.num_layers} "
                "layers"
            )
        unused = dict.fromkeys(self.policies)
        for layer, row in enumerate(self.layers):
            names = (row,) if isinstance(row, str) else row or ()
            if not isinstance(row, str | None) and len(names) != model.num_kv_heads:
                raise ValueError(
                    f"kv_cache.layers[{layer}] has {len(names)} names, the model has "
                    f"{model.num_kv_heads} KV heads"
                )
            for name in names:
                if name not in self.policies:
                    raise ValueError(
                        f"kv_cache.layers[{layer}]: no policy is called {name!r}; known: "
                        f"{', '.join(self.policies)}"
                    )
                unused.pop(name, None)
        if unused:
            raise ValueError(
                f"kv_cache.policies.{next(iter(unused))} is used by no layer: remove it or use it "
                "in layers"
            )
