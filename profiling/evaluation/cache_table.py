"""Caches that an evaluation compares: one policy in all layers, or a section of the artifact.

A name may have fields: `snapkv:budget=0.2,window=32`, `omnikv:offload=never`. A new cache is a
function here. Imports no torch, so that a wrong option is refused at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from artifacts import H2O, HeadwiseError, SnapKV, Streaming
from artifacts.errors import shorten
from artifacts.schema.kv_cache import Policy
from profiling.caches.parsing import RANDOM, SINKS, fields_of, parse_cache
from runtime.memory import OFFLOADS

if TYPE_CHECKING:
    from profiling.evaluation.methods import Methods

OMNIKV = "omnikv"
OWN = "own"
# The density of a method whose cache does not change its prefill.
SAME = "same"

# The policy of a cache that retains a fraction of a prompt of a length.
PolicyOf = Callable[[float, int], Policy]


@dataclass(frozen=True, kw_only=True)
class Cached:
    """Changes by a cache to the method that prefills.

    Attributes:
        sections: fields of the artifact.
        kept: as in Method, None where nobody counted.
        sizes: in words.
        density: of its prefill, None where nobody counted; SAME is that without the cache.
        drawn: the policy whose tokens are drawn by lot.
        offload: as in LoadedArtifact.new_cache.
    """

    sections: Mapping[str, Any]
    kept: float | None
    sizes: str = ""
    density: float | str | None = SAME
    drawn: SnapKV | None = None
    offload: str = "auto"


# Builds what a cache changes, for prompts of a length, from the fields after its name.
BuildCache = Callable[["Methods", int, str], Cached]


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """A cache that retains or reads a part of the prompt.

    Attributes:
        description: which tokens.
        build: makes it.
        check: raises HeadwiseError for fields that cannot be.
        policy: makes the policy of a cache without fields; None for a section of the artifact.
        section: of the artifact, which must have it.
        decides_prefill: it decides itself how a prompt is attended to: patterns change nothing.
    """

    description: str
    build: BuildCache
    check: Callable[[str], object]
    policy: PolicyOf | None = None
    section: str | None = None
    decides_prefill: bool = False


CACHES: dict[str, CacheSpec] = {}


def policy(
    name: str, description: str, *, decides_prefill: bool = False
) -> Callable[[PolicyOf], PolicyOf]:
    """Register a cache under one policy; the decorated function makes the one without fields."""

    def register(usual: PolicyOf) -> PolicyOf:
        CACHES[name] = CacheSpec(
            description=description,
            build=partial(_under_policy, name, usual),
            check=lambda fields: parse_cache(f"{name}:{fields}"),
            policy=usual,
            decides_prefill=decides_prefill,
        )
        return usual

    return register


def section(name: str, description: str, field: str) -> Callable[[BuildCache], BuildCache]:
    """Register the decorated function as a cache of a section of the artifact."""

    def register(build: BuildCache) -> BuildCache:
        CACHES[name] = CacheSpec(
            description=description, build=build, check=_offload_of, section=field
        )
        return build

    return register


def _under_policy(name: str, usual: PolicyOf, methods: Methods, length: int, fields: str) -> Cached:
    """A cache of one policy in all layers that can have one."""
    if fields:
        policy = parse_cache(f"{name}:{fields}").policy
    else:
        policy = usual(methods.share, length)
    density: float | str = SAME
    if isinstance(policy, Streaming):
        seen = policy.sinks + policy.window
        computed = sum(min(at + 1, seen) for at in range(length))
        density = computed / (length * (length + 1) / 2)
    drawn = None
    if name == RANDOM:
        assert isinstance(policy, SnapKV)
        drawn = policy
    sizes = policy.model_dump(exclude={"kind"}).items()
    return Cached(
        sections={"kv_cache": methods.everywhere(policy)},
        kept=min(1.0, _kept(policy, length) / length),
        sizes=", ".join(f"{key} {value}" for key, value in sizes),
        density=density,
        drawn=drawn,
    )


def _kept(policy: Policy, length: int) -> float:
    """Tokens that a policy keeps of a prompt."""
    if isinstance(policy, Streaming):
        return policy.sinks + policy.window
    if isinstance(policy, H2O):
        return _tokens(policy.heavy, length) + _tokens(policy.recent, length)
    if isinstance(policy, SnapKV):
        return max(_tokens(policy.budget, length), policy.window)
    return length


def _tokens(budget: int | float, length: int) -> float:
    """Tokens of a budget, which is a number of them or a fraction."""
    if isinstance(budget, float):
        return budget * length
    return budget


def _offload_of(fields: str) -> str:
    """Where a section's cache keeps keys and values: `offload=never`.

    Raises:
        HeadwiseError: another field, or another value.
    """
    values = fields_of(fields)
    offload = values.pop("offload", "auto")
    if values or offload not in OFFLOADS:
        raise HeadwiseError(
            f"{shorten(fields)} must be offload={'|'.join(OFFLOADS)}: a section of the artifact "
            "has no other fields"
        )
    return str(offload)


@policy("snapkv", "of the prompt, the tokens that its last 64 queries select (Li et al. 2024)")
def _snapkv(share: float, length: int) -> Policy:
    # The window of 64 and another token; a shorter prompt is kept whole.
    return SnapKV(budget=min(max(share * length, 65) / length, 1.0))


# runtime's SnapKV with tokens drawn by lot in place of a vote.
policy(
    RANDOM,
    f"of the prompt, the first {SINKS} tokens, the last 64, and a random sample of the others "
    "(arXiv 2609.03430)",
)(_snapkv)


@policy("h2o", "heavy hitters and the latest tokens (Zhang et al. 2023)", decides_prefill=True)
def _h2o(share: float, length: int) -> Policy:
    return H2O(heavy=share / 2, recent=share / 2)


@policy(
    "streaming", "sinks and a window, also during prefill (Xiao et al. 2024)", decides_prefill=True
)
def _streaming(share: float, length: int) -> Policy:
    return Streaming(sinks=SINKS, window=max(round(share * length) - SINKS, 1))


@section(
    OMNIKV, "those that the artifact's filter layers select (OmniKV, Hao et al. 2025)", "decode"
)
def _omnikv(methods: Methods, length: int, fields: str) -> Cached:
    decode = methods.artifact.decode
    assert decode is not None
    budget = decode.omnikv.budget
    return Cached(
        sections={"decode": decode},
        kept=min(1.0, _tokens(budget, length) / length),
        sizes=f"budget {budget}",
        offload=_offload_of(fields),
    )


@section(OWN, "those of the artifact's kv_cache section, and of its decode section", "kv_cache")
def _own(methods: Methods, length: int, fields: str) -> Cached:
    artifact = methods.artifact
    return Cached(
        sections={"kv_cache": artifact.kv_cache, "decode": artifact.decode},
        kept=None,
        density=None,
        offload=_offload_of(fields),
    )
