"""Memory of a prefill, predicted from the model's configuration.

The figures are those of batch 1 beside what a driver and a kernel library take, and of blocks as
Llama's: two norms, an MLP of three matrices, rotary embeddings. `headwise memory` measures what is
predicted here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from artifacts import HeadwiseError
from artifacts.errors import one_line, shorten
from artifacts.page.layout import aligned
from runtime.layers import layer_kind

# What Headwise's growing cache keeps free for new tokens, as a fraction of those it holds.
_ROOM = 8


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model that memory follows from.

    Attributes:
        parameters: numbers, all weights.
        itemsize: bytes of a number.
    """

    layers: int
    sliding: int
    window: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    parameters: int
    itemsize: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Peak bytes of a prefill: weights, cache on the device, bank on the CPU, and passing."""

    weights: int
    cache: int
    bank: int
    passing: int

    @property
    def device(self) -> int:
        """Bytes on the device that computes."""
        return self.weights + self.cache + self.passing


def shape_of(config: Any, dtype: str = "bfloat16") -> Shape:
    """The sizes in a configuration of transformers.

    Raises:
        HeadwiseError: it is of no causal language model, or lacks a size.
    """
    from transformers import AutoModelForCausalLM

    text = config.get_text_config(decoder=True)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        heads = int(text.num_attention_heads)
        layers = int(text.num_hidden_layers)
        return Shape(
            layers=layers,
            sliding=sum(layer_kind(text, layer) == "sliding" for layer in range(layers)),
            window=int(getattr(text, "sliding_window", None) or 0),
            hidden=int(text.hidden_size),
            heads=heads,
            kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            intermediate=int(text.intermediate_size)
            * int(getattr(text, "num_experts_per_tok", None) or 1),
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            itemsize=getattr(torch, dtype).itemsize,
        )
    # RuntimeError: a size that differs by layer.
    except (AttributeError, ValueError, TypeError, RuntimeError) as error:
        reason = one_line(str(error).strip().splitlines()[0])[:200]
        raise HeadwiseError(
            f"{type(config).__name__} has not the sizes that are needed to predict: {reason}"
        ) from error


def plan(shape: Shape, length: int, *, banked: int = 0, growing: bool = True) -> Plan:
    """Predict the peak memory of a prefill of `length` tokens.

    Args:
        shape: the model.
        length: tokens of the prompt.
        banked: full-attention layers whose keys and values go to the bank in CPU memory
            (`offload`).
        growing: the cache is one of new_cache, which keeps an eighth free.
    """
    e = shape.itemsize
    full = shape.layers - shape.sliding
    token = 2 * shape.kv_heads * shape.head_dim * e
    if growing:
        headroom = max(256, length // _ROOM)
    else:
        headroom = 0
    room = length + headroom
    kept = token * ((full - banked) * room + shape.sliding * min(length, shape.window))
    # Cosines and sines, identifiers and positions.
    passing = _whole(shape, length, token) + length * (2 * shape.head_dim * e + 16)
    return Plan(
        weights=shape.parameters * e, cache=kept, bank=token * banked * length, passing=passing
    )


def _whole(shape: Shape, length: int, token: int) -> int:
    """Predict bytes next to weights and cache: the largest of rotation, attention, MLP and norm."""
    e = shape.itemsize
    hidden = shape.hidden * e
    queries = shape.heads * shape.head_dim * e
    rotation = 3 * hidden + 4 * queries + token
    attention = 3 * hidden + 2 * queries + 2 * token + 8 * shape.heads
    mlp = 4 * hidden + 3 * shape.intermediate * e
    norm = 3 * hidden + 2 * 4 * shape.hidden
    return length * max(rotation, attention, mlp, norm)


def read_shape(text: str, dtype: str) -> Shape:
    """The shape in a config.json, in the folder of one, or in JSON itself.

    Raises:
        HeadwiseError: there is none.
    """
    from transformers import AutoConfig

    path = Path(text).expanduser()
    try:
        if not text.lstrip().startswith("{"):
            if path.is_dir():
                path = path / "config.json"
            text = path.read_text(encoding="utf-8")
        fields = json.loads(text)
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    except OSError as error:
        raise HeadwiseError(f"no shape in {shorten(str(path))}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = one_line(str(error).strip().splitlines()[0])[:200]
        raise HeadwiseError(
            f"{shorten(text)} is no configuration of transformers: {reason}"
        ) from None
    return shape_of(config, dtype)


def table(plans: Mapping[int, Plan], memory: int | None) -> str:
    """For each length what is needed, in GiB, and with `memory` in bytes whether that fits."""
    lines = [
        ["tokens", "weights", "cache", "passing", "device", "bank", *(["fits"] if memory else [])]
    ]
    for length, predicted in plans.items():
        parts = (
            predicted.weights,
            predicted.cache,
            predicted.passing,
            predicted.device,
            predicted.bank,
        )
        if memory is None:
            fits = []
        else:
            if predicted.device <= memory:
                answer = "yes"
            else:
                answer = "no"
            fits = [answer]
        lines.append([str(length), *(f"{part / 2**30:.1f}" for part in parts), *fits])
    return "\n".join(
        [
            *aligned(lines),
            "GiB; device = weights + cache + passing, next to what the driver takes; bank = CPU "
            "memory",
        ]
    )
