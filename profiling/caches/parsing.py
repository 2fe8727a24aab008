"""Cache policies as they are typed on a command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from artifacts import HeadwiseError
from artifacts.errors import shorten
from artifacts.schema.kv_cache import POLICY_KINDS, Policy
from artifacts.schema.validation import explain

# First tokens that caches keep, as StreamingLLM does.
SINKS = 4
# SnapKV's sizes, and tokens drawn at random.
RANDOM = "random"
CACHES = ", ".join((*POLICY_KINDS, f"{RANDOM} (snapkv's fields, tokens drawn by lot)"))


@dataclass(frozen=True, kw_only=True)
class CacheKind:
    """A policy.

    Attributes:
        random: SnapKV's sizes, but tokens drawn at random.
    """

    policy: Policy
    random: bool = False


def parse_cache(text: str) -> CacheKind:
    """Read a policy as `parse_policy` does, or `random` with the fields of snapkv."""
    kind, colon, fields = text.partition(":")
    spelled = text
    if kind == RANDOM:
        spelled = f"snapkv{colon}{fields}"
    policy = parse_policy(spelled)
    return CacheKind(policy=policy, random=kind == RANDOM)


def parse_policy(text: str) -> Policy:
    """Read a policy such as `h2o`, `streaming:sinks=4,window=1020` or `snapkv:budget=0.25`.

    Raises:
        HeadwiseError: an unknown kind or field, or a value that cannot be.
    """
    kind, _, options = text.partition(":")
    if kind not in POLICY_KINDS:
        raise HeadwiseError(f"unknown policy {kind!r}; known: {', '.join(POLICY_KINDS)}")
    fields = {"kind": kind, **fields_of(options)}
    try:
        policy: Policy = TypeAdapter(Policy).validate_python(fields)
    except ValidationError as error:
        raise HeadwiseError(f"policy {text!r}: {explain(error)}") from None
    return policy


def fields_of(text: str) -> dict[str, Any]:
    """Read FIELD=VALUE,...

    Raises:
        HeadwiseError: a part is not of that form, or names a field again.
    """
    fields: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise HeadwiseError(f"{shorten(part)} must be FIELD=VALUE, such as window=1020")
        if name in fields:
            raise HeadwiseError(f"{shorten(part)}: give {shorten(name)} once")
        fields[name] = _value(value)
    return fields


def _value(text: str) -> int | float | bool | str:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)
