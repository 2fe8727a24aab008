"""What is applied to which model: the state of its attention modules and configurations."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from runtime.attention.layer import Layer, Settings

# For a module to which nothing is applied, such as a copy's: torch's own attention.
UNAPPLIED_LAYER = Layer(Settings(dense_below=sys.maxsize, dense_by="model"), -1, None)

# Where a module keeps its state: transformers hands the module to its attention function, and
# nothing of ours. A table of all modules would be part of every compiled graph.
_ATTRIBUTE = "_headwise_layer"
# Configurations compare by value and do not hash, so they are held by identity.
_configs: dict[int, _Applied] = {}


class _Applied(NamedTuple):
    """Application to the model of a configuration.

    Attributes:
        config: configuration of the model's language part.
        settings: options of the application.
        former: configurations, and what their attention was before, as _attn_implementation takes
            it.
    """

    config: weakref.ref[Any]
    settings: Settings
    former: tuple[tuple[weakref.ref[Any], dict[str, Any]], ...]


def layer_of(module: nn.Module) -> Layer | None:
    """State of an attention module, None where nothing is applied."""
    layer: Layer | None = getattr(module, _ATTRIBUTE, None)
    return layer


def settings_of(config: Any) -> Settings | None:
    """Settings of the model of this very configuration object, None where nothing is applied."""
    entry = _configs.get(id(config))
    if entry is None or entry.config() is not config:
        return None
    return entry.settings


def remember(
    config: Any,
    modules: Mapping[nn.Module, Layer],
    settings: Settings,
    former: Iterable[tuple[Any, dict[str, Any]]] = (),
) -> None:
    """Keep the state of a model's attention modules and of its language part's configuration.

    Args:
        config: configuration of the model's language part.
        modules: state by attention module.
        settings: options of the application.
        former: as in _Applied, with configurations in place of references.
    """
    key = id(config)
    reference = weakref.ref(config, lambda _: _configs.pop(key, None))
    before = tuple((weakref.ref(each), attention) for each, attention in former)
    _configs[key] = _Applied(reference, settings, before)
    for module, layer in modules.items():
        setattr(module, _ATTRIBUTE, layer)


def forget(settings: Settings, modules: Iterable[nn.Module]) -> None:
    """Drop what remember() kept, and restore the attention of the configurations."""
    for module in modules:
        # A wrapper passes on the attributes of the module inside.
        layer = vars(module).get(_ATTRIBUTE)
        if layer is not None and layer.settings is settings:
            delattr(module, _ATTRIBUTE)
            for hook in layer.hooks:
                hook.remove()
    for key, applied in list(_configs.items()):
        if applied.settings is settings:
            _configs.pop(key, None)
            for reference, attention in applied.former:
                if (config := reference()) is not None:
                    config._attn_implementation = attention
