"""Methods that an evaluation knows: prefills in METHODS, and CACHES for either prefill.

Every sparse method computes the last queries of a prompt densely, as many as the artifact does.
`NAME-tail` is the same method without this dense tail, with its size fitted separately.

`dense+CACHE` and `headwise+CACHE` are the two prefills with a cache of CACHES, or with a section of
the artifact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from artifacts import H2O, Artifact, SnapKV, Streaming
from artifacts.schema.kv_cache import Policy
from profiling.caches.parsing import RANDOM, SINKS
from profiling.speed.baselines import HEADWISE, KERNEL, MODEL

if TYPE_CHECKING:
    from profiling.evaluation.methods import Methods
    from profiling.quality.method import Method

# Stands for all methods of an artifact.
ALL_METHODS = "all"
OMNIKV = "omnikv"
OWN = "own"
# The suffix of methods without a dense tail, and the dense tail of methods if the artifact has
# none.
NO_TAIL = "-tail"
TAIL = 64

# Builds a method for prompts of a length, with or without a dense tail.
Build = Callable[["Methods", int, bool], "Method"]
# The policy of a cache that retains a fraction of a prompt of a length.
PolicyOf = Callable[[float, int], Policy]


@dataclass(frozen=True, kw_only=True)
class MethodSpec:
    """A way to prefill.

    Attributes:
        description: one line on the computation.
        source: where it comes from.
        build: makes the method.
        has_tail: its last queries are dense, and NAME-tail is the method without.
        is_default: runs by default.
    """

    description: str
    source: str
    build: Build
    has_tail: bool = True
    is_default: bool = False


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """A cache that retains a fraction of the prompt.

    Attributes:
        decides_prefill: it decides itself how a prompt is attended to: patterns change nothing.
    """

    description: str
    policy: PolicyOf
    decides_prefill: bool = False


METHODS: dict[str, MethodSpec] = {}
CACHES: dict[str, CacheSpec] = {}


def method(
    name: str, description: str, source: str, *, has_tail: bool = True, is_default: bool = False
) -> Callable[[Build], Build]:
    """Register the decorated function as a method."""

    def register(build: Build) -> Build:
        METHODS[name] = MethodSpec(
            description=description,
            source=source,
            build=build,
            has_tail=has_tail,
            is_default=is_default,
        )
        return build

    return register


def cache(
    name: str, description: str, *, decides_prefill: bool = False
) -> Callable[[PolicyOf], PolicyOf]:
    """Register the decorated function as a cache."""

    def register(policy: PolicyOf) -> PolicyOf:
        CACHES[name] = CacheSpec(
            description=description, policy=policy, decides_prefill=decides_prefill
        )
        return policy

    return register


@method(MODEL, "the model's own attention (sdpa)", "Dao 2023", has_tail=False, is_default=True)
def _model(methods: Methods, length: int, tailed: bool) -> Method:
    return methods.dense(MODEL)


@method(KERNEL, "every key, by Headwise's kernel", "this project", has_tail=False)
def _kernel(methods: Methods, length: int, tailed: bool) -> Method:
    return methods.dense(KERNEL)


@method(HEADWISE, "the artifact's patterns", "this project, after MInference 1.0", is_default=True)
def _headwise(methods: Methods, length: int, tailed: bool) -> Method:
    return methods.own(length, tailed)


@method(
    "vertical_slash", "vertical-slash for all heads", "MInference 1.0, ablation", is_default=True
)
def _vertical_slash(methods: Methods, length: int, tailed: bool) -> Method:
    # 1,000 columns and 6,096 diagonals, MInference's most frequent choice.
    return methods.single(
        "vertical_slash", lambda n: {"vertical": n, "slash": 6 * n}, length, tailed
    )


@method("block_sparse", "block-sparse for all heads", "MInference 1.0, ablation")
def _block_sparse(methods: Methods, length: int, tailed: bool) -> Method:
    return methods.single("block_sparse", lambda n: {"blocks": n}, length, tailed)


@method(
    "a_shape",
    "A-shape for all heads: sinks and a window",
    "StreamingLLM, Xiao et al. 2024",
    is_default=True,
)
def _a_shape(methods: Methods, length: int, tailed: bool) -> Method:
    # 1,024 sinks and 4,096 tokens of window, as MInference's budget has it.
    return methods.single("a_shape", lambda n: {"sink": n, "window": 4 * n}, length, tailed)


@cache("snapkv", "of the prompt, the tokens that its last 64 queries select (Li et al. 2024)")
def _snapkv(share: float, length: int) -> Policy:
    return SnapKV(budget=max(share * length, 65) / length)


# runtime's SnapKV with tokens drawn by lot in place of a vote.
cache(
    RANDOM,
    f"of the prompt, the first {SINKS} tokens, the last 64, and a random sample of the others "
    "(arXiv 2609.03430)",
)(_snapkv)


@cache("h2o", "heavy hitters and the latest tokens (Zhang et al. 2023)", decides_prefill=True)
def _h2o(share: float, length: int) -> Policy:
    return H2O(heavy=share / 2, recent=share / 2)


@cache(
    "streaming", "sinks and a window, also during prefill (Xiao et al. 2024)", decides_prefill=True
)
def _streaming(share: float, length: int) -> Policy:
    return Streaming(sinks=SINKS, window=max(round(share * length) - SINKS, 1))


def default_methods(*, tails: bool) -> tuple[str, ...]:
    """List the methods that run by default.

    Args:
        tails: each is followed by the one without a dense tail.
    """
    names: list[str] = []
    for name, spec in METHODS.items():
        if spec.is_default:
            names.append(name)
            if tails and spec.has_tail:
                names.append(name + NO_TAIL)
    return tuple(names)


def method_names(artifact: Artifact, other_artifacts: Iterable[str] = ()) -> tuple[str, ...]:
    """List all methods of an artifact, dense first.

    Args:
        artifact: the artifact to list the methods of.
        other_artifacts: other artifacts by name.
    """
    caches = [
        *CACHES,
        *([OMNIKV] if artifact.decode else []),
        *([OWN] if artifact.kv_cache else []),
    ]
    extra = tuple(name + end for name in other_artifacts for end in ("", NO_TAIL))
    if not any(artifact.prefill.layers):
        return (MODEL, KERNEL, *(f"{MODEL}+{name}" for name in caches), *extra)
    with_caches: list[str] = []
    for name in caches:
        with_caches.append(f"{MODEL}+{name}")
        if not decides_prefill(name):
            with_caches.append(f"{HEADWISE}+{name}")
    without = (name + NO_TAIL for name, spec in METHODS.items() if spec.has_tail)
    return (*METHODS, *without, *with_caches, *extra)


def prefill_of(name: str) -> tuple[MethodSpec, bool] | None:
    """The way to prefill that a name has before its cache, and whether with a dense tail."""
    prefill = name.partition("+")[0]
    if prefill in METHODS:
        return METHODS[prefill], True
    kind = prefill.removesuffix(NO_TAIL)
    if kind in METHODS:
        return METHODS[kind], False
    return None


def decides_prefill(name: str) -> bool:
    """True if a cache decides itself how a prompt is attended to."""
    return name in CACHES and CACHES[name].decides_prefill


def says(name: str) -> tuple[str, str]:
    """Describe a method in a line, and name its source."""
    match = prefill_of(name)
    assert match is not None
    spec, tailed = match
    if cache_name := name.partition("+")[2]:
        sections = {
            OMNIKV: "decode by filter layers (OmniKV, Hao et al. 2025)",
            OWN: "the artifact's kv_cache section",
        }
        description = sections.get(cache_name)
        if description is None:
            description = f"cache: {CACHES[cache_name].description}"
        return f"{spec.description}; {description}", ""
    if not tailed:
        return f"{spec.description}, without a dense tail", spec.source
    return spec.description, spec.source


def markdown_table() -> str:
    """The methods and caches as a table of docs/evaluation.md."""
    lines = ["| method | what it computes | source |", "|---|---|---|"]
    lines += [f"| `{name}` | {s.description} | {s.source} |" for name, s in METHODS.items()]
    lines += ["", "| cache | tokens it keeps |", "|---|---|"]
    lines += [f"| `{name}` | {s.description} |" for name, s in CACHES.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown_table())
