"""Why a model, or a section of an artifact on it, cannot be served: the cause by name, read off the model's code."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from artifacts import HeadwiseError

if TYPE_CHECKING:
    from artifacts import Artifact

_INTERFACE = "transformers' attention interface"


def asks_interface(cls: type[nn.Module]) -> bool:
    """Whether a class's own code looks its attention function up in transformers' attention interface."""
    for base in cls.__mro__:
        for member in vars(base).values():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
                return True
    return False


def without_layers(model: Any, config: Any) -> HeadwiseError:
    """The error for a model none of whose layers is causal attention that goes through the interface."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        return HeadwiseError(
            f"{name} is an encoder with a decoder: only causal models with nothing but a decoder are served"
        )
    attentions = {type(module) for module in model.modules() if "attention" in type(module).__name__.lower()}
    if not attentions:
        return HeadwiseError(f"{name} has no attention that could be sparse")
    if asking := [cls.__name__ for cls in attentions if asks_interface(cls)]:
        return HeadwiseError(f"{name} is not causal: no query of {min(asking)} is kept from later keys")
    own = min((cls for cls in attentions), key=lambda cls: (len(cls.__name__), cls.__name__))
    if _has_alibi(own, config):
        return HeadwiseError(f"{name} adds ALiBi inside its own attention ({own.__name__}) and never asks {_INTERFACE}")
    return HeadwiseError(f"{name} computes attention by itself ({own.__name__}) and never asks {_INTERFACE}")


def check_layers(model: Any, modules: Mapping[int, nn.Module]) -> None:
    """Raise HeadwiseError for a layer that goes through the interface and yet can be given no pattern."""
    for module in modules.values():
        indexer = getattr(module, "indexer", None)
        if isinstance(indexer, nn.Module):
            # What it chose comes as an argument that sdpa ignores: not even the dense way would be right.
            raise HeadwiseError(
                f"{type(model).__name__} chooses the keys of each query itself ({type(indexer).__name__}): "
                "no other choice can be put in its place"
            )


def check_sections(artifact: Artifact, modules: Mapping[int, nn.Module]) -> None:
    """Raise HeadwiseError for a layer on which a section of the artifact cannot be served."""
    for number, module in modules.items():
        where = f"layer {number} ({type(module).__name__})"
        for section, given in (("kv_cache", artifact.kv_cache), ("decode", artifact.decode)):
            if given is not None and has_sinks(module):
                raise HeadwiseError(f"{where} has attention sinks of its own: the {section} section cannot serve it")
        if artifact.kv_cache is not None and caches_latents(module):
            raise HeadwiseError(
                f"{where} caches what it makes keys and values of (multi-head latent attention), for all heads "
                "together: the kv_cache section cannot serve it"
            )


def caches_latents(module: nn.Module) -> bool:
    """Whether a layer's cache holds latents in place of keys and values (DeepSeek-V2, section 2.1)."""
    return hasattr(module, "expand_kv")


def has_sinks(module: nn.Module) -> bool:
    """Whether a layer has learned logits that take part in the softmax and have no value (GPT-OSS)."""
    return getattr(module, "sinks", None) is not None


def _has_alibi(cls: type[nn.Module], config: Any) -> bool:
    names = vars(sys.modules[cls.__module__])
    return any("alibi" in name.lower() for name in names) and getattr(config, "alibi", True) is not False
