"""Apply an artifact, or dense attention, to a transformers model, and undo it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, SupportsIndex

from torch import nn

from artifacts import Artifact, HeadwiseError
from artifacts.errors import one_line
from kernels.patterns import LayerPlan
from kernels.registry import BACKENDS
from runtime.allocator import keep_freed_memory
from runtime.attention.applied import forget, layer_of, remember, settings_of
from runtime.attention.function import register
from runtime.attention.layer import ATTENTION_NAME, CallCounter, Layer, Settings
from runtime.attention.servers import serve_by_dense_kernel, serve_by_patterns, serve_step
from runtime.devices import execution_device
from runtime.fingerprint import check
from runtime.layers import (
    attention_layers,
    check_sections,
    full_layers,
    inner_model,
    make_plans,
    surrounding,
    text_config,
)
from runtime.memory import CacheBytes, cache_bytes

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

    from runtime.attention.layer import Server
    from runtime.omnikv.decode import OmniKV

# Serializes apply and undo, which read and write the same state.
_changing = threading.RLock()
# Names under which calls are counted, and what stats() calls them; all others are reasons for dense
# attention.
_SERVED = {"sparse": "sparse", "chosen": "decode", "kept": "kept"}


def apply_dense(model: nn.Module, *, by: str = "kernel") -> Handle:
    """Serve every attention layer of a transformers model densely: a sparse model's baseline.

    Args:
        model: a transformers model.
        by: "kernel": Headwise's kernel over every key, wherever it can serve; "auto": the faster of
            it and the model's own attention; "model": the model's own.

    Returns:
        The handle: leaving it as a context manager, or its undo(), restores the model.

    Raises:
        HeadwiseError: the model cannot be served or has something applied already; `by` is
            unknown.
    """
    names = ("auto", "kernel", "model")
    if by not in names:
        raise HeadwiseError(f"by must be one of {', '.join(names)}, got {by!r}")
    return attach(model, Settings(dense_below=sys.maxsize, dense_by=by))


def undo(model: nn.Module) -> None:
    """Remove an applied artifact, or apply_dense, from a model and restore its attention.

    The handle is not needed. A model to which nothing is applied stays unchanged.

    Raises:
        HeadwiseError: not a model.
    """
    if not isinstance(model, nn.Module):
        raise HeadwiseError(f"undo takes the model, got {type(model).__name__}")
    with _changing:
        modules = list(model.modules())
        applied = {layer.settings for module in modules if (layer := layer_of(module))}
        for settings in applied:
            forget(settings, modules)


def attach(
    model: nn.Module,
    settings: Settings,
    artifact: Artifact | None = None,
    *,
    check_weights: bool = True,
) -> Handle:
    """Check the model, plan every layer once, and switch the model over. See LoadedArtifact.apply.

    Args:
        model: the model to switch over.
        settings: the user's options; the handle's also have the fields that depend on the model.
        artifact: the artifact to apply; None for dense attention.
        check_weights: see LoadedArtifact.apply.
    """
    names = ["auto", *(name for name, backend in BACKENDS.items() if "attention" in backend.ops)]
    if settings.backend not in names:
        raise HeadwiseError(f"backend must be one of {', '.join(names)}, got {settings.backend!r}")
    model = inner_model(model)
    with _changing:
        modules = _attention_layers(model)
        plug_ins = _PlugIns()
        if artifact is not None:
            check(artifact.model, model, weights=check_weights)
            check_sections(artifact, modules)
            plug_ins = _plug_ins(artifact, model, modules, settings.backend)
        layers, settings = _plan(model, modules, settings, artifact, plug_ins)
        if settings.evicts:
            _rehearse(artifact, model, layers, settings)
        return Handle(artifact, model, layers, settings, plug_ins.decode)


class _PlugIns(NamedTuple):
    """Servers of the artifact's decode and kv_cache sections: only they are imported.

    Attributes:
        decode: the decode section at work; None without one.
        evicting: the server of a kv_cache section, for all layers; None without one.
        selected: servers of a decode section, by layer.
    """

    decode: OmniKV | None = None
    evicting: Server | None = None
    selected: Mapping[int, Server] = MappingProxyType({})

    def servers_of(self, layer: int) -> tuple[Server, ...]:
        """Those of a layer, in the order in which they are asked."""
        own = (self.evicting, self.selected.get(layer))
        return tuple(server for server in own if server is not None)


def _plug_ins(
    artifact: Artifact, model: Any, modules: dict[int, nn.Module], backend: str
) -> _PlugIns:
    """Make the servers of an artifact's sections beside prefill."""
    evicting = None
    if artifact.kv_cache is not None:
        from runtime.caches.evicting import serve_evicting
        from runtime.caches.make import check_cache_layers

        check_cache_layers(model, modules)
        evicting = serve_evicting
    if artifact.decode is None:
        return _PlugIns(evicting=evicting)
    from runtime.omnikv.decode import OmniKV
    from runtime.omnikv.server import SelectedServer

    decode = OmniKV(artifact.decode.omnikv, full_layers(modules), backend=backend)
    selected = {layer: SelectedServer(decode, role, layer) for layer, role in decode.roles.items()}
    return _PlugIns(decode, evicting, selected)


def _rehearse(
    artifact: Artifact | None, model: Any, layers: dict[nn.Module, Layer], settings: Settings
) -> None:
    """Run the model once on caches under policies, unless that was done before."""
    from runtime.caches.rehearsal import rehearse, rehearsed

    if rehearsed(model) is not None:
        return
    own = replace(settings, calls=CallCounter(), warned=set())
    apart = {module: replace(layer, settings=own) for module, layer in layers.items()}
    with Handle(artifact, model, apart, own):
        rehearse(model)


def _plan(
    model: nn.Module,
    modules: dict[int, nn.Module],
    settings: Settings,
    artifact: Artifact | None,
    plug_ins: _PlugIns,
) -> tuple[dict[nn.Module, Layer], Settings]:
    """Return the state of each attention module, and the settings for this model."""
    eager = text_config(model)._attn_implementation == "eager"
    dense_by = settings.dense_by
    plans: dict[int, LayerPlan] = {}
    if artifact is not None:
        if eager and model._supports_sdpa:
            # The model supports sdpa, so the user chose eager: dense calls keep it. apply_dense
            # names its kernel.
            dense_by = "model"
        plans = make_plans(artifact)
    settings = replace(
        settings,
        dense_by=dense_by,
        model_attention="eager" if eager else "sdpa",
        selects=plug_ins.decode is not None,
        evicts=plug_ins.evicting is not None,
    )
    around = surrounding(model, modules.values())
    layers = {}
    for number, module in modules.items():
        plan = plans.get(number)
        own = plug_ins.servers_of(number)
        servers = (*own, serve_step, serve_by_patterns, serve_by_dense_kernel)
        if plan is None:
            servers = (*own, serve_step, serve_by_dense_kernel)
        layers[module] = Layer(settings, number, plan, own, servers, around[module])
    return layers, settings


class Handle:
    """An artifact, or dense attention, applied to a model. A context manager; undo() ends it.

    Attributes:
        settings: options of the application, and the counts of its calls.
    """

    def __init__(
        self,
        artifact: Artifact | None,
        model: PreTrainedModel,
        layers: dict[nn.Module, Layer],
        settings: Settings,
        decode: OmniKV | None = None,
    ) -> None:
        self._artifact = artifact
        self._decode = decode
        self._model: PreTrainedModel | None = model
        self.settings = settings
        self._layers = len(layers)
        self._sparse_layers = sum(_is_sparse(layer) for layer in layers.values())
        config = text_config(model)
        register()
        former = _implementations(config)
        with ExitStack() as failed:
            # If one of these fails, the model is left unchanged.
            failed.callback(forget, settings, layers)
            whole = (model.config, _implementations(model.config))
            remember(config, layers, settings, former=(whole, (config, former)))
            if decode is not None:
                _pass_caches(layers, decode)
            config._attn_implementation = {**former, "": _Name(ATTENTION_NAME, former[""])}
            failed.pop_all()
        devices = {parameter.device for parameter in model.parameters()} | {execution_device(model)}
        if any(device.type == "cpu" for device in devices):
            keep_freed_memory()

    @property
    def _applied_to(self) -> PreTrainedModel | None:
        """The model; None after this application was undone, also by headwise.undo(model)."""
        model = self._model
        if model is None or settings_of(text_config(model)) is not self.settings:
            return None
        return model

    def __repr__(self) -> str:
        model = self._applied_to
        if model is None:
            return "<Handle: undone>"
        name = model.name_or_path or "without a name"
        artifact = "no artifact"
        if self._artifact is not None:
            artifact = f"artifact {(self._artifact.content_sha256 or 'unsaved')[:12]}"
        layers = f"{self._sparse_layers} of {self._layers} layers sparse"
        return f"<Handle: {type(model).__name__} {one_line(name)}, {artifact}, {layers}>"

    def undo(self) -> None:
        """Restore the model's former attention, nested configurations too. Any number of times."""
        model = self._model
        self._model = None
        if model is not None:
            with _changing:
                forget(self.settings, model.modules())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def new_cache(self, *, offload: str = "auto") -> Cache:
        """Make an empty cache for one generation: see LoadedArtifact.new_cache."""
        model = self._applied_to
        if model is None:
            raise HeadwiseError("this artifact is no longer applied: it was undone")
        from runtime.caches.make import make_cache

        return make_cache(self._artifact, model, offload)

    def cache_bytes(self, cache: Cache) -> CacheBytes:
        """Count the bytes of a cache on the device and in the bank, headroom included."""
        return cache_bytes(cache)

    def stats(self) -> dict[str, Any]:
        """Calls of attention layers so far: {"sparse": n, "dense": {reason: n}}.

        "sparse" counts prefills by the patterns or, with prefill_ratio, by selected tokens. With a
        decode section, "decode" counts steps by selected tokens, and "tokens" is the mean number
        of tokens that a KV head of a sparse layer read in a step. With a kv_cache section, "kept"
        counts calls served from a cache under policies; each index that such a call builds also
        counts under "sparse".
        """
        artifact = self._artifact
        counts = self.settings.calls.total()
        sections = {
            "sparse": artifact,
            "chosen": artifact and artifact.decode,
            "kept": artifact and artifact.kv_cache,
        }
        result: dict[str, Any] = {
            _SERVED[name]: counts[name] for name, section in sections.items() if section is not None
        }
        result["dense"] = {why: count for why, count in counts.items() if why not in _SERVED}
        if self._decode is not None and (tokens := self._decode.tokens_read) is not None:
            result["tokens"] = tokens
        return result


def _pass_caches(layers: dict[nn.Module, Layer], decode: OmniKV) -> None:
    """Have the modules of a decode section pass their caches to their attention."""
    from runtime.omnikv.pass_cache import pass_cache

    for module, layer in layers.items():
        if layer.number in decode.roles:
            layer.hooks.append(pass_cache(module, ATTENTION_NAME))


class _Name(str):
    """Name of the attention in a configuration; a copy of that gets the former one.

    transformers finds an attention function by this name alone, and a configuration is copied and
    pickled with its values. A plain name would be in copies of the model, to which nothing is
    applied, and a process without Headwise could not load them.
    """

    former: str

    def __new__(cls, name: str, former: str) -> _Name:
        instance = super().__new__(cls, name)
        instance.former = former
        return instance

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return self.former

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[str], tuple[str]]:
        return str, (self.former,)


def _attention_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Attention layers of a model to which nothing is applied."""
    modules = attention_layers(model)
    name = type(model).__name__
    if any(layer_of(module) is not None for module in modules.values()):
        attention = text_config(model)._attn_implementation
        ended = ""
        if attention != ATTENTION_NAME:
            ended = f", which set_attn_implementation({attention!r}) has ended"
        raise HeadwiseError(
            f"this {name} already has an artifact or apply_dense applied{ended}: "
            f"headwise.undo(model) removes it"
        )
    if settings_of(text_config(model)) is not None:
        raise HeadwiseError(
            f"this {name} shares its configuration object with a model that has an artifact "
            f"applied: build it from a copy"
        )
    return modules


def _is_sparse(layer: Layer) -> bool:
    """True if a head of the layer has a pattern other than dense."""
    if layer.plan is None:
        return False
    return any(pattern.kind != "dense" for pattern in layer.plan.patterns)


def _implementations(config: Any) -> dict[str, Any]:
    """Values for _attn_implementation: of the configuration, and by name of those nested in it."""
    values = {"": config._attn_implementation}
    for name in config.sub_configs:
        nested = getattr(config, name, None)
        if nested is not None:
            values[name] = _implementations(nested)
    return values
