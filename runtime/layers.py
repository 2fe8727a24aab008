"""Finds the layers that go through transformers' attention interface, without a table of model names."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

from artifacts import HeadwiseError
from runtime.refusals import asks_interface, check_layers, without_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the model's language part, the model's own where it has no other part."""
    return model.config.get_text_config(decoder=True)


def heads_of(model: Any) -> tuple[int, int]:
    """Query and KV heads of a model, in all processes together."""
    return heads_in(text_config(model))


def heads_in(config: Any) -> tuple[int, int]:
    """Query and KV heads by a configuration; of layers that differ (Gemma 4), of the full ones."""
    heads = int(of_full_layers(config, "num_attention_heads"))
    return heads, int(of_full_layers(config, "num_key_value_heads") or heads)


def of_full_layers(config: Any, name: str) -> Any:
    """A field of a configuration, None where it has none; of layers that differ in it (Gemma 4), the full ones'."""
    kinds = list(getattr(config, "layer_types", None) or ())
    layers = getattr(config, "per_layer_config", None)
    if not layers or "full_attention" not in kinds:
        return getattr(config, name, None)
    return getattr(layers[kinds.index("full_attention")], name, None)


def attention_layers(model: nn.Module) -> dict[int, nn.Module]:
    """The causal self-attention modules of a model's language part by layer number, in order.

    A layer is one if its class calls transformers' attention interface. Layers of another sort, such as
    linear attention in a hybrid model, are missing from the result.

    Raises:
        HeadwiseError: not a transformers model; no layer of it goes through the attention interface, or one that does
            cannot be given a pattern (see runtime.refusals); two modules claim the same layer.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise HeadwiseError(f"{type(model).__name__} is not a transformers PreTrainedModel: pass the model itself")
    config = text_config(model)
    found: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        if not _is_layer(module, config):
            continue
        layer = int(module.layer_idx)
        if layer in found:
            raise HeadwiseError(f"{type(model).__name__} has two attentions in layer {layer}, one is {name}")
        found[layer] = module
    if not found:
        raise without_layers(model, config)
    check_layers(model, found)
    return dict(sorted(found.items()))


def sliding_layers(modules: dict[int, nn.Module]) -> set[int]:
    """Those of the attention layers that see a window only."""
    return {layer for layer, module in modules.items() if _slides(module)}


def window_of(module: nn.Module) -> int:
    """How many tokens a layer that slides sees, the newest included.

    Raises:
        HeadwiseError: it does not say so.
    """
    for holder in (module, getattr(module, "config", None)):
        window = getattr(holder, "sliding_window", None)
        if isinstance(window, int):
            return window
    raise HeadwiseError(f"{type(module).__name__} slides, and does not say over which window")


def _slides(module: nn.Module) -> bool:
    if getattr(module, "sliding_window", None) is not None or "sliding" in str(getattr(module, "layer_type", "")):
        return True
    # Where a configuration has no types of layers, transformers has all of them slide (Mistral).
    config = getattr(module, "config", None)
    typed = getattr(config, "layer_types", None) is not None
    return not typed and getattr(config, "sliding_window", None) is not None


def eager_attention(module: nn.Module) -> Any | None:
    """The eager attention function that the module's class would use, None where it has none."""
    return inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward")


def _is_layer(module: nn.Module, config: Any) -> bool:
    return (
        isinstance(getattr(module, "layer_idx", None), int)
        and getattr(module, "config", None) is config
        and getattr(module, "is_causal", True) is not False
        and not getattr(module, "is_cross_attention", False)
        and asks_interface(type(module))
    )
