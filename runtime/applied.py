"""Checks an artifact against a model, plans each layer, and puts it on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

import artifacts
from artifacts import Artifact, HeadwiseError
from kernels.dispatch import BACKENDS
from runtime.attention.state import Layer, Settings, layer_of, settings_of
from runtime.caches.make import check_rows
from runtime.fingerprint import check
from runtime.handle import Handle
from runtime.layers import attention_layers, check_sections, sliding_layers, text_config
from runtime.omnikv.decode import OmniKV
from runtime.plans import layer_plans

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from artifacts.store.sidecar import Array


def attach(
    artifact: Artifact,
    arrays: Mapping[str, Array] | None,
    model: nn.Module,
    *,
    strict: bool,
    check_weights: bool,
    backend: str,
    dense_kernels: bool,
) -> Handle:
    """Check the model, plan every layer once, and switch the model over. See Headwise.apply."""
    if backend not in ("auto", *BACKENDS):
        raise HeadwiseError(f"unknown backend {backend!r}; known: auto, {', '.join(BACKENDS)}")
    model, modules = _servable(model)
    check_sections(artifact, modules)
    check(artifact.model, model, weights=check_weights)
    if artifact.kv_cache is not None:
        check_rows(artifact.kv_cache, modules)
    dense = _dense_of(model)
    settings = Settings(
        dense_below=artifact.prefill.dense_below,
        dense=dense,
        strict=strict,
        backend=backend,
        decode=None
        if artifact.decode is None
        else _decode(artifact.decode.omnikv, modules, backend),
        # The reference is slower than dense attention.
        dense_by="auto"
        if dense_kernels and backend != "reference" and _may_be_ours(model, dense)
        else "model",
        spread=len({parameter.device for parameter in model.parameters()}) > 1,
        evicts=artifact.kv_cache is not None,
    )
    plans = layer_plans(artifact, arrays)
    if missing := plans.keys() - modules.keys():
        raise HeadwiseError(
            f"the artifact has patterns for layer {min(missing)}, which has no attention here"
        )
    roles = {} if settings.decode is None else settings.decode.roles
    layers = {}
    for number, module in modules.items():
        layers[module] = Layer(settings, number, plans.get(number), roles.get(number))
    return Handle(artifact, model, layers, settings)


def apply_dense(model: nn.Module, *, by: str = "kernel") -> Handle:
    """Serve every attention layer of a transformers model densely, without an artifact: the
    baseline of a sparse one.

    Args:
        model: a transformers model. by: "kernel": Headwise's kernel over every key, wherever it can
        serve; "auto": the faster of it and what the
            model had; "model": what it had.

    Returns:
        The handle: leaving it as a context manager, or its undo(), restores the model.

    Raises:
        HeadwiseError: the model cannot be served or has an artifact applied already; `by` is
        unknown.
    """
    if by not in (known := ("auto", "kernel", "model")):
        raise HeadwiseError(f"by must be one of {', '.join(known)}, got {by!r}")
    model, modules = _servable(model)
    dense = _dense_of(model)
    settings = Settings(
        dense_below=sys.maxsize, dense=dense, strict=False, backend="auto", dense_by=by
    )
    layers = {module: Layer(settings, number, None) for number, module in modules.items()}
    return Handle(None, model, layers, settings)


def _dense_of(model: PreTrainedModel) -> str:
    """The attention of what stays dense: "eager" where the model uses that, else "sdpa"."""
    return "eager" if text_config(model)._attn_implementation == "eager" else "sdpa"


def _may_be_ours(model: PreTrainedModel, dense: str) -> bool:
    """Whether our kernels may take the place of that attention: of eager by choice they do not."""
    # Models that sdpa cannot serve come with eager.
    return dense == "sdpa" or (dense == "eager" and not model._supports_sdpa)


def _servable(model: Any) -> tuple[PreTrainedModel, dict[int, nn.Module]]:
    """A model to which nothing is applied, and its attention layers."""
    modules = attention_layers(model)
    name = type(model).__name__
    if any(layer_of(module) is not None for module in modules.values()):
        raise HeadwiseError(f"this {name} has an artifact applied already: undo that first")
    if settings_of(text_config(model)) is not None:
        raise HeadwiseError(
            f"this {name} shares its configuration object with a model that has an artifact "
            f"applied: give it a copy"
        )
    return model, modules


def _decode(section: artifacts.OmniKV, modules: dict[int, nn.Module], backend: str) -> OmniKV:
    sliding = sliding_layers(modules)
    free = [layer for layer in modules if layer not in sliding]
    for layer in section.filter_layers:
        if layer not in free:
            why = "slides" if layer in sliding else "has no attention here"
            raise HeadwiseError(
                f"filter layer {layer} {why}: decode can filter in the layers "
                f"{', '.join(map(str, free))}"
            )
    return OmniKV(section, free, backend=backend)
