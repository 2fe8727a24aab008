"""State of an applied artifact, per attention module and per configuration, and one call of it.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from artifacts import Evidence, HeadwiseError
from artifacts.errors import one_line, shorten
from kernels.patterns import LayerPlan
from kernels.registry import CannotBuildError, NoKernelError
from runtime.attention.context import Context, Sequence
from runtime.autocast import without_autocast
from runtime.omnikv.decode import OmniKV
from runtime.omnikv.select import Role
from runtime.omnikv.session import pass_cache
from runtime.training import GRADIENTS, TRAINING, differentiated

# In a model's configuration.
ATTENTION_NAME = "headwise"
# With fewer keys attention is a small part of a prefill, and the model's own serves.
MIN_KEYS_DENSE = 1024
# Messages of torch's allocators that raise a plain RuntimeError.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "std::bad_alloc", "out of memory")
# Category, and first words of the message, of kernels.registry.NoKernelError.
_NO_KERNEL = "no fast kernel"
_Served = TypeVar("_Served")
_log = logging.getLogger("headwise")


class CallCounter:
    """Counter of attention calls by how they were served, for any number of threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        # Adding to a Counter reads and writes: a thread that comes between loses a call.
        self._lock = threading.Lock()

    def add(self, name: str) -> None:
        """Count one more call."""
        with self._lock:
            self._counts[name] += 1

    def total(self) -> Counter[str]:
        """Calls of all layers so far."""
        with self._lock:
            return Counter(self._counts)


@dataclass(frozen=True, eq=False, kw_only=True)
class Settings:
    """Options of one application of an artifact to a model, shared by its layers.

    Attributes:
        dense_by: kernel of dense calls: "auto" the faster of Headwise's and the model's, "kernel"
            Headwise's, "model" the model's.
        model_attention: the model's, "sdpa" or "eager".
        evicts: the artifact has a kv_cache section, so caches may need no mask.
        evidence: the artifact's, for the length up to which it was measured.
    """

    dense_below: int
    strict: bool = False
    backend: str = "auto"
    dense_by: str = "auto"
    model_attention: str = "sdpa"
    decode: OmniKV | None = None
    evicts: bool = False
    evidence: Evidence = field(default_factory=Evidence)
    calls: CallCounter = field(default_factory=CallCounter)
    warned: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def dense_kernels(self) -> bool:
        """True where Headwise's kernels may serve dense calls: decode, windows, prefills."""
        return self.dense_by != "model"

    @cached_property
    def kernel_from(self) -> int | None:
        """Fewest keys of a dense prefill for Headwise's kernel; None where it never serves one."""
        return {"auto": MIN_KEYS_DENSE, "kernel": 0}.get(self.dense_by)

    @cached_property
    def steps(self) -> bool:
        """True where Headwise's kernel may serve a decode step on the CPU."""
        return self.dense_kernels and self.backend in ("auto", "cpu")

    def refuse(self, reason: str, detail: str = "") -> None:
        """Raise if strict, as a call cannot be sparse; otherwise warn once for each reason."""
        if detail:
            line = f"{reason}: {detail}"
        else:
            line = reason
        if self.strict:
            raise HeadwiseError(f"cannot serve this call sparsely: {line}")
        self.warn_once(reason, f"serving densely: {line}")

    def check_length(self, tokens: int) -> None:
        """Warn once of a sparse prefill longer than the measured lengths."""
        line = self.evidence.beyond(tokens)
        if line is not None:
            self.warn_once("longer than measured", line)

    def warn_once(self, reason: str, line: str | None = None) -> None:
        """Warn of a reason, the first time."""
        with self._lock:
            first = reason not in self.warned
            self.warned.add(reason)
        if first:
            _log.warning("%s", line or reason)


@dataclass(frozen=True, eq=False)
class Layer:
    """State of one attention module.

    Attributes:
        plan: its prefill, None for a layer left alone.
        role: its decode, None for a layer left alone.
        hooks: hooks on the module, which end with the application.
        around: the modules that the module is part of, the model first.
    """

    settings: Settings
    number: int
    plan: LayerPlan | None
    role: Role | None = None
    around: tuple[weakref.ref[nn.Module], ...] = ()
    hooks: list[RemovableHandle] = field(default_factory=list, init=False)

    @cached_property
    def planned_heads(self) -> tuple[int, int]:
        """Query and KV heads that the plan is for."""
        assert self.plan is not None
        return len(self.plan.patterns), self.plan.num_kv_heads

    @property
    def in_training(self) -> bool:
        """True if a module that the module is part of is in training mode.

        The layer that is checkpointed is around the attention, which may have been left in
        evaluation mode.
        """
        for reference in self.around:
            if (module := reference()) is not None and module.training:
                return True
        return False

    def count(self, name: str) -> None:
        """Count a call as "sparse", "chosen", "kept", or by the reason why it was dense."""
        self.settings.calls.add(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Nothing: a copy of a module has nothing applied."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


@dataclass(eq=False)
class Call:
    """Arguments of one call of the attention function, and the state of its module.

    query (B, H, Q, D), key (B, G, K, D), value (B, G, K, E).

    Attributes:
        more: keyword arguments that only some models pass.
        context: of the mask; None if the mask has none.
        softcap: soft-cap of the logits, or None.
        sinks: (H,) learned logits that take part in the softmax and have no value (GPT-OSS).
        window: tokens that a query of a sliding-window layer sees, itself included.
    """

    module: nn.Module
    layer: Layer
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    scale: float | None
    more: dict[str, Any]
    context: Context | None
    softcap: float | None = field(init=False)
    sinks: Tensor | None = field(init=False)
    window: int | None = field(init=False)
    q_shape: torch.Size = field(init=False)
    k_shape: torch.Size = field(init=False)

    def __post_init__(self) -> None:
        # Each access to a tensor's shape makes a new object.
        self.q_shape = self.query.shape
        self.k_shape = self.key.shape
        more = self.more.get
        self.softcap = more("softcap")
        self.sinks = more("s_aux")
        self.window = more("sliding_window")

    def on(self, key: Tensor, value: Tensor) -> Self:
        """The same call with other keys and values."""
        return replace(self, key=key, value=value)

    def alone(self, sequence: Sequence, context: Context) -> Self:
        """Return the call of one of its sequences alone, without a mask."""
        row, queries, keys = sequence.slots
        return replace(
            self,
            query=self.query[row, :, queries],
            key=self.key[row, :, keys],
            value=self.value[row, :, keys],
            mask=None,
            context=context,
        )

    @property
    def causal(self) -> bool:
        """True if the call or its module asks for a causal mask."""
        causal = self.more.get("is_causal")
        if causal is None:
            causal = getattr(self.module, "is_causal", True)
        return bool(causal)

    @property
    def wants_weights(self) -> bool:
        """True if the call or the model's configuration asks for attention weights."""
        wanted = self.more.get("output_attentions")
        if wanted is None and torch.compiler.is_compiling():
            wanted = getattr(self.module.config, "output_attentions", False)
        elif wanted is None:
            try:
                # Not through transformers' own property, which takes as long as all else in here.
                wanted = object.__getattribute__(self.module.config, "_output_attentions")
            except AttributeError:
                # A configuration of another kind, or none.
                wanted = getattr(getattr(self.module, "config", None), "output_attentions", False)
        return bool(wanted)

    @property
    def unsupported_reason(self) -> str | None:
        """Reason why no kernel of Headwise computes this call; None for causal attention."""
        query = self.query
        key = self.key
        value = self.value
        if not self.causal:
            return "attention is not causal"
        if self.wants_weights:
            return "attention weights were asked for"
        if self.module.training or self.layer.in_training:
            return TRAINING
        if self.dropout:
            return "attention dropout is on"
        if differentiated(query, key, value, self.sinks):
            return GRADIENTS
        if self.more.get("position_bias") is not None:
            return "the layer uses a position bias"
        return None


def attempt(call: Call, serve: Callable[..., _Served], *more: object) -> _Served | str:
    """Result of serve(call, ...), one of Headwise's kernels, or the reason why it failed.

    A strict application raises that reason.
    """
    try:
        with without_autocast(call.query.device):
            return serve(call, *more)
    except HeadwiseError:
        raise
    except Exception as error:
        why = error_category(error)
        if why is None:
            raise
        call.layer.settings.refuse(why, message(error))
    if call.context is not None:
        # The kernel may serve no more.
        call.context.kernels.clear()
    # Outside the handler the error and its frames are freed: dense attention has their memory.
    return why


def error_category(error: Exception) -> str | None:
    """Return the category of an error of a kernel or an allocator; None for a caller's mistake.

    Calls are counted, and warned of, by these few categories.
    """
    if isinstance(error.__cause__, CannotBuildError):
        # Of a kernel that was selected by its name.
        error = error.__cause__
    if isinstance(error, NoKernelError):
        return _NO_KERNEL
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY):
        return "out of memory"
    module = type(error).__module__.partition(".")[0]
    if isinstance(error, RuntimeError | OSError | subprocess.SubprocessError) or module == "triton":
        return f"a kernel failed with {type(error).__name__}"
    return None


def message(error: Exception) -> str:
    """First line of an error's message, without its category."""
    lines = str(error).removeprefix(f"{_NO_KERNEL}: ").strip().splitlines()
    if not lines:
        return "no message"
    return shorten(one_line(lines[0]), 200)[1:-1]


# For a module to which nothing is applied, such as a copy's: torch's own attention.
UNAPPLIED_LAYER = Layer(Settings(dense_below=sys.maxsize, dense_by="model"), -1, None)

# Where a module keeps its state: a table of all modules would be part of every compiled graph.
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
        if layer.role is not None:
            layer.hooks.append(pass_cache(module, ATTENTION_NAME))


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
