"""One call of an attention layer, as transformers makes it, and what of it no kernel of ours does.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from kernels import dispatch
from runtime.attention.layout import Layout, Part
from runtime.attention.masks import PrefillMask
from runtime.attention.state import Layer


@dataclass(eq=False)
class Call:
    """What transformers calls the registered attention function with, and what is applied to the
    module.

    query (B, H, Q, D), key (B, G, K, D), value (B, G, K, E). `more` are the keyword arguments that
    only some models give. Of those are softcap, sinks (H,), which are learned logits that take part
    in the softmax and have no value (GPT-OSS), and window, how many tokens a query sees, itself
    included, where the layer slides. tokens: where the real ones are; None where the mask does not
    say."""

    module: nn.Module
    layer: Layer
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    scale: float | None
    more: dict[str, Any]
    softcap: float | None = field(init=False)
    sinks: Tensor | None = field(init=False)
    window: int | None = field(init=False)
    tokens: Layout | None = field(init=False)

    def __post_init__(self) -> None:
        given = self.more.get
        self.softcap, self.sinks, self.window = (
            given("softcap"),
            given("s_aux"),
            given("sliding_window"),
        )
        self.tokens = self.mask.tokens if isinstance(self.mask, PrefillMask) else None

    def on(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Self:
        """The same call with other tensors."""
        return replace(self, query=query, key=key, value=value, mask=mask)

    def part(self, part: Part, mask: Tensor | None = None) -> Self:
        """The call of one of its sequences alone."""
        row, queries, keys = part.places
        return self.on(
            self.query[row, :, queries], self.key[row, :, keys], self.value[row, :, keys], mask
        )

    @property
    def causal(self) -> bool:
        causal = self.more.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if causal is None else causal)

    @property
    def wants_weights(self) -> bool:
        wanted = self.more.get("output_attentions")
        if wanted is None and torch.compiler.is_compiling():
            wanted = getattr(self.module.config, "output_attentions", False)
        elif wanted is None:
            try:
                # Past what transformers' configurations do at each look, which takes as long as all
                # else in here.
                wanted = object.__getattribute__(self.module.config, "_output_attentions")
            except AttributeError:
                # One of another kind, or none.
                wanted = getattr(getattr(self.module, "config", None), "output_attentions", False)
        return bool(wanted)

    @property
    def special(self) -> str | None:
        """What the call asks for that no kernel of ours does, None where it is causal attention
        (sinks or a window)."""
        query = self.query
        key = self.key
        value = self.value
        more = self.more
        if not self.causal:
            return "attention is not causal"
        if self.wants_weights:
            return "attention weights were asked for"
        if self.dropout:
            return "attention dropout is on (the model is in training mode)"
        if torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in (query, key, value, self.sinks)
        ):
            return "gradients are required (use torch.no_grad or inference_mode)"
        if more.get("position_bias") is not None:
            return "the layer uses a position bias"
        if (dtype := query.dtype) != key.dtype or dtype != value.dtype:
            return (
                f"queries, keys and values differ in type: {query.dtype}, "
                f"{key.dtype}, {value.dtype}"
            )
        return None


def no_kernel(backend: str, query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why no kernel serves the call. The reference always does, slower than dense: only where asked
    for."""
    if backend == "auto":
        return dispatch.why_slow(query, key, value)
    reason = dispatch.backend(backend).supports(query, key, value)
    return reason and f"kernel {backend}: {reason}"
