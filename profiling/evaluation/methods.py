"""Makes the methods of method_table for a model and a length, all on the same kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from artifacts import (
    Artifact,
    Evidence,
    HeadwiseError,
    KVCache,
    Pattern,
    load_pair,
    pattern_name,
)
from artifacts.errors import shorten
from artifacts.schema.kv_cache import Policy
from profiling.caches.policies import drawing, everywhere, with_section
from profiling.evaluation.cache_table import Cached
from profiling.evaluation.matching import CALIBRATION_SEED, PatternCosts, Sizes
from profiling.evaluation.method_table import (
    ALL_METHODS,
    NO_TAIL,
    TAIL,
    check_name,
    method_names,
    parts_of,
    says,
)
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel
from profiling.prompts.held_out import Seen
from profiling.quality.method import Method, digest
from profiling.speed.baselines import HEADWISE, MODEL
from runtime import LoadedArtifact

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

# An artifact and the arrays of its sidecar.
Pair = tuple[Artifact, Mapping[str, "Array"]]
# Increment if the fitting of sizes changes: earlier measurements belong to another method.
_VERSION = 2


class Methods:
    """Makes methods; a ledger keeps what took a pass over a prompt to find."""

    def __init__(
        self,
        loaded: LoadedModel,
        artifact: Artifact,
        arrays: Mapping[str, Array] | None = None,
        *,
        share: float = 0.2,
        density: float | None = None,
        other_artifacts: Mapping[str, Pair] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """Prepare the methods of an artifact.

        Args:
            loaded: the model.
            artifact: the artifact to compare with dense attention.
            arrays: of its sidecar: the windows that its search has seen.
            share: of the prompt's keys and values that the caches of CACHES keep.
            density: what sizes are fitted to; None for the artifact's own.
            other_artifacts: further artifacts of the model by name, with their arrays. Each is a
                method with the same dense tail as all others.
            ledger: the resume file; None for none.
        """
        self._loaded = loaded
        self.arrays = dict(arrays or {})
        self.share = share
        self._density = density
        # Evaluate every length sparsely: whether a length is too short is checked elsewhere.
        prefill = artifact.prefill.model_copy(update={"dense_below": 0})
        self.artifact = artifact.model_copy(update={"prefill": prefill, "evidence": Evidence()})
        self._ledger = ledger
        self._found: dict[str, Any] = {}
        self._costs: dict[int, PatternCosts] = {}
        self._of = digest(_identity(self._patterns_of()), _VERSION)
        tail = prefill.dense_tail or TAIL
        self._other_methods = {
            name: Methods(loaded, _with_tail(other, tail), its_arrays, ledger=ledger)
            for name, (other, its_arrays) in (other_artifacts or {}).items()
        }
        # By the whole name of a method: the methods of an artifact, and the name that it has there.
        self._others = {
            name + end: (methods, HEADWISE + end)
            for name, methods in self._other_methods.items()
            for end in ("", NO_TAIL)
        }

    @property
    def seen(self) -> Seen:
        """Windows that the searches of all artifacts have seen."""
        return Seen.by([self.arrays, *(other.arrays for other in self._other_methods.values())])

    @property
    def seeds(self) -> dict[str, int]:
        """Seeds of the searches of all searched artifacts, by the names of their rows."""
        all_methods = {HEADWISE: self, **self._other_methods}.items()
        return {
            name: each.artifact.search.seed
            for name, each in all_methods
            if each.artifact.search is not None
        }

    def says(self, name: str) -> tuple[str, str]:
        """Describe a method in a line, and name its source."""
        if name not in self._others:
            return says(name)
        other, own = self._others[name]
        search = other.artifact.search
        description, source = says(own)
        if search and search.preset == "paper":
            source = "MInference 1.0's own search"
        return description, source

    def make(self, name: str, length: int) -> Method:
        """The method of that name for prompts of `length` tokens.

        Raises:
            HeadwiseError: there is none of that name, or not for this artifact.
        """
        if name in self._others:
            other, own = self._others[name]
            return replace(other.make(own, length), name=name)
        check_name(name, method_names(self.artifact, self._other_methods))
        parts = parts_of(name)
        assert parts is not None
        base = parts.prefill.build(self, length, parts.tailed)
        if parts.spec:
            base = self._with_cache(base, parts.cache, parts.spec.build(self, length, parts.fields))
        return replace(base, name=name)

    def dense(self, name: str) -> Method:
        """Dense attention of that name, MODEL or KERNEL."""
        return Method(
            name=name, make=lambda: None, density=1.0, kept=1.0, identity=name, dense=name
        )

    def own(self, length: int, tailed: bool) -> Method:
        """The artifact's own patterns, with its dense tail or without."""
        tail = 0
        if tailed:
            tail = self.artifact.prefill.dense_tail
        return self._sparse(
            _with_tail(self._patterns_of(), tail),
            self._own_density(length, tail),
            f"{len(self.artifact.patterns)} patterns",
        )

    def single(self, kind: str, sizes: Sizes, length: int, tailed: bool) -> Method:
        """One pattern for all heads, as large as the density allows.

        Args:
            kind: of the pattern.
            sizes: along which it grows.
            length: of the prompt, in tokens.
            tailed: with the artifact's dense tail, or TAIL queries where it has none.
        """
        tail = 0
        if tailed:
            tail = self.artifact.prefill.dense_tail or TAIL
        artifact, density = self._uniform(kind, sizes, length, tail)
        return self._sparse(artifact, density, ", ".join(artifact.patterns))

    def _sparse(self, artifact: Artifact, density: float, sizes: str) -> Method:
        return Method(
            name=HEADWISE,
            make=partial(LoadedArtifact, artifact),
            density=density,
            kept=1.0,
            identity=_identity(artifact),
            sizes=sizes,
        )

    def _own_density(self, length: int, tail: int) -> float:
        """Density of the artifact's own patterns with a dense tail, measured once."""
        density: float = self._remember(
            f"density/{tail}", length, lambda: self._costs_at(length).own(dense_tail=tail)
        )
        return density

    def _patterns_of(self) -> Artifact:
        return self.artifact.model_copy(update={"decode": None, "kv_cache": None})

    def _uniform(self, kind: str, sizes: Sizes, length: int, tail: int) -> tuple[Artifact, float]:
        def find() -> Any:
            fields, density = self._costs_at(length).fit(
                kind, sizes, dense_tail=tail, target=self._density
            )
            return {"fields": fields, "density": density}

        if self._density is None:
            aim = ""
        else:
            aim = f"/{self._density:g}"
        fitted = self._remember(f"sizes/{kind}/{tail}{aim}", length, find)
        pattern = TypeAdapter(Pattern).validate_python(fitted["fields"])
        former = self.artifact.prefill.layers
        rows = tuple(None if row is None else (pattern_name(pattern),) * len(row) for row in former)
        # Its size was fitted at this length.
        update = {"dense_tail": tail, "layers": rows, "length": None, "front": None}
        prefill = self.artifact.prefill.model_copy(update=update)
        patterns = {pattern_name(pattern): pattern}
        return self._patterns_of().model_copy(
            update={"patterns": patterns, "prefill": prefill}
        ), fitted["density"]

    def _with_cache(self, base: Method, kind: str, cached: Cached) -> Method:
        """A method with a cache of that kind in place of a plain one."""
        bare = self._bare if base.name == MODEL else self._patterns_of()
        artifact = bare.model_copy(update=dict(cached.sections))
        identity = _identity(artifact)
        if cached.offload != "auto":
            identity = digest(identity, cached.offload)
        changed = None
        if cached.drawn is not None:
            identity = digest(identity, kind)
            changed = partial(drawing, record=cached.drawn)
        density = cached.density
        if isinstance(density, str):
            density = base.density
        return Method(
            name=base.name,
            make=partial(LoadedArtifact, artifact),
            density=density,
            kept=cached.kept,
            identity=identity,
            evicts=True,
            sizes=cached.sizes,
            offload=cached.offload,
            changed=changed,
        )

    def everywhere(self, policy: Policy) -> KVCache:
        """A section with that policy in all layers that can have one."""
        return everywhere(self._loaded, policy)

    @cached_property
    def _bare(self) -> Artifact:
        """Of the model, without patterns and sections."""
        return with_section(self._loaded, None).artifact

    def _costs_at(self, length: int) -> PatternCosts:
        if length not in self._costs:
            # One length at a time: estimates of a long prompt are not small.
            self._costs = {length: PatternCosts(self._loaded, self._patterns_of(), length)}
        return self._costs[length]

    def _remember(self, name: str, length: int, find: Callable[[], Any]) -> Any:
        key = self._key(name, length)
        if key not in self._found:
            if self._ledger is None:
                self._found[key] = find()
            else:
                self._found[key] = self._ledger.once(self._ledger.unit(key), find)
        return self._found[key]

    def _key(self, name: str, length: int) -> str:
        return f"{name}/{length}/{CALIBRATION_SEED}/{self._of}"


def beside_of(files: Iterable[Path]) -> dict[str, Pair]:
    """Other artifacts and their arrays by the names of their files.

    Raises:
        HeadwiseError: a file that cannot be read, whose name a method has or could have, or that
            has no patterns.
    """
    artifacts: dict[str, Pair] = {}
    rows: set[str] = set()
    for file in files:
        name = file.stem
        own = {name, name + NO_TAIL}
        if name == ALL_METHODS or parts_of(name) or rows & own:
            taken = (rows & own) or {name}
            raise HeadwiseError(
                f"{shorten(str(file))}: there is a method {min(taken)} already, rename the file"
            )
        artifacts[name] = load_pair(file)
        if not any(artifacts[name][0].prefill.layers):
            raise HeadwiseError(
                f"{shorten(str(file))} has no patterns, so that its row would be dense attention: "
                "name it first, or leave it out"
            )
        rows |= own
    return artifacts


def _with_tail(artifact: Artifact, tail: int) -> Artifact:
    return artifact.model_copy(
        update={"prefill": artifact.prefill.model_copy(update={"dense_tail": tail})}
    )


def _identity(artifact: Artifact) -> str:
    """Hash all of an artifact that a method's results depend on."""
    patterns = {name: pattern.model_dump() for name, pattern in artifact.patterns.items()}
    prefill = artifact.prefill.model_dump(mode="json", exclude={"imported", "dense_below", "front"})
    decode = None
    if artifact.decode is not None:
        decode = artifact.decode.model_dump(mode="json", exclude={"omnikv": {"similarity"}})
    kv_cache = None
    if artifact.kv_cache is not None:
        kv_cache = artifact.kv_cache.model_dump(mode="json", exclude={"imported"})
    return digest(patterns, prefill, decode, kv_cache)
