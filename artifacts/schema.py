"""Version 4 of the artifact: what Headwise found for one model, as immutable data.

docs/artifact.md explains each field.
"""

from __future__ import annotations

import difflib
from datetime import UTC, datetime
from math import isfinite
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, JsonValue, model_validator

from artifacts.costs import DeviceCosts
from artifacts.decode import Decode, OmniKV
from artifacts.errors import shorten
from artifacts.fields import Count, KindName, PatternName, Rows, Share
from artifacts.front import Front
from artifacts.growth import Growth
from artifacts.imported import Imported, Sha256, Text
from artifacts.kv_cache import KVCache
from artifacts.patterns import Pattern, Record, matching

SCHEMA_VERSION = 4

SavedSha256 = Annotated[str, matching("([0-9a-f]{64})?", "a SHA-256 of 64 lower-case hex digits")]
Timestamp = Annotated[
    str,
    matching(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)", "a UTC time like 2025-01-31T12:00:00Z"),
]
# A bare name: a path could reach any file, and the pair could no longer be moved together.
SidecarName = Annotated[
    str,
    matching(
        r"[^/\\:\x00-\x1f.][^/\\:\x00-\x1f]*\.safetensors",
        "the bare name of a .safetensors file beside this one",
    ),
]


def now() -> str:
    """This second in UTC, as an artifact writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _finite(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    def check(entry: JsonValue, path: str) -> None:
        if isinstance(entry, float) and not isfinite(entry):
            raise ValueError(f"must hold finite numbers only, got {entry} at {path}")
        if isinstance(entry, dict):
            for key, inner in entry.items():
                check(inner, f"{path}.{key}" if path else key)
        elif isinstance(entry, list):
            for i, inner in enumerate(entry):
                check(inner, f"{path}[{i}]")

    check(value, "")
    return value


class ModelInfo(Record):
    """Which model the artifact is for; runtime.fingerprint makes it and compares it.

    None is what an import could not know: it is not compared.
    """

    name: Text
    revision: Text | None = None
    architecture: Text | None
    config_sha256: Sha256 | None
    weights_sha256: Sha256 | None
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    rope: Annotated[dict[str, JsonValue], AfterValidator(_finite)] | None
    max_positions: Count

    @model_validator(mode="after")
    def _groups(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads ({self.num_heads}), got {self.num_kv_heads}")
        return self


class Calibration(Record):
    """The prompts that the search looked at, `samples` of each task and length.

    Lengths in tokens, sha256 over their token ids.
    """

    tasks: Annotated[tuple[Text, ...], Field(min_length=1)]
    lengths: Annotated[tuple[Count, ...], Field(min_length=1)]
    samples: Count
    sha256: Sha256


class Summary(Record):
    """Means over the searched heads with their chosen patterns, and how many heads each kind won.

    recall: attention mass kept (0 to 1). error: relative L2 of the output. density: share of the causal area
    computed.
    best_single_kind: the kind with the highest mean recall if every head had to take it, each within the budget; None
    where the budget is one for the model.
    """

    recall: Share
    error: Annotated[float, Field(ge=0.0)]
    density: Share
    winners: dict[KindName, Annotated[int, Field(ge=0)]]
    best_single_kind: KindName | None = None
    best_single_kind_recall: Share | None = None

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.best_single_kind is None) != (self.best_single_kind_recall is None):
            raise ValueError("best_single_kind and best_single_kind_recall go together: give both or neither")
        return self


class SearchCost(Record):
    """What the search's objective counted as cost: seconds of a device, whose table is in `costs`, or FLOPs of any."""

    unit: Literal["seconds", "flops"]
    device: Text


class SearchInfo(Record):
    """How the patterns were found, so that anyone can find them again.

    allocation: "heads" is a budget for each head (MInference 1.0, Algorithm 1), "model" one for all of them together.
    cost: None where the objective knew none. n_trials: Optuna's, None where it was not asked.
    """

    tool_version: Text
    command: Text
    preset: Literal["paper", "scaled"]
    seed: Annotated[int, Field(ge=0)]
    calibration: Calibration
    allocation: Literal["heads", "model"] = "heads"
    budget: Text
    target_density: Annotated[Share, Field(gt=0.0)]
    cost: SearchCost | None = None
    n_trials: Annotated[int, Field(ge=0)] | None = None
    device: Text
    dtype: Text
    kernel_backend: Text
    summary: Summary

    @model_validator(mode="after")
    def _single_kind(self) -> Self:
        if self.allocation == "heads" and self.summary.best_single_kind is None:
            raise ValueError("summary.best_single_kind: must be a kind where allocation is heads, got null")
        return self


class Prefill(Record):
    """The pattern's name for every layer and query head; None for a layer left as it is: it slides.

    dense_below: prompts with fewer tokens are served densely.
    dense_tail: the last so many queries see every key, whatever the pattern: a prompt's question is asked there.
    growth: how sizes go with the length; None leaves them as they are at any.
    front: other settings of all heads, between fast and exact; `layers` is one of them or its own.
    imported: where the patterns come from, if they were not searched here.
    """

    dense_below: Annotated[int, Field(ge=0)]
    dense_tail: Annotated[int, Field(ge=0)] = 0
    growth: Growth | None = None
    layers: Rows
    front: Front | None = None
    imported: Imported | None = None


class Measurement(Record):
    """One measured number against its baseline, with the command that measures it again."""

    name: Text
    value: float
    unit: str
    baseline: float | None = None
    baseline_name: Text | None = None
    length: Count | None = None
    samples: Count | None = None
    command: Text
    device: Text
    versions: dict[str, str]

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.baseline is None) != (self.baseline_name is None):
            raise ValueError("baseline and baseline_name go together: give both or neither")
        return self


class Sidecar(Record):
    """The safetensors file beside the YAML, by its bare name, and the SHA-256 of its bytes."""

    file: SidecarName
    sha256: Sha256


class Artifact(Record):
    """What was found for a model: a pattern for every searched head, how it was found, what was measured with
    it.

    search: None where no pattern was searched here: prefill.imported says where they come from.
    artifacts.save fills in `sidecar` and `content_sha256`; an artifact that was never saved has None and "".
    """

    schema_version: Literal[4] = 4
    created_at: Timestamp = Field(default_factory=now)
    model: ModelInfo
    search: SearchInfo | None
    patterns: dict[PatternName, Pattern]
    prefill: Prefill
    decode: Decode | None = None
    kv_cache: KVCache | None = None
    evidence: tuple[Measurement, ...] = ()
    costs: tuple[DeviceCosts, ...] = ()
    sidecar: Sidecar | None = None
    content_sha256: SavedSha256 = ""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        unused = dict.fromkeys(self.patterns)
        self._check_rows(self.prefill.layers, "prefill.layers", unused)
        front = self.prefill.front
        for i, point in enumerate(front.points if front else ()):
            self._check_rows(point.layers, f"prefill.front.points[{i}].layers", unused)
        if self.search is None and self.prefill.imported is None and self.patterns:
            raise ValueError("search must say how the patterns were found, or prefill.imported where they come from")
        if unused:
            raise ValueError(f"patterns.{next(iter(unused))} is used by no head: remove it or use it in prefill.layers")
        if fault := _unpriced(None if self.search is None else self.search.cost, self.costs, front):
            raise ValueError(fault)
        if self.decode is not None:
            for name in ("filter_layers", "dense_layers"):
                last = max(getattr(self.decode.omnikv, name), default=0)
                if last >= self.model.num_layers:
                    raise ValueError(
                        f"decode.omnikv.{name} names layer {last}, the model has {self.model.num_layers} layers"
                    )
        if self.kv_cache is not None:
            if fault := self.kv_cache.fault(self.model.num_layers, self.model.num_kv_heads):
                raise ValueError(f"kv_cache.{fault}")
            if self.decode is not None and (fault := _both(self.decode.omnikv, self.kv_cache)):
                raise ValueError(fault)
        return self

    def _check_rows(self, rows: Rows, path: str, unused: dict[str, None]) -> None:
        """Rows that fit the model, and name patterns that there are; takes what they name out of `unused`."""
        if len(rows) != self.model.num_layers:
            raise ValueError(f"{path} has {len(rows)} rows, the model has {self.model.num_layers} layers")
        for layer, (row, own) in enumerate(zip(rows, self.prefill.layers, strict=True)):
            if (row is None) != (own is None):
                raise ValueError(
                    f"{path}[{layer}]: a layer is left alone in prefill.layers and in the whole front, or in none"
                )
            if row is None:
                continue
            if len(row) != self.model.num_heads:
                raise ValueError(
                    f"{path}[{layer}] has {len(row)} names, the model has {self.model.num_heads} query heads"
                )
            for head, name in enumerate(row):
                if name not in self.patterns:
                    raise ValueError(f"{path}[{layer}][{head}]: {_unknown(name, list(self.patterns))}")
                unused.pop(name, None)


def _unpriced(cost: SearchCost | None, tables: tuple[DeviceCosts, ...], front: Front | None) -> str | None:
    """Why tables and front are not those of what the search says it counted."""
    unit = None if cost is None else cost.unit
    counted = [i for i, table in enumerate(tables) if table.optimised]
    if len(counted) != (unit == "seconds"):
        wanted = "exactly one table is" if unit == "seconds" else "no table can be"
        return f"costs: {wanted} optimised for where search.cost has {unit or 'no unit'}, but {len(counted)} say so"
    for i in counted:
        if cost is not None and tables[i].device != cost.device:
            return f"costs[{i}].device is {shorten(tables[i].device)}, but search.cost.device {shorten(cost.device)}"
    if front is not None and front.unit != unit:
        return f"prefill.front.unit is {front.unit}, but search.cost has {unit or 'no unit'}"
    return None


def _both(omnikv: OmniKV, kv_cache: KVCache) -> str | None:
    """Why the sections cannot both be served: OmniKV chooses from tokens that must all be there."""
    for layer, row in enumerate(kv_cache.layers):
        names = (row,) if isinstance(row, str) else row or ()
        free = layer in omnikv.dense_layers or layer < omnikv.filter_layers[0]
        if not free and any(kv_cache.policies[name].kind != "full" for name in names):
            return (
                f"kv_cache.layers[{layer}] drops tokens that decode.omnikv chooses from: keep it full, "
                "or name the layer in decode.omnikv.dense_layers"
            )
    return None


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known[:5]) or 'none'}"
    return f"no pattern is called {shorten(name)}, {hint}"
