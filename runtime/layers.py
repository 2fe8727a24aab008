"""Layers of a model that go through transformers' attention interface, and the plans of each.

Layers are found without a table of model names. Where a model, or a section of an artifact on it,
cannot be served, the message names the cause, read off the model's code."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from artifacts import HeadwiseError, Static
from artifacts.store.arrays import check_static
from kernels.patterns import Growth, LayerPlan, Pattern, make

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from artifacts import Artifact
    from artifacts.store.sidecar import Array

_INTERFACE = "transformers' attention interface"


def text_config(model: PreTrainedModel) -> Any:
    """Configuration of the model's language part, or the model's own."""
    return model.config.get_text_config(decoder=True)


def heads_of(model: Any) -> tuple[int, int]:
    """Query and KV heads of a model, in all processes together."""
    return heads_in(text_config(model))


def heads_in(config: Any) -> tuple[int, int]:
    """Query and KV heads by a configuration; of layers that differ (Gemma 4), of the full ones."""
    heads = int(of_full_layers(config, "num_attention_heads"))
    return heads, int(of_full_layers(config, "num_key_value_heads") or heads)


def of_full_layers(config: Any, name: str) -> Any:
    """Field of a configuration, None where it has none.

    Where layers differ in it (Gemma 4), that of the full ones."""
    kinds = list(getattr(config, "layer_types", None) or ())
    layers = getattr(config, "per_layer_config", None)
    if not layers or "full_attention" not in kinds:
        return getattr(config, name, None)
    return getattr(layers[kinds.index("full_attention")], name, None)


def attention_layers(model: nn.Module) -> dict[int, nn.Module]:
    """The causal self-attention modules of a model's language part by layer number, in order.

    A layer is one if its class calls transformers' attention interface. Layers of another sort,
    such as linear attention in a hybrid model, are missing from the result.

    Raises:
        HeadwiseError: not a transformers model; no layer of it goes through the attention
            interface, or one that does chooses keys itself, so that no pattern can; two modules
            claim the same layer; the model is sharded.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise HeadwiseError(
            f"{type(model).__name__} is not a transformers PreTrainedModel: pass the model itself"
        )
    config = text_config(model)
    kind = type(model).__name__
    # A DTensor's parts lie in several processes.
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise HeadwiseError(
            f"{kind} is sharded over processes: vLLM is the way to serve it with an artifact so"
        )
    layers: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        if not _is_layer(module, config):
            continue
        layer = int(module.layer_idx)
        if layer in layers:
            raise HeadwiseError(f"{kind} has two attentions in layer {layer}, one is {name}")
        if isinstance(indexer := getattr(module, "indexer", None), nn.Module):
            # What it chose comes as an argument that sdpa ignores: not even the dense way would be
            # right.
            raise HeadwiseError(
                f"{kind} chooses the keys of each query itself ({type(indexer).__name__}): "
                "no other choice can be put in its place"
            )
        layers[layer] = module
    if not layers:
        raise HeadwiseError(f"{kind} {_why_none(model, config)}")
    return dict(sorted(layers.items()))


def sliding_layers(modules: dict[int, nn.Module]) -> set[int]:
    """Sliding-window layers among the attention layers."""
    return {layer for layer, module in modules.items() if _slides(module)}


def window_of(module: nn.Module) -> int:
    """Tokens that a sliding-window layer sees, the newest included.

    Raises:
        HeadwiseError: it does not say so."""
    for holder in (module, getattr(module, "config", None)):
        window = getattr(holder, "sliding_window", None)
        if isinstance(window, int):
            return window
    raise HeadwiseError(f"{type(module).__name__} slides, and does not say over which window")


def _slides(module: nn.Module) -> bool:
    if getattr(module, "sliding_window", None) is not None or "sliding" in str(
        getattr(module, "layer_type", "")
    ):
        return True
    # Where a configuration has no types of layers, transformers has all of them slide (Mistral).
    config = getattr(module, "config", None)
    typed = getattr(config, "layer_types", None) is not None
    return not typed and getattr(config, "sliding_window", None) is not None


def eager_attention(module: nn.Module) -> Any | None:
    """The eager attention function that the module's class would use, None where it has none."""
    return inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward")


def check_sections(artifact: Artifact, modules: Mapping[int, nn.Module]) -> None:
    """Raise HeadwiseError for a layer on which a section of the artifact cannot be served."""
    for number, module in modules.items():
        where = f"layer {number} ({type(module).__name__})"
        # Learned logits that take part in the softmax and have no value (GPT-OSS).
        sinks = getattr(module, "sinks", None) is not None
        for section, given in (("kv_cache", artifact.kv_cache), ("decode", artifact.decode)):
            if sinks and given is not None:
                raise HeadwiseError(
                    f"{where} has attention sinks of its own: the {section} section cannot serve it"
                )
        if artifact.kv_cache is not None and caches_latents(module):
            raise HeadwiseError(
                f"{where} caches what it makes keys and values of (multi-head latent attention), "
                f"for all heads "
                "together: the kv_cache section cannot serve it"
            )


def caches_latents(module: nn.Module) -> bool:
    """True where a layer caches latents, not keys and values (DeepSeek-V2, section 2.1)."""
    return hasattr(module, "expand_kv")


def _is_layer(module: nn.Module, config: Any) -> bool:
    return (
        isinstance(getattr(module, "layer_idx", None), int)
        and getattr(module, "config", None) is config
        and getattr(module, "is_causal", True) is not False
        and not getattr(module, "is_cross_attention", False)
        and _asks_interface(type(module))
    )


def _asks_interface(cls: type[nn.Module]) -> bool:
    """True where a class's own code asks transformers' attention interface."""
    for base in cls.__mro__:
        for member in vars(base).values():
            if not callable(member):
                continue
            code = getattr(inspect.unwrap(member), "__code__", None)
            if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
                return True
    return False


def _why_none(model: Any, config: Any) -> str:
    """Reason why no layer of a model is causal attention that goes through the interface."""
    if getattr(model.config, "is_encoder_decoder", False):
        return (
            "is an encoder with a decoder: only causal models with nothing but a decoder are served"
        )
    attentions = {
        type(module) for module in model.modules() if "attention" in type(module).__name__.lower()
    }
    if not attentions:
        return "has no attention that could be sparse"
    if asking := [cls.__name__ for cls in attentions if _asks_interface(cls)]:
        return f"is not causal: no query of {min(asking)} is kept from later keys"
    own = min(attentions, key=lambda cls: (len(cls.__name__), cls.__name__))
    if _has_alibi(own, config):
        return f"adds ALiBi inside its own attention ({own.__name__}) and never asks {_INTERFACE}"
    return f"computes attention by itself ({own.__name__}) and never asks {_INTERFACE}"


def _has_alibi(cls: type[nn.Module], config: Any) -> bool:
    names = vars(sys.modules[cls.__module__])
    return (
        any("alibi" in name.lower() for name in names)
        and getattr(config, "alibi", True) is not False
    )


def kernel_patterns(
    artifact: Artifact, arrays: Mapping[str, Array] | None = None
) -> dict[str, Pattern]:
    """Patterns of an artifact by name, ready to be built.

    Args:
        arrays: those of its sidecar, which static patterns are read from.

    Raises:
        ArtifactError: an array of a static pattern is missing or is no list of positions.
    """
    check_static(artifact.patterns, arrays)
    patterns = {}
    for name, pattern in artifact.patterns.items():
        if isinstance(pattern, Static):
            assert arrays is not None
            columns, diagonals = (tuple(arrays[array].tolist()) for array in pattern.arrays)
            patterns[name] = make("static", columns=columns, diagonals=diagonals)
        else:
            patterns[name] = make(**pattern.model_dump())
    return patterns


def layer_plans(
    artifact: Artifact, arrays: Mapping[str, Array] | None = None
) -> dict[int, LayerPlan]:
    """Plans by layer, each for all of its heads; layers left alone have none.

    Arguments and errors: see kernel_patterns."""
    patterns = kernel_patterns(artifact, arrays)
    growth = None
    if artifact.prefill.growth is not None:
        growth = Growth(
            length=artifact.prefill.growth.length, powers=artifact.prefill.growth.powers
        )
    tail = artifact.prefill.dense_tail
    kv_heads = artifact.model.num_kv_heads
    return {
        layer: LayerPlan([patterns[name] for name in row], kv_heads, dense_tail=tail, growth=growth)
        for layer, row in enumerate(artifact.prefill.layers)
        if row is not None
    }


def part_of(plan: LayerPlan | None, heads: slice, num_kv_heads: int) -> LayerPlan | None:
    """Plan of the query heads of one process, which read `num_kv_heads` KV heads there."""
    if plan is None:
        return None
    return LayerPlan(
        plan.patterns[heads], num_kv_heads, dense_tail=plan.dense_tail, growth=plan.growth
    )
