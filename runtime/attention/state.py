"""What is applied where, by attention module and by configuration: models do not disturb each
other."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from artifacts import HeadwiseError
from kernels.patterns import LayerPlan
from runtime.dense import LEAST
from runtime.omnikv.decode import OmniKV
from runtime.omnikv.select import Role

# Fewer queries than one tile are more like decode than like prefill (the tail of a prompt, drafts
# to verify).
MIN_QUERIES = 64
# New tokens behind a past from which on patterns serve. An index over a long past costs as much for
# few tokens as for many: behind 8,192 and 32,768 tokens patterns took 0.98 and 1.01 of dense
# attention for 64, 0.78 and 0.67 for 200.
MIN_BEHIND_A_PAST = 128
_log = logging.getLogger("headwise")


def enough_queries(q_len: int, k_len: int, dense_tail: int) -> bool:
    """Whether an index pays for the queries of a sequence, the last `q_len` of its `k_len` keys."""
    least = MIN_QUERIES if q_len == k_len else MIN_BEHIND_A_PAST
    return q_len >= max(least, dense_tail + 1)


class Calls:
    """How the calls of attention layers were served, counted by any number of threads at once."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        # Adding to a Counter reads and writes: a thread that comes between loses a call.
        self._lock = threading.Lock()

    def add(self, how: str) -> None:
        """One more call of a layer served so."""
        with self._lock:
            self._counts[how] += 1

    def total(self) -> Counter[str]:
        """Calls so far of all layers together, by how they were served."""
        with self._lock:
            return Counter(self._counts)


@dataclass(eq=False, kw_only=True)
class Settings:
    """One application of an artifact to a model, shared by its layers.

    `dense` names the attention for all that is not sparse: "sdpa", or "eager" where the model used
    that. `dense_by` says what serves it: "auto" the faster of our kernels and `dense`, "kernel"
    ours, "model" `dense`. `spread`: the model lies on several devices, and masks are moved.
    `evicts`: the artifact has a kv_cache section, so caches may be such as need no mask."""

    dense_below: int
    dense: str
    strict: bool
    backend: str
    decode: OmniKV | None = None
    evicts: bool = False
    dense_by: str = "auto"
    spread: bool = False
    calls: Calls = field(default_factory=Calls)
    said: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        # Whether our kernels may serve what stays dense: decode over every key, layers that slide,
        # other prefills.
        self.dense_kernels = self.dense_by != "model"
        # Keys from which on our kernel may serve a dense prefill that sees all of them; None where
        # it never does.
        self.kernel_from = {"auto": LEAST, "kernel": 0}.get(self.dense_by)
        # Whether our kernel may serve a step of decode on the CPU.
        self.steps = self.dense_kernels and self.backend in ("auto", "cpu")

    def refuse(self, reason: str, detail: str = "") -> None:
        """A call cannot be served sparsely: raise if strict, otherwise say so the first time,
        whatever the detail."""
        said = f"{reason}: {detail}" if detail else reason
        if self.strict:
            raise HeadwiseError(f"cannot serve this call sparsely: {said}")
        self.say(reason, f"serving densely: {said}")

    def say(self, what: str, line: str | None = None) -> None:
        """Warn of something, the first time."""
        with self._lock:
            first = what not in self.said
            self.said.add(what)
        if first:
            _log.warning("%s", line or what)


@dataclass(frozen=True, eq=False)
class Layer:
    """The part of an application that one attention module needs.

    plan: its prefill, None for a layer left alone. role: its decode, None for a layer left alone.
    """

    settings: Settings
    number: int
    plan: LayerPlan | None
    role: Role | None = None
    # By which code that was compiled finds the module.
    key: int = field(default_factory=itertools.count().__next__)

    @cached_property
    def fewest(self) -> int:
        """Queries from which on a call is sparse: all of fewer would be in the tail that sees every
        key in any case."""
        return max(MIN_QUERIES, 0 if self.plan is None else self.plan.dense_tail + 1)

    @cached_property
    def planned_heads(self) -> tuple[int, int]:
        """Query and KV heads that the plan is for."""
        assert self.plan is not None
        return len(self.plan.patterns), self.plan.num_kv_heads

    def count(self, how: str) -> None:
        """One more call of this layer served so: "sparse", "chosen", "kept", or the reason why it
        was dense."""
        self.settings.calls.add(how)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a module has nothing applied."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


# Of a module that nothing is applied to, such as a copy's: torch's own attention.
NOTHING = Layer(
    Settings(dense_below=sys.maxsize, dense="sdpa", strict=False, backend="auto", dense_by="model"),
    -1,
    None,
)

# Where a module keeps what is applied to it: a table of all modules would be part of every compiled
# graph.
_ATTRIBUTE = "_headwise_layer"
_modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
# Configurations compare by value and do not hash, so they are held by identity.
_configs: dict[int, tuple[weakref.ref[Any], Settings]] = {}


def layer_of(module: nn.Module) -> Layer | None:
    """What is applied to an attention module, None where nothing is."""
    layer: Layer | None = getattr(module, _ATTRIBUTE, None)
    return layer


def module_of(layer: int) -> nn.Module:
    """The attention module to which the layer with this key is applied."""
    return _modules[layer]


def settings_of(config: Any) -> Settings | None:
    """What is applied to the model of this very configuration object, None where nothing is."""
    entry = _configs.get(id(config))
    return entry[1] if entry is not None and entry[0]() is config else None


def remember(config: Any, modules: dict[nn.Module, Layer], settings: Settings) -> None:
    key = id(config)
    _configs[key] = (weakref.ref(config, lambda _: _configs.pop(key, None)), settings)
    for module, layer in modules.items():
        setattr(module, _ATTRIBUTE, layer)
        _modules[layer.key] = module


def forget(config: Any, modules: list[nn.Module]) -> None:
    _configs.pop(id(config), None)
    for module in modules:
        layer: Layer | None = vars(module).pop(_ATTRIBUTE, None)
        if layer is not None:
            _modules.pop(layer.key, None)
