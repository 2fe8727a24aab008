"""Methods that an evaluation compares: ways to prefill, and caches to decode with.

`PREFILL`, `PREFILL-tail` without a dense tail, or `PREFILL+CACHE`, such as `dense`,
`headwise-tail`, `headwise+omnikv` and `dense+snapkv:budget=0.2`. A new method is a function here.
Imports no torch, so that a wrong option is refused at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from artifacts import Artifact, HeadwiseError
from artifacts.errors import shorten
from profiling.evaluation.cache_table import CACHES, CacheSpec
from profiling.speed.baselines import HEADWISE, KERNEL, MODEL

if TYPE_CHECKING:
    from profiling.evaluation.methods import Methods
    from profiling.quality.method import Method

# Stands for all methods of an artifact.
ALL_METHODS = "all"
# The suffix of methods without a dense tail, and the dense tail of methods if the artifact has
# none.
NO_TAIL = "-tail"
TAIL = 64

# Builds a method for prompts of a length, with or without a dense tail.
Build = Callable[["Methods", int, bool], "Method"]


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


METHODS: dict[str, MethodSpec] = {}


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


class Parts(NamedTuple):
    """A name's way to prefill, whether it has its dense tail, its cache and the cache's fields."""

    prefill: MethodSpec
    tailed: bool
    cache: str
    fields: str

    @property
    def spec(self) -> CacheSpec | None:
        """The cache's entry; None without one."""
        return CACHES.get(self.cache)


def parts_of(name: str) -> Parts | None:
    """Take the name of a method apart; None where its way to prefill or its cache is unknown."""
    prefill, plus, rest = name.partition("+")
    cache, colon, fields = rest.partition(":")
    if plus and (cache not in CACHES or (colon and not fields)):
        return None
    if prefill in METHODS:
        return Parts(METHODS[prefill], True, cache, fields)
    kind = prefill.removesuffix(NO_TAIL)
    if kind in METHODS:
        return Parts(METHODS[kind], False, cache, fields)
    return None


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


def method_names(artifact: Artifact | None, other_artifacts: Iterable[str] = ()) -> tuple[str, ...]:
    """List all methods of an artifact, dense first, caches without fields.

    Args:
        artifact: the artifact to list the methods of; None for those that need none.
        other_artifacts: other artifacts by name.
    """
    caches = [
        name
        for name, spec in CACHES.items()
        if spec.section is None or getattr(artifact, spec.section, None) is not None
    ]
    extra = tuple(name + end for name in other_artifacts for end in ("", NO_TAIL))
    if artifact is None or not any(artifact.prefill.layers):
        return (MODEL, KERNEL, *(f"{MODEL}+{name}" for name in caches), *extra)
    with_caches: list[str] = []
    for name in caches:
        with_caches.append(f"{MODEL}+{name}")
        if not CACHES[name].decides_prefill:
            with_caches.append(f"{HEADWISE}+{name}")
    without = (name + NO_TAIL for name, spec in METHODS.items() if spec.has_tail)
    return (*METHODS, *without, *with_caches, *extra)


def check_name(name: str, known: Iterable[str]) -> None:
    """Raise HeadwiseError for a name that is not one of `known`, or whose fields cannot be."""
    names = tuple(known)
    parts = parts_of(name)
    plain = name.partition(":")[0] if parts else name
    if name not in names and plain not in names:
        hint = ""
        if parts and parts.spec and parts.spec.decides_prefill:
            hint = " (that cache decides how prompts are attended to, whatever the patterns)"
        raise HeadwiseError(f"unknown method {shorten(name)}{hint}; known here: {', '.join(names)}")
    check_fields(name)


def check_fields(name: str) -> None:
    """Raise HeadwiseError for fields after a known cache's name that cannot be."""
    parts = parts_of(name)
    if parts and parts.spec and parts.fields:
        parts.spec.check(parts.fields)


def says(name: str) -> tuple[str, str]:
    """Describe a method in a line, and name its source."""
    parts = parts_of(name)
    assert parts is not None
    spec = parts.prefill
    if parts.spec:
        return f"{spec.description}; cache: {parts.spec.description}", ""
    if not parts.tailed:
        return f"{spec.description}, without a dense tail", spec.source
    return spec.description, spec.source


def markdown_table() -> str:
    """The methods and caches as a table of docs/evaluation.md."""
    lines = ["| method | what it computes | source |", "|---|---|---|"]
    lines += [f"| `{name}` | {s.description} | {s.source} |" for name, s in METHODS.items()]
    lines += ["", "| cache | tokens that decode reads |", "|---|---|"]
    lines += [f"| `{name}` | {s.description} |" for name, s in CACHES.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown_table())
