"""Layers of a model that go through transformers' attention interface, and the plans of each.

No table of model names is needed. If a model, or a section of an artifact on it, cannot be served,
the message names the cause, read from the model's code.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from artifacts import HeadwiseError
from artifacts.errors import ranges
from kernels.patterns import LayerPlan, make
from runtime.interface import (
    asks_interface,
    bypassing,
    instance_asks_interface,
    name_of_forward,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from artifacts import Artifact

_INTERFACE = "transformers' attention interface"

# The tokens that a layer's queries see: all earlier ones, those of a sliding window, or others
# (chunks, the layer's own selection, none), which patterns, filters and policies leave alone.
Kind = Literal["full", "sliding", "other"]
# Of transformers' types of layers. A hybrid layer has attention and a recurrent state; "attention"
# is the former name of full_attention.
_KINDS: dict[str, Kind] = {
    "full_attention": "full",
    "attention": "full",
    "hybrid": "full",
    "sliding_attention": "sliding",
    "hybrid_sliding": "sliding",
}
SLIDES = "slides over a window already"
# Models whose full_attention layers slide where the configuration has a window.
_TYPED_FULL_SLIDES = ("minimax",)


def text_config(model: PreTrainedModel) -> Any:
    """Configuration of the model's language part, or the model's own."""
    return model.config.get_text_config(decoder=True)


def inner_model(model: Any) -> Any:
    """The transformers model inside of PEFT's, with the adapters; any other model itself."""
    # Without PEFT there is no such model.
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel | peft.PeftMixedModel):
        return model
    base = model.base_model
    if isinstance(base, peft.tuners.tuners_utils.BaseTuner):
        return base.model
    # Prompts that were learned are put before the model.
    return base


def heads_of(model: Any) -> tuple[int, int]:
    """Query and KV heads of a model, in all processes together."""
    return heads_in(text_config(model))


def heads_in(config: Any) -> tuple[int, int]:
    """Query and KV heads by a configuration; of layers that differ (Gemma 4), of the full ones."""
    heads = int(of_full_layers(config, "num_attention_heads"))
    return heads, int(of_full_layers(config, "num_key_value_heads") or heads)


def of_full_layers(config: Any, name: str) -> Any:
    """Field of a configuration, None where it has none.

    Where layers differ in it (Gemma 4), that of the full ones.
    """
    kinds = list(getattr(config, "layer_types", None) or ())
    layers = getattr(config, "per_layer_config", None)
    if not layers or "full_attention" not in kinds:
        return getattr(config, name, None)
    return getattr(layers[kinds.index("full_attention")], name, None)


def attention_layers(model: nn.Module) -> dict[int, nn.Module]:
    """The causal self-attention modules of a model's language part by layer number, in order.

    A layer is one if its forward calls transformers' attention interface. Layers of another sort,
    such as linear attention in a hybrid model, are missing from the result.

    Raises:
        HeadwiseError: not a transformers model; no layer of it goes through the attention
            interface, or one that does selects keys itself, so that no pattern can; a forward was
            replaced by one that does not; two modules claim the same layer; the model is sharded.
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
            # Its selection is an argument that sdpa ignores, so dense attention is wrong, too.
            raise HeadwiseError(
                f"{kind} selects the keys of each query itself ({type(indexer).__name__}): "
                "patterns cannot replace its selection"
            )
        layers[layer] = module
    if not layers:
        raise HeadwiseError(f"{kind} {_why_none(model, config)}")
    _check_forwards(model, layers.values())
    return dict(sorted(layers.items()))


def surrounding(
    model: nn.Module, modules: Iterable[nn.Module]
) -> dict[nn.Module, tuple[weakref.ref[nn.Module], ...]]:
    """References to the modules that each module is part of, the model first."""
    names = {module: name for name, module in model.named_modules()}
    around = {}
    for module in modules:
        parts = names[module].split(".")
        outer = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
        around[module] = tuple(map(weakref.ref, outer))
    return around


def layer_kind(config: Any, layer: int, module: nn.Module | None = None) -> Kind:
    """Kind of attention of a layer, from the configuration of a model's language part.

    Args:
        config: the configuration.
        layer: the layer's number.
        module: its attention, which decides if the configuration has no types of layers.
    """
    named = layer_type(config, layer)
    own = _config_of(config, layer)
    window = getattr(own, "sliding_window", None)
    if named is not None:
        if named == "full_attention" and window and config.model_type in _TYPED_FULL_SLIDES:
            return "sliding"
        return _KINDS.get(named, "other")
    # As transformers makes masks then: all layers slide, or all attend within chunks.
    if window is not None or getattr(module, "sliding_window", None) is not None:
        return "sliding"
    return "full" if getattr(own, "attention_chunk_size", None) is None else "other"


def layer_type(config: Any, layer: int) -> str | None:
    """Return transformers' type of a layer, None if the configuration has no types of layers."""
    # Mllama has no types: these layers attend to images.
    if layer in (getattr(config, "cross_attention_layers", None) or ()):
        return "cross_attention"
    types = getattr(config, "layer_types", None)
    if not types:
        return None
    return str(types[layer]) if layer < len(types) else "unknown"


def layer_kinds(modules: Mapping[int, nn.Module]) -> dict[int, Kind]:
    """Kinds of attention layers by number."""
    return {layer: layer_kind(module.config, layer, module) for layer, module in modules.items()}


def full_layers(modules: Mapping[int, nn.Module]) -> list[int]:
    """The attention layers that see every token, in order."""
    return [layer for layer, kind in sorted(layer_kinds(modules).items()) if kind == "full"]


def sliding_layers(modules: Mapping[int, nn.Module]) -> set[int]:
    """Sliding-window layers among the attention layers."""
    return {layer for layer, kind in layer_kinds(modules).items() if kind == "sliding"}


def why_not_full(config: Any, layer: int, module: nn.Module | None = None) -> str | None:
    """Reason why a layer does not see every token, None where it does.

    Arguments: see layer_kind.
    """
    kind = layer_kind(config, layer, module)
    if kind == "full":
        return None
    if kind == "sliding":
        return SLIDES
    return f"is of the type {layer_type(config, layer) or 'chunked_attention'}"


def section_faults(artifact: Artifact, reasons: Mapping[int, str | None]) -> Iterator[str]:
    """Lines on the layers that a section must not name, or does not name and must.

    Args:
        artifact: artifact whose sections are checked.
        reasons: why layers of the model do not see every token, by why_not_full.
    """
    refused = {layer: why for layer, why in reasons.items() if why not in (None, SLIDES)}
    for layer, row in enumerate(artifact.prefill.layers):
        # A layer that slides is served without its patterns: see docs/served.md.
        if row is not None and layer in refused:
            yield f"prefill.layers[{layer}] must be null: the layer {refused[layer]}"
    if artifact.kv_cache is not None:
        for layer, names in enumerate(artifact.kv_cache.layers):
            why = reasons.get(layer)
            if names is not None and why is not None:
                yield f"kv_cache.layers[{layer}] must be null: the layer {why}"
            if names is None and why is None:
                yield (
                    f"kv_cache.layers[{layer}] must name a policy, such as full: the layer sees "
                    "every token"
                )
    if artifact.decode is not None:
        omnikv = artifact.decode.omnikv
        full = [layer for layer, why in reasons.items() if why is None]
        if not full:
            yield "decode must be left out: no layer of this model sees every token"
            return
        for layer in omnikv.filter_layers:
            if (why := reasons.get(layer)) is not None:
                yield f"filter layer {layer} {why}: decode can filter in the layers {ranges(full)}"
        for layer in omnikv.dense_layers:
            if layer in refused:
                yield f"decode.omnikv.dense_layers must not name {layer}: it {refused[layer]}"


def window_of(module: nn.Module) -> int:
    """Most tokens that a sliding or chunked layer sees, the newest included.

    Raises:
        HeadwiseError: the configuration has no window.
    """
    layer: Any = module.layer_idx
    config = _config_of(module.config, layer)
    for holder, name in (
        (module, "sliding_window"),
        (config, "sliding_window"),
        (config, "attention_chunk_size"),
    ):
        window = getattr(holder, name, None)
        if isinstance(window, int):
            return window
    raise HeadwiseError(
        f"{type(module).__name__} slides, but its configuration has no sliding_window"
    )


def _config_of(config: Any, layer: int) -> Any:
    """Configuration of one layer; that of all where layers do not differ."""
    layers = getattr(config, "per_layer_config", None)
    return layers[layer] if layers and layer < len(layers) else config


def eager_attention(module: nn.Module) -> Any | None:
    """The eager attention function that the module's class would use, None where it has none."""
    return inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward")


def check_sections(artifact: Artifact, modules: Mapping[int, nn.Module]) -> None:
    """Raise HeadwiseError for a layer on which a section of the artifact cannot be served."""
    for section in ("kv_cache", "decode"):
        if getattr(artifact, section) is not None:
            check_section(section, modules)
    reasons: dict[int, str | None] = dict.fromkeys(
        range(artifact.model.num_layers), "has no attention here"
    )
    for number, module in modules.items():
        reasons[number] = why_not_full(module.config, number, module)
    for fault in section_faults(artifact, reasons):
        raise HeadwiseError(fault)


def check_section(section: str, modules: Mapping[int, nn.Module]) -> None:
    """Raise HeadwiseError for a layer that no "kv_cache" or no "decode" section can serve."""
    for number, module in modules.items():
        why = None
        if getattr(module, "sinks", None) is not None:
            # Learned logits that take part in the softmax and have no value (GPT-OSS).
            why = "has learned attention sinks"
        elif getattr(module, "is_kv_shared_layer", False):
            why = "reads the keys and values of another layer"
        elif section == "kv_cache" and caches_latents(module):
            why = "caches latents, not keys and values (multi-head latent attention)"
        if why is not None:
            raise HeadwiseError(
                f"layer {number} ({type(module).__name__}) {why}: the {section} section cannot "
                "serve it"
            )


def caches_latents(module: nn.Module) -> bool:
    """True where a layer caches latents, not keys and values (DeepSeek-V2, section 2.1)."""
    return hasattr(module, "expand_kv")


def _is_layer(module: nn.Module, config: Any) -> bool:
    return (
        # Not that of a module inside, which a wrapper passes on (torch.compile, FSDP).
        isinstance(vars(module).get("layer_idx"), int)
        and getattr(module, "config", None) is config
        and getattr(module, "is_causal", True) is not False
        and not getattr(module, "is_cross_attention", False)
        and (instance_asks_interface(module) or any(map(asks_interface, _bases(module))))
    )


def _bases(module: nn.Module) -> Iterator[type[nn.Module]]:
    """Classes of a module that have a forward."""
    return (base for base in type(module).__mro__ if "forward" in vars(base))


def _check_forwards(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Raise HeadwiseError for a forward that was replaced by one that bypasses the interface."""
    around = surrounding(model, layers)
    names = {module: name for name, module in model.named_modules()}
    for module, outer in around.items():
        culprit: nn.Module | None = module
        if instance_asks_interface(module):
            modules = [each for reference in outer if (each := reference()) is not None]
            culprit = bypassing(modules, module)
        if culprit is not None:
            place = names[culprit] or "the model"
            raise HeadwiseError(
                f"the forward of {place} in this {type(model).__name__} is "
                f"{name_of_forward(culprit)}, which never calls {_INTERFACE}"
                + ("" if culprit is module else f" through {names[module]}")
            )


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
    if asking := [cls.__name__ for cls in attentions if asks_interface(cls)]:
        return f"is not causal: no query of {min(asking)} is kept from later keys"
    own = min(attentions, key=lambda cls: (len(cls.__name__), cls.__name__))
    if _has_alibi(own, config):
        return f"adds ALiBi inside its own attention ({own.__name__}) and never calls {_INTERFACE}"
    return f"computes its own attention ({own.__name__}) and never calls {_INTERFACE}"


def _has_alibi(cls: type[nn.Module], config: Any) -> bool:
    names = vars(sys.modules[cls.__module__])
    return (
        any("alibi" in name.lower() for name in names)
        and getattr(config, "alibi", True) is not False
    )


def make_plans(artifact: Artifact) -> dict[int, LayerPlan]:
    """Plans by layer, each for all of its heads; layers left alone have none."""
    patterns = {name: make(**record.model_dump()) for name, record in artifact.patterns.items()}
    prefill = artifact.prefill
    kv_heads = artifact.model.num_kv_heads
    return {
        layer: LayerPlan(
            [patterns[name] for name in row],
            kv_heads,
            dense_tail=prefill.dense_tail,
            length=prefill.length,
        )
        for layer, row in enumerate(prefill.layers)
        if row is not None
    }


def slice_heads(plan: LayerPlan | None, heads: slice, num_kv_heads: int) -> LayerPlan | None:
    """Plan of the query heads of one process, which read `num_kv_heads` KV heads there."""
    if plan is None:
        return None
    return LayerPlan(
        plan.patterns[heads], num_kv_heads, dense_tail=plan.dense_tail, length=plan.length
    )
