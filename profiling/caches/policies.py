"""Artifacts made in memory, for measurements that need a cache under some policy and no search."""

from __future__ import annotations

from artifacts import Artifact, HeadwiseError, KVCache, Prefill
from artifacts.kv_cache import Policy
from profiling.models.loading import LoadedModel
from runtime import Headwise
from runtime.fingerprint import fingerprint
from runtime.layers import attention_layers, sliding_layers, text_config

_NAME = "policy"


def with_policy(loaded: LoadedModel, policy: Policy | None) -> Headwise:
    """Dense prefill, and one policy for all layers that do not slide over a window of their own.

    Args:
        loaded: the model that it can be applied to.
        policy: what a layer keeps; None keeps everything, in a cache without a kv_cache section.

    Raises:
        HeadwiseError: every layer of the model slides, so that none can have a policy.
    """
    if policy is None:
        return with_section(loaded, None)
    modules = attention_layers(loaded.model)
    free = modules.keys() - sliding_layers(modules)
    if not free:
        raise HeadwiseError(f"every layer of {loaded.name} slides over a window of its own: none can have a policy")
    layers = range(text_config(loaded.model).num_hidden_layers)
    rows = tuple(_NAME if layer in free else None for layer in layers)
    return with_section(loaded, KVCache(policies={_NAME: policy}, layers=rows))


def with_section(loaded: LoadedModel, section: KVCache | None) -> Headwise:
    """Dense prefill with a kv_cache section, as if an artifact with it had been loaded.

    Raises:
        HeadwiseError: the section does not fit the model.
    """
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    if section is not None and (fault := section.fault(model.num_layers, model.num_kv_heads)):
        raise HeadwiseError(f"kv_cache.{fault}")
    # Layers without patterns are left alone: dense.
    prefill = Prefill(dense_below=0, layers=(None,) * model.num_layers)
    return Headwise(Artifact(model=model, search=None, patterns={}, prefill=prefill, kv_cache=section))
