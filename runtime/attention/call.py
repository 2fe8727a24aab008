"""Call of the attention function, with the state of its layer.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from kernels.logits import Logits
from runtime.attention.chunk import Chunk
from runtime.attention.context import Context
from runtime.attention.layer import Layer
from runtime.training import GRADIENTS, TRAINING, differentiated

# Keyword argument of attention functions: see runtime.omnikv.pass_cache.
CACHE = "headwise_cache"


def logits_of(scaling: float | None, more: Mapping[str, Any]) -> Logits:
    """Logits of a call of transformers' attention functions, from its keyword arguments."""
    argument = more.get
    return Logits(scaling, argument("softcap"), argument("s_aux"), argument("sliding_window"))


@dataclass(eq=False)
class Call:
    """Arguments of one call of the attention function, and the state of its module.

    query (B, H, Q, D), key (B, G, K, D), value (B, G, K, E).

    Attributes:
        more: keyword arguments that only some models pass.
        context: of the mask; None if the mask has none.
        cache: of the forward, where a section asks for it; None elsewhere.
        why_dense: the reason why it is not sparse, as far as it is known.
    """

    module: nn.Module
    layer: Layer
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    logits: Logits
    more: dict[str, Any]
    context: Context | None
    cache: Any = None
    why_dense: str | None = field(default=None, init=False)
    q_shape: torch.Size = field(init=False)
    k_shape: torch.Size = field(init=False)

    def __post_init__(self) -> None:
        # Each access to a tensor's shape makes a new object.
        self.q_shape = self.query.shape
        self.k_shape = self.key.shape

    def alone(self, sequence: Chunk, context: Context) -> Self:
        """Return the call of one of its sequences alone, without a mask."""
        row, queries, keys = sequence.slots
        return replace(
            self,
            query=self.query[row, :, queries],
            key=self.key[row, :, keys],
            value=self.value[row, :, keys],
            mask=None,
            context=context,
        )

    @property
    def causal(self) -> bool:
        """True if the call or its module asks for a causal mask."""
        causal = self.more.get("is_causal")
        if causal is None:
            causal = getattr(self.module, "is_causal", True)
        return bool(causal)

    @property
    def wants_weights(self) -> bool:
        """True if the call or the model's configuration asks for attention weights."""
        wanted = self.more.get("output_attentions")
        if wanted is None and torch.compiler.is_compiling():
            wanted = getattr(self.module.config, "output_attentions", False)
        elif wanted is None:
            try:
                # Not through transformers' own property, which takes as long as all else in here.
                wanted = object.__getattribute__(self.module.config, "_output_attentions")
            except AttributeError:
                # A configuration of another kind, or none.
                wanted = getattr(getattr(self.module, "config", None), "output_attentions", False)
        return bool(wanted)

    @property
    def unsupported_reason(self) -> str | None:
        """Reason why no kernel of Headwise computes this call; None for causal attention."""
        query = self.query
        key = self.key
        value = self.value
        if not self.causal:
            return "attention is not causal"
        if self.wants_weights:
            return "attention weights were asked for"
        if self.module.training or self.layer.in_training:
            return TRAINING
        if self.dropout:
            return "attention dropout is on"
        if differentiated(query, key, value, self.logits.sinks):
            return GRADIENTS
        if self.more.get("position_bias") is not None:
            return "the layer uses a position bias"
        return None
