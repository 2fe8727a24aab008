"""What is served of one attention layer of vLLM, and why nothing is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from artifacts import Streaming
from artifacts.errors import shorten
from kernels.patterns import LayerPlan
from runtime.attention.calls import no_kernel
from runtime.omnikv.roles import Role
from runtime.vllm.snapkv import Snap

# By vLLM's names; scales for each token or head are other caches.
_EIGHT_BITS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True, eq=False, kw_only=True)
class ServedLayer:
    """What is served of one attention layer of vLLM in this process.

    number: by vLLM's name for it, None where the name has none or several. why_dense: why no prefill of it is sparse.
    plan: that of its heads, where it has patterns. role: what it does by the decode section, None where that is
    nothing. keeps: the tokens that it keeps by the kv_cache section, None for all. owns: whether all of its requests
    are served here; those of any other layer are vLLM's. eight_bits: what its cache of 8 bits holds, which vLLM hands
    out as bytes.
    """

    number: int | None
    why_dense: str | None = None
    plan: LayerPlan | None = None
    role: Role | None = None
    keeps: Streaming | Snap | None = None
    owns: bool = False
    eight_bits: torch.dtype | None = None


def number_of(layer_name: str) -> int | None:
    """The number of a layer by vLLM's name for it, None where the name has none or several."""
    numbers = [int(part) for part in layer_name.split(".") if part.isdecimal()]
    return numbers[0] if len(numbers) == 1 else None


def eight_bits(layer: Any) -> torch.dtype | None:
    """What a cache of 8 bits holds, None for any other cache."""
    return _EIGHT_BITS.get(str(getattr(layer, "kv_cache_dtype", None)))


def why_unserved(layer: Any, every: Iterable[Any], *, num_layers: int, both_ways: bool) -> str | None:
    """Why nothing of an attention layer is served here, whatever the artifact says of it; None where it can be.

    Args:
        layer: an attention layer of vLLM.
        every: all of them.
        num_layers: of the artifact's model.
        both_ways: some of the model's tokens see each other both ways.
    """
    impl, number = layer.impl, number_of(layer.layer_name)
    ours: bool | None = getattr(impl, "ours", None)
    if ours is None:
        return "a draft model's, or another backend's"
    if str(getattr(layer.attn_type, "value", layer.attn_type)) != "decoder":
        return "no causal self-attention"
    if number is None or number >= num_layers:
        return "no layer of the artifact's model"
    if layer.sliding_window is not None:
        return "it slides"
    if impl.alibi_slopes is not None:
        return "it uses ALiBi"
    if layer.kv_cache_torch_dtype != layer.dtype and (reason := _why_unread(layer)) is not None:
        return reason
    if layer.head_size_v != layer.head_size:
        return "its keys and values differ in size"
    if ours and both_ways:
        return "some of its tokens see each other both ways"
    shares = {getattr(getattr(each, "impl", None), "kv_sharing_target_layer_name", None) for each in every}
    if ours and (impl.kv_sharing_target_layer_name is not None or layer.layer_name in shares):
        return "it shares its cache with another layer"
    return None


def _why_unread(layer: Any) -> str | None:
    """Why a cache of another dtype than the layer's cannot be read here."""
    stored = eight_bits(layer)
    if stored is None:
        return f"its cache holds {shorten(layer.kv_cache_dtype)}, not {layer.dtype}"
    if layer._k_scale.numel() > 1 or layer._v_scale.numel() > 1:
        return "its cache has a scale for each head"
    kept = torch.empty(1, 1, 1, layer.head_size, dtype=stored, device=layer._k_scale.device)
    return no_kernel("auto", kept.to(layer.dtype), kept, kept)
