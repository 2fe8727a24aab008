"""One call of an attention layer, as transformers makes it.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from runtime.state import Layer


class Call(NamedTuple):
    """What transformers calls the registered attention function with, and what is applied to the module.

    query (B, H, Q, D), key (B, G, K, D), value (B, G, K, E). `more` are the keyword arguments that only some models
    give. `layer` is None where nothing is applied to the module.
    """

    module: nn.Module
    layer: Layer | None
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    scale: float | None
    more: dict[str, Any]

    @property
    def softcap(self) -> float | None:
        return self.more.get("softcap")

    @property
    def causal(self) -> bool:
        causal = self.more.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if causal is None else causal)

    @property
    def wants_weights(self) -> bool:
        wanted = self.more.get("output_attentions")
        if wanted is None:
            wanted = getattr(getattr(self.module, "config", None), "output_attentions", False)
        return bool(wanted)
