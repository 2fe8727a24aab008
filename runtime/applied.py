"""Puts an artifact on a model and takes it off again."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from torch import nn

import artifacts
from artifacts import Artifact, HeadwiseError
from kernels.dispatch import BACKENDS
from runtime.allocator import keep_freed_memory
from runtime.attention.function import ATTENTION_NAME, headwise_attention, register
from runtime.attention.own import Before
from runtime.attention.paged import Batching
from runtime.attention.state import Layer, Settings, forget, layer_of, remember, settings_of
from runtime.caches.rows import check_rows
from runtime.fingerprint import check
from runtime.layers import attention_layers, sliding_layers, text_config
from runtime.low_memory.model import LowMemory
from runtime.omnikv.decode import OmniKV
from runtime.omnikv.roles import roles_of
from runtime.patterns import kernel_patterns
from runtime.plans import layer_plan
from runtime.refusals import check_sections
from runtime.sharding import Shard, shard_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from artifacts.sidecar import Array
    from runtime.watch import Watch


class _Name(str):
    """The attention's name in the configuration it is applied to; a copy of that has the attention from before."""

    former: str

    def __new__(cls, name: str, former: str) -> _Name:
        made = super().__new__(cls, name)
        made.former = former
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return self.former

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[str], tuple[str]]:
        return str, (self.former,)


class Applied:
    """An artifact at work on a model; detach() ends it."""

    def __init__(self, model: PreTrainedModel, layers: dict[nn.Module, Layer], settings: Settings) -> None:
        self._model: PreTrainedModel | None = model
        self._former = _implementations(model.config)
        self._modules = list(layers)
        self.settings = settings
        self.first_heads = {layer.number: layer.first_head for layer in layers.values()}
        config = text_config(model)
        remember(config, layers, settings)
        former = _implementations(config)
        config._attn_implementation = {**former, "": _Name(ATTENTION_NAME, former[""])}
        self._low_memory = LowMemory(model, layers, headwise_attention) if settings.low_memory else None
        # A model without a head, or of an older transformers, has none.
        batches = hasattr(model, "init_continuous_batching")
        self._batching = Batching(model, config, _no_batching(model, settings)) if batches else None
        if not settings.low_memory and any(parameter.is_cpu for parameter in model.parameters()):
            keep_freed_memory()

    @property
    def model(self) -> PreTrainedModel:
        """The model that the artifact is applied to.

        Raises:
            HeadwiseError: it no longer is.
        """
        if self._model is None:
            raise HeadwiseError("this artifact is no longer applied: its handle was undone")
        return self._model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def detach(self) -> None:
        """Give the model its former attention back, nested configurations too; later calls do nothing."""
        if self._model is None:
            return
        model, self._model = self._model, None
        model.config._attn_implementation = self._former
        forget(text_config(model), self._modules)
        self._modules = []
        if self._batching is not None:
            self._batching.remove()
            self._batching = None
        if self._low_memory is not None:
            self._low_memory.remove()
            self._low_memory = None


def _no_batching(model: PreTrainedModel, settings: Settings) -> str | None:
    """Why transformers' continuous batching is not served, None where it is."""
    if settings.decode is not None:
        return "with a decode section: transformers' pages hold every token"
    if settings.evicts:
        return "with a kv_cache section: transformers' pages hold every token"
    if settings.low_memory:
        return "with low_memory=True"
    if model.device.type != "cpu":
        return f"on {model.device.type}, where it has not been tried: undo() the artifact first"
    return None


def attach(
    artifact: Artifact,
    arrays: Mapping[str, Array] | None,
    model: nn.Module,
    *,
    strict: bool,
    check_weights: bool,
    backend: str,
    low_memory: bool = False,
    watch: bool = False,
    min_recall: float | None = None,
    dense_kernels: bool = True,
) -> Applied:
    """Check the model, plan every layer once, and switch the model over. See Headwise.apply."""
    if min_recall is not None and not (isinstance(min_recall, int | float) and 0 < min_recall <= 1):
        raise HeadwiseError(f"min_recall must be above 0 and at most 1, got {min_recall!r}")
    if backend not in ("auto", *BACKENDS):
        raise HeadwiseError(f"unknown backend {backend!r}; known: auto, {', '.join(BACKENDS)}")
    modules = attention_layers(model)
    model = _servable(model, modules)
    check_sections(artifact, modules)
    check(artifact.model, model, weights=check_weights)
    size = artifact.model.num_heads, artifact.model.num_kv_heads
    shards = {number: shard_of(model, module, *size) for number, module in modules.items()}
    if artifact.kv_cache is not None:
        check_rows(artifact.kv_cache, modules)
    dense = _dense_of(model)
    settings = Settings(
        dense_below=artifact.prefill.dense_below,
        dense=dense,
        strict=strict,
        backend=backend,
        decode=None if artifact.decode is None else _decode(artifact.decode.omnikv, modules, shards, backend),
        # The reference is slower than dense attention.
        dense_by="auto" if dense_kernels and backend != "reference" and _may_be_ours(model, dense) else "model",
        spread=len({parameter.device for parameter in model.parameters()}) > 1,
        evicts=artifact.kv_cache is not None,
        low_memory=low_memory,
        watch=_watch(min_recall) if watch or min_recall is not None else None,
    )
    layers = _plan(artifact, arrays, modules, shards, settings)
    register()
    return Applied(model, layers, settings)


def attach_dense(model: nn.Module, *, by: str) -> Applied:
    """Serve every layer densely. See runtime.apply_dense."""
    if by not in (known := ("auto", "kernel", "model")):
        raise HeadwiseError(f"by must be one of {', '.join(known)}, got {by!r}")
    modules = attention_layers(model)
    model = _servable(model, modules)
    dense = _dense_of(model)
    settings = Settings(dense_below=sys.maxsize, dense=dense, strict=False, backend="auto", dense_by=by)
    register()
    layers = {
        module: Layer(settings, number, None, before=_before(module, dense)) for number, module in modules.items()
    }
    return Applied(model, layers, settings)


def _before(module: nn.Module, dense: str) -> Before | None:
    return None if dense in ("sdpa", "eager") else Before.of(module, dense)


def _watch(min_recall: float | None) -> Watch:
    from runtime.watch import Watch

    return Watch(min_recall)


def _dense_of(model: PreTrainedModel) -> str:
    """The attention that the model has, by its name: what stays dense keeps it."""
    from transformers import AttentionInterface

    name = str(text_config(model)._attn_implementation)
    return name if name == "eager" or (name in AttentionInterface() and "paged" not in name) else "sdpa"


def _may_be_ours(model: PreTrainedModel, dense: str) -> bool:
    """Whether our kernels may take the place of that attention: of flash, flex and eager by choice they do not."""
    # Models that sdpa cannot serve come with eager.
    return dense == "sdpa" or (dense == "eager" and not model._supports_sdpa)


def _servable(model: Any, modules: dict[int, nn.Module]) -> PreTrainedModel:
    name = type(model).__name__
    if any(layer_of(module) is not None for module in modules.values()):
        raise HeadwiseError(f"this {name} has an artifact applied already: undo that first")
    if settings_of(text_config(model)) is not None:
        raise HeadwiseError(
            f"this {name} shares its configuration object with a model that has an artifact applied: give it a copy"
        )
    result: PreTrainedModel = model
    return result


def _plan(
    artifact: Artifact,
    arrays: Mapping[str, Array] | None,
    modules: dict[int, nn.Module],
    shards: dict[int, Shard],
    settings: Settings,
) -> dict[nn.Module, Layer]:
    patterns = kernel_patterns(artifact, arrays)
    layers = {}
    for number, row in enumerate(artifact.prefill.layers):
        if row is not None and number not in modules:
            raise HeadwiseError(f"the artifact has patterns for layer {number}, which has no attention here")
        if number in modules:
            shard = shards[number]
            plan = layer_plan(artifact, patterns, number, shard.heads, shard.num_kv_heads)
            role = None if settings.decode is None else settings.decode.roles.get(number)
            layers[modules[number]] = Layer(
                settings, number, plan, role, shard.heads.start, _before(modules[number], settings.dense)
            )
    return layers


def _decode(section: artifacts.OmniKV, modules: dict[int, nn.Module], shards: dict[int, Shard], backend: str) -> OmniKV:
    sliding = sliding_layers(modules)
    free = [layer for layer in modules if layer not in sliding]
    for layer in section.filter_layers:
        if layer not in free:
            why = "slides" if layer in sliding else "has no attention here"
            raise HeadwiseError(
                f"filter layer {layer} {why}: decode can filter in the layers {', '.join(map(str, free))}"
            )
    shard = next(iter(shards.values()))
    return OmniKV(
        roles=roles_of(section, free, shard.kv_heads),
        budget=section.budget,
        selector=section.selector,
        window=section.window,
        backend=backend,
        coverage=section.coverage,
        prefill_ratio=section.prefill_ratio,
        group=shard.group,
    )


def _implementations(config: Any) -> dict[str, Any]:
    """What a configuration's _attn_implementation can be set to: its own and, by name, those nested in it."""
    nested = {name: getattr(config, name, None) for name in config.sub_configs}
    return {"": config._attn_implementation} | {
        name: _implementations(part) for name, part in nested.items() if part is not None
    }
