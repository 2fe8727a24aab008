"""The kv_cache section: what each layer and KV head keeps of its keys and values.

    kv_cache:
      policies:
        stream: {kind: streaming, sinks: 4, window: 1020}
        h2o: {kind: h2o, heavy: 0.1, recent: 0.1}
      layers: [stream, h2o, [full, stream, stream], null, ...]

A row is one policy for all KV heads, or one for each; null is a layer that slides over a window of the model's own.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from artifacts.imported import Imported
from artifacts.patterns import Record, Size, matching

POLICY_KINDS = ("full", "streaming", "h2o", "snapkv")


def _budget(value: int | float) -> int | float:
    if isinstance(value, float) and not 0 <= value <= 1:
        raise ValueError("must be a whole number of tokens, or a share of those seen between 0 and 1")
    return value


Budget = Annotated[Annotated[int, Field(ge=0)] | float, AfterValidator(_budget)]
PolicyName = Annotated[
    str,
    matching("[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", "a letter or digit and then up to 63 letters, digits, '_', '.' or '-'"),
]


class Full(Record):
    """Everything is kept."""

    kind: Literal["full"] = "full"


class Streaming(Record):
    """The first `sinks` tokens and the last `window`, the newest included (StreamingLLM, section 3.2).

    positions: "cache" counts a token's position inside the cache, so that a stream never ends; "original" leaves it as
        it was in the text (DuoAttention's streaming heads; StreamingLLM's ablation).
    """

    kind: Literal["streaming"] = "streaming"
    sinks: Annotated[int, Field(ge=0)] = 4
    window: Size = 1020
    positions: Literal["cache", "original"] = "cache"


class H2O(Record):
    """The tokens that were attended to most, for each KV head, and the latest ones (H2O, section 4 and Algorithm 1).

    heavy, recent: how many, or their share of the tokens seen so far.
    normalised: scores are divided by how many queries could see a token, which else favours old ones.
    eviction: "top_k" keeps the best of each call's whole cache; "greedy" evicts one token after each query, as
        Algorithm 1 does.
    """

    kind: Literal["h2o"] = "h2o"
    heavy: Budget = 0.1
    recent: Budget = 0.1
    normalised: bool = False
    eviction: Literal["top_k", "greedy"] = "top_k"


class SnapKV(Record):
    """Of each prompt what its last queries attend to; what is generated is kept (SnapKV, section 4).

    budget: tokens kept of a prompt, the window included, or their share of it.
    window: the prompt's last queries, which vote and are kept.
    pool: votes are averaged over so many neighbours, an odd number.
    """

    kind: Literal["snapkv"] = "snapkv"
    budget: Annotated[Annotated[int, Field(ge=1)] | float, AfterValidator(_budget)] = 1024
    window: Annotated[int, Field(ge=1, le=1024)] = 64
    pool: Annotated[int, Field(ge=1, le=63)] = 7


Policy = Annotated[Full | Streaming | H2O | SnapKV, Field(discriminator="kind")]
Row = PolicyName | Annotated[tuple[PolicyName, ...], Field(min_length=1)]


class KVCache(Record):
    """Policies by name, and a row for each layer; None for one that slides over a window of the model's own.

    imported: where they come from, if they were not chosen here.
    """

    policies: dict[PolicyName, Policy] = Field(default_factory=dict)
    layers: Annotated[tuple[Row | None, ...], Field(min_length=1)]
    imported: Imported | None = None

    def heads(self, layer: int, num_kv_heads: int) -> tuple[str, ...] | None:
        """The names of a layer's policies, one for each KV head; None for a layer that slides."""
        row = self.layers[layer]
        return (row,) * num_kv_heads if isinstance(row, str) else row

    def fault(self, num_layers: int, num_kv_heads: int) -> str | None:
        """What does not fit a model of this shape, or within the section; None where all does."""
        if len(self.layers) != num_layers:
            return f"layers has {len(self.layers)} rows, the model has {num_layers} layers"
        unused = dict.fromkeys(self.policies)
        for layer in range(num_layers):
            names = self.heads(layer, num_kv_heads)
            if names is not None and len(names) != num_kv_heads:
                return f"layers[{layer}] has {len(names)} names, the model has {num_kv_heads} KV heads"
            for name in names or ():
                if name not in self.policies:
                    return f"layers[{layer}]: no policy is called {name!r}; known: {', '.join(self.policies)}"
                unused.pop(name, None)
        if unused:
            return f"policies.{next(iter(unused))} is used by no layer: remove it or use it in layers"
        for name, policy in self.policies.items():
            if isinstance(policy, H2O) and policy.heavy == 0 and policy.recent == 0:
                return f"policies.{name} keeps nothing: heavy and recent are both 0"
            if isinstance(policy, SnapKV) and policy.pool % 2 == 0:
                return f"policies.{name}.pool must be odd, got {policy.pool}"
            if isinstance(policy, SnapKV) and isinstance(policy.budget, int) and policy.budget <= policy.window:
                return f"policies.{name}.budget must be above its window of {policy.window} tokens, got {policy.budget}"
        return None
