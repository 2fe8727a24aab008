"""What is applied where, by attention module and by configuration: models do not disturb each other."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from artifacts import HeadwiseError
from kernels.patterns import LayerPlan
from runtime.decode import OmniKV, Role

_log = logging.getLogger("headwise")


@dataclass(eq=False, kw_only=True)
class Settings:
    """One application of an artifact to a model, shared by its layers.

    `dense` names the attention for all that is not sparse: "sdpa", or "eager" where the model used that.
    `evicts`: the artifact has a kv_cache section, so caches may be such as need no mask.
    """

    dense_below: int
    dense: str
    strict: bool
    backend: str
    decode: OmniKV | None = None
    evicts: bool = False
    calls: Counter[str] = field(default_factory=Counter)
    said: set[str] = field(default_factory=set)

    def refuse(self, reason: str) -> None:
        """A prefill cannot be served sparsely: raise if strict, otherwise say so the first time."""
        if self.strict:
            raise HeadwiseError(f"cannot serve this prefill sparsely: {reason}")
        if reason not in self.said:
            self.said.add(reason)
            _log.warning("serving densely: %s", reason)


@dataclass(frozen=True, eq=False)
class Layer:
    """The part of an application that one attention module needs.

    plan: its prefill, None for a layer left alone. role: its decode, None for a layer left alone.
    """

    settings: Settings
    number: int
    plan: LayerPlan | None
    role: Role | None = None


_layers: weakref.WeakKeyDictionary[nn.Module, Layer] = weakref.WeakKeyDictionary()
# Configurations compare by value and do not hash, so they are held by identity.
_configs: dict[int, tuple[weakref.ref[Any], Settings]] = {}


def layer_of(module: nn.Module) -> Layer | None:
    """What is applied to an attention module, None where nothing is."""
    return _layers.get(module)


def settings_of(config: Any) -> Settings | None:
    """What is applied to the model of this very configuration object, None where nothing is."""
    entry = _configs.get(id(config))
    return entry[1] if entry is not None and entry[0]() is config else None


def remember(config: Any, modules: dict[nn.Module, Layer], settings: Settings) -> None:
    key = id(config)
    _configs[key] = (weakref.ref(config, lambda _: _configs.pop(key, None)), settings)
    _layers.update(modules)


def forget(config: Any, modules: list[nn.Module]) -> None:
    _configs.pop(id(config), None)
    for module in modules:
        _layers.pop(module, None)
