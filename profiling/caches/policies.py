"""Caches under some policy without a search: artifacts made in memory, and policies as they are
typed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import TypeAdapter, ValidationError

from artifacts import Artifact, HeadwiseError, KVCache, Prefill, SnapKV
from artifacts.schema.kv_cache import POLICY_KINDS, Policy
from profiling.caches.random_eviction import drawing
from profiling.models.loading import LoadedModel
from runtime import Headwise
from runtime.fingerprint import fingerprint
from runtime.layers import attention_layers, sliding_layers, text_config

_NAME = "policy"
# SnapKV's sizes, and tokens drawn by lot.
RANDOM = "random"
CACHES = ", ".join((*POLICY_KINDS, f"{RANDOM} (snapkv's fields, tokens drawn by lot)"))


@dataclass(frozen=True, kw_only=True)
class CacheKind:
    """A policy, and what is done to a new cache of it."""

    policy: Policy
    changed: Callable[[Any], Any] = lambda cache: cache


def parse_cache(text: str) -> CacheKind:
    """Read a policy as `parse_policy` does, or `random` with the fields of snapkv."""
    kind, colon, fields = text.partition(":")
    policy = parse_policy(f"snapkv{colon}{fields}" if kind == RANDOM else text)
    if kind == RANDOM:
        assert isinstance(policy, SnapKV)
        return CacheKind(policy=policy, changed=partial(drawing, record=policy))
    return CacheKind(policy=policy)


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
        raise HeadwiseError(
            f"every layer of {loaded.name} slides over a window of its own: none can have a policy"
        )
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
    return Headwise(
        Artifact(model=model, search=None, patterns={}, prefill=prefill, kv_cache=section)
    )


def parse_policy(text: str) -> Policy:
    """Read a policy such as `h2o`, `streaming:sinks=4,window=1020` or `snapkv:budget=0.25`.

    Raises:
        HeadwiseError: an unknown kind or field, or a value that cannot be.
    """
    kind, _, given = text.partition(":")
    if kind not in POLICY_KINDS:
        raise HeadwiseError(f"unknown policy {kind!r}; known: {', '.join(POLICY_KINDS)}")
    fields: dict[str, Any] = {"kind": kind}
    for part in filter(None, given.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise HeadwiseError(
                f"policy {text!r}: {part!r} must be FIELD=VALUE, such as window=1020"
            )
        fields[name] = _value(value)
    try:
        made: Policy = TypeAdapter(Policy).validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:2])
        raise HeadwiseError(
            f"policy {text!r}: {field}: {first['msg'].removeprefix('Value error, ')}"
        ) from None
    return made


def _value(text: str) -> int | float | bool | str:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)
