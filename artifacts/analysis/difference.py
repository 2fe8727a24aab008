"""Differences of two artifacts: heads, sections, fields, arrays, and the change of density."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from artifacts.analysis.density import mean_density
from artifacts.schema.artifact import Artifact
from artifacts.schema.fields import MOST_HEADS
from artifacts.store.sidecar import Sidecar

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

# Names by layer and head, and what each name means.
Named: TypeAlias = tuple[Sequence[tuple[str | None, ...]], Mapping[Any, Any]]
SECTIONS = (
    "search",
    "prefill.growth",
    "prefill.front",
    "prefill.imported",
    "decode",
    "kv_cache",
    "evidence.tasks",
    "evidence.measurements",
    "costs",
    "sidecar",
)
# What two runs that found the same may differ in, as in the content hash, and what is compared head
# by head.
_VOLATILE = ("created_at", "content_sha256", "search.command", "sidecar.file", "sidecar.sha256")
_NAMED = ("patterns", "kv_cache.policies")
_BY_HEAD = ("prefill.layers", "kv_cache.layers")


@dataclass(frozen=True, kw_only=True)
class HeadChange:
    """Heads that changed from one pattern (or policy) to another; None where a layer is left alone.

    Attributes:
        where: for each layer the heads.
    """

    before: str | None
    after: str | None
    where: dict[int, tuple[int, ...]]

    @property
    def heads(self) -> int:
        return sum(map(len, self.where.values()))


@dataclass(frozen=True, kw_only=True)
class FieldChange:
    """A field that has another value; None also where it is not there."""

    field: str
    before: Any
    after: Any


@dataclass(frozen=True, kw_only=True)
class Difference:
    """All that differs.

    Attributes:
        heads, kv_heads: changes of patterns and of cache policies, most heads first; None where
            shapes differ and heads cannot be compared.
        length: of the prompts that `density` is for, before and after, in tokens.
        recall: means of chosen.recall, where both have it.
    """

    heads: tuple[HeadChange, ...] | None
    kv_heads: tuple[HeadChange, ...] | None
    total: int
    length: int
    density: tuple[float | None, float | None]
    recall: tuple[float, float] | None
    added: tuple[str, ...]
    removed: tuple[str, ...]
    fields: tuple[FieldChange, ...]
    arrays: dict[str, tuple[str, ...]]

    def __bool__(self) -> bool:
        differing = (
            self.heads,
            self.kv_heads,
            self.added,
            self.removed,
            self.fields,
            *self.arrays.values(),
        )
        return self.heads is None or any(differing)


def compare(
    before: Artifact,
    after: Artifact,
    arrays_before: Mapping[str, Array],
    arrays_after: Mapping[str, Array],
    *,
    length: int | None = None,
) -> Difference:
    """Compare two artifacts, without times, command lines and the sidecar's name.

    Args:
        length: of the prompts to count density at; None is the longest that either was searched on,
            and where neither was, four times the longer dense_below.
    """
    length = length or _length(before, after)
    same = all(
        getattr(before.model, n) == getattr(after.model, n)
        for n in ("num_layers", "num_heads", "num_kv_heads")
    )
    old, new = (artifact.model_dump(mode="json") for artifact in (before, after))
    there = [{name for name in SECTIONS if _at(fields, name)} for fields in (old, new)]
    if same:
        patterns = _heads(_patterns(before), _patterns(after))
        policies = _heads(_policies(before), _policies(after))
    else:
        patterns = None
        policies = None
    return Difference(
        heads=patterns,
        kv_heads=policies,
        total=before.model.num_layers * before.model.num_heads,
        length=length,
        density=(mean_density(before, length), mean_density(after, length)),
        recall=_recall(arrays_before, arrays_after),
        added=tuple(name for name in SECTIONS if name in there[1] - there[0]),
        removed=tuple(name for name in SECTIONS if name in there[0] - there[1]),
        fields=tuple(_fields(old, new, skip=there[0] ^ there[1])),
        arrays=_arrays(arrays_before, arrays_after),
    )


def _length(before: Artifact, after: Artifact) -> int:
    searched = [max(a.search.calibration.lengths) for a in (before, after) if a.search is not None]
    return max(searched or [4 * max(a.prefill.dense_below, 1024) for a in (before, after)])


def _at(fields: Mapping[str, Any], path: str) -> Any:
    value: Any = fields
    for part in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(part)
        else:
            value = None
    return value


def _patterns(artifact: Artifact) -> Named:
    """Pattern name of every query head (None: the layer is left alone), and each name's pattern."""
    nothing = (None,) * artifact.model.num_heads
    return [row or nothing for row in artifact.prefill.layers], artifact.patterns


def _policies(artifact: Artifact) -> Named:
    """The same of every KV head and its cache policy."""
    layers = artifact.model.num_layers
    heads = artifact.model.num_kv_heads
    section = artifact.kv_cache
    if section is None:
        return [(None,) * heads] * layers, {}
    return [
        section.heads(layer, heads) or (None,) * heads for layer in range(layers)
    ], section.policies


def _heads(before: Named, after: Named) -> tuple[HeadChange, ...]:
    """By what a name means: a pattern that only got another name did not change."""
    (rows_before, meant_before) = before
    (rows_after, meant_after) = after
    places: dict[tuple[str | None, str | None], dict[int, list[int]]] = {}
    for layer, (old, new) in enumerate(zip(rows_before, rows_after, strict=True)):
        for head, (a, b) in enumerate(zip(old, new, strict=True)):
            # A name is one of a pattern there is, so that None alone means nothing.
            if meant_before.get(a) != meant_after.get(b):
                places.setdefault((a, b), {}).setdefault(layer, []).append(head)
    changes = [
        HeadChange(before=a, after=b, where={layer: tuple(heads) for layer, heads in where.items()})
        for (a, b), where in places.items()
    ]
    return tuple(sorted(changes, key=lambda change: -change.heads))


def _recall(before: Mapping[str, Array], after: Mapping[str, Array]) -> tuple[float, float] | None:
    values = []
    for arrays in (before, after):
        entry = getattr(arrays, "entries", arrays).get("chosen.recall")
        if entry is not None and entry.size <= MOST_HEADS:
            values.append([v for v in arrays["chosen.recall"].ravel().tolist() if v == v])
    if len(values) < 2 or not all(values):
        return None
    return sum(values[0]) / len(values[0]), sum(values[1]) / len(values[1])


def _fields(
    old: Mapping[str, Any], new: Mapping[str, Any], skip: set[str]
) -> Iterator[FieldChange]:
    a = dict(_flat(old))
    b = dict(_flat(new))
    for name in dict.fromkeys([*a, *b]):
        inside = any(name == section or name.startswith(f"{section}.") for section in skip)
        if not inside and name not in (*_VOLATILE, *_BY_HEAD) and a.get(name) != b.get(name):
            yield FieldChange(field=name, before=a.get(name), after=b.get(name))


def _flat(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Fields by path; lists, patterns, policies and the rotary embedding are values."""
    for key, entry in value.items():
        if path:
            name = f"{path}.{key}"
        else:
            name = key
        if isinstance(entry, Mapping) and path not in _NAMED and name != "model.rope":
            yield from _flat(entry, name)
        elif name in ("evidence.measurements", "costs"):
            # Without the commands, as in the content hash.
            yield name, [{k: v for k, v in each.items() if k != "command"} for each in entry]
        else:
            yield name, entry


def _arrays(before: Mapping[str, Array], after: Mapping[str, Array]) -> dict[str, tuple[str, ...]]:
    both = sorted(before.keys() & after.keys())
    return {
        "added": tuple(sorted(after.keys() - before.keys())),
        "removed": tuple(sorted(before.keys() - after.keys())),
        "changed": tuple(name for name in both if _seen(before, name) != _seen(after, name)),
    }


def _seen(arrays: Mapping[str, Array], name: str) -> tuple[object, ...]:
    """Dtype, shape and hash of an array, to compare without holding two of them."""
    if isinstance(arrays, Sidecar):
        entry = arrays.entries[name]
        return entry.dtype, entry.shape, arrays.digest(name)
    return (
        str(arrays[name].dtype),
        arrays[name].shape,
        hashlib.sha256(arrays[name].tobytes()).hexdigest(),
    )
