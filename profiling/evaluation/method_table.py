"""Methods that an evaluation knows, as one table: METHODS, and CACHES for either prefill.

Every sparse method computes the last queries of a prompt densely, as many as the artifact does;
`NAME-tail` is the same method without, its size fitted anew.

`dense+CACHE` and `headwise+CACHE` are the two prefills with a cache of CACHES, or with a section of
the artifact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from artifacts import H2O, Artifact, SnapKV, Streaming
from artifacts.schema.kv_cache import Policy
from profiling.caches.parsing import RANDOM, SINKS
from profiling.speed.baselines import KERNEL, MODEL


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One row of METHODS.

    Attributes:
        sizes: a name of SIZES, where one size is fitted for all heads.
    """

    says: str
    source: str
    sizes: str | None = None


METHODS: dict[str, Kind] = {
    "dense": Kind(says="the model's own attention (sdpa)", source="Dao 2023"),
    KERNEL: Kind(says="every key, by Headwise's kernel", source="this project"),
    "headwise": Kind(says="the artifact's patterns", source="this project, after MInference 1.0"),
    "vertical_slash": Kind(
        says="vertical-slash for all heads",
        source="MInference 1.0, ablation",
        sizes="vertical_slash",
    ),
    "block_sparse": Kind(
        says="block-sparse for all heads", source="MInference 1.0, ablation", sizes="block_sparse"
    ),
    "a_shape": Kind(
        says="sinks and a window", source="StreamingLLM, Xiao et al. 2024", sizes="a_shape"
    ),
}

CacheOf = Callable[[float, int], Policy]


def _snapkv(share: float, length: int) -> SnapKV:
    return SnapKV(budget=max(share * length, 65) / length)


CACHES: dict[str, tuple[CacheOf, str]] = {
    "snapkv": (_snapkv, "of the prompt what its last 64 queries vote for (Li et al. 2024)"),
    RANDOM: (
        _snapkv,
        f"of the prompt the first {SINKS} tokens, the last 64, and others drawn (arXiv 2609.03430)",
    ),
    "h2o": (
        lambda share, _: H2O(heavy=share / 2, recent=share / 2),
        "heavy hitters and the latest (Zhang et al. 2023)",
    ),
    "streaming": (
        lambda share, length: Streaming(sinks=SINKS, window=max(round(share * length) - SINKS, 1)),
        "sinks and a window, prompts too (Xiao et al. 2024)",
    ),
}
# These caches decide themselves how a prompt is attended to: patterns would change nothing.
OF_PROMPTS = ("h2o", "streaming")
OMNIKV = "omnikv"
OWN = "own"
# What a method's name ends with where it has no dense tail, and the tail of methods where the
# artifact has none.
NO_TAIL = "-tail"
TAIL = 64


def method_names(artifact: Artifact, beside: Iterable[str] = ()) -> tuple[str, ...]:
    """List all methods of an artifact, dense first.

    Args:
        beside: other artifacts by name.
    """
    caches = [
        *CACHES,
        *([OMNIKV] if artifact.decode else []),
        *([OWN] if artifact.kv_cache else []),
    ]
    if not any(artifact.prefill.layers):
        return (MODEL, KERNEL, *(f"dense+{cache}" for cache in caches))
    with_caches = [f"{prefill}+{cache}" for cache in caches for prefill in ("dense", "headwise")]
    without = (f"{name}{NO_TAIL}" for name in METHODS if name not in (MODEL, KERNEL))
    return (
        *METHODS,
        *without,
        *(
            name
            for name in with_caches
            if name not in {f"headwise+{cache}" for cache in OF_PROMPTS}
        ),
        *(name + end for name in beside for end in ("", NO_TAIL)),
    )


def says(name: str) -> tuple[str, str]:
    """Describe a method in a line, and name its source."""
    prefill, _, cache = name.partition("+")
    if not cache:
        kind = METHODS[name.removesuffix(NO_TAIL)]
        if name.endswith(NO_TAIL):
            tail = ", without a dense tail"
        else:
            tail = ""
        return kind.says + tail, kind.source
    kept = {
        OMNIKV: "decode by filter layers (OmniKV, Hao et al. 2025)",
        OWN: "the artifact's kv_cache section",
    }
    if cache in kept:
        cache_says = kept[cache]
    else:
        cache_says = f"cache: {CACHES[cache][1]}"
    return f"{METHODS[prefill].says}; {cache_says}", ""
