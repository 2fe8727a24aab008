"""Version 1 of the artifact: what Headwise found for one model, as immutable data.

The declaration of each field describes it; docs/schema.md is generated from these descriptions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from artifacts.errors import HeadwiseError, shorten
from artifacts.schema.decode import Decode, OmniKV
from artifacts.schema.evidence import Evidence
from artifacts.schema.fields import (
    Count,
    Imported,
    Natural,
    PatternName,
    Record,
    Rows,
    Sha256,
    matching,
)
from artifacts.schema.front import Front
from artifacts.schema.kv_cache import KVCache
from artifacts.schema.model import ModelInfo
from artifacts.schema.patterns import Pattern
from artifacts.schema.search import SearchInfo

SCHEMA_VERSION = 1

SavedSha256 = Annotated[str, matching("([0-9a-f]{64})?", "a SHA-256 of 64 lower-case hex digits")]
Timestamp = Annotated[
    str,
    matching(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)", "a UTC time like 2025-01-31T12:00:00Z"
    ),
]
# Only a bare name: a path could reach any file and would break when the pair is moved.
SidecarName = Annotated[
    str,
    matching(
        r"[^/\\:\x00-\x1f.][^/\\:\x00-\x1f]*\.safetensors",
        "the bare name of a .safetensors file in the same folder",
    ),
]


def now() -> str:
    """Return the current time in UTC, to the second, in the format of an artifact."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Prefill(Record):
    """Pattern name of every layer and query head; None for a layer that is left alone."""

    dense_below: Natural = Field(description="prompts with fewer tokens are served densely")
    dense_tail: Natural = Field(
        default=0,
        description=(
            "how many of the last queries of a prompt (whole tiles of 64 positions) see every key, "
            "whatever the pattern: a question is asked there; 0: none"
        ),
    )
    length: Count | None = Field(
        default=None,
        description=(
            "tokens of the prompts that the sizes were searched on: on more keys K windows, "
            "columns, diagonals and blocks are multiplied by K / `length`, both in whole tiles of "
            "64; null: sizes stay as they are"
        ),
    )
    layers: Rows = Field(
        description=(
            "a row for each layer: a pattern's name for every query head, in the model's own "
            "order; `null` leaves the layer unchanged: it slides, or has no patterns"
        )
    )
    front: Front | None = Field(
        default=None,
        description="settings between fast and exact, of which one can be chosen when it is loaded",
    )
    imported: Imported | None = Field(
        default=None,
        description="where the section comes from, if it was taken over from another tool's file",
    )

    def validate_for(self, model: ModelInfo, patterns: Collection[str]) -> None:
        """Raise ValueError if rows do not fit the model, name an unknown pattern, or omit one."""
        used: set[str] = set()
        for field, rows in self._rows():
            if len(rows) != model.num_layers:
                raise ValueError(
                    f"{field} has {len(rows)} rows, the model has {model.num_layers} layers"
                )
            for layer, (row, default) in enumerate(zip(rows, self.layers, strict=True)):
                if (row is None) != (default is None):
                    raise ValueError(
                        f"{field}[{layer}] must be null where prefill.layers[{layer}] is, and only "
                        "there"
                    )
                if row is None:
                    continue
                if len(row) != model.num_heads:
                    raise ValueError(
                        f"{field}[{layer}] has {len(row)} names, the model has {model.num_heads} "
                        "query heads"
                    )
                if unknown := next((name for name in row if name not in patterns), None):
                    raise ValueError(
                        f"{field}[{layer}][{row.index(unknown)}]: no pattern is called "
                        f"{shorten(unknown)}, known: {', '.join(list(patterns)[:5]) or 'none'}"
                    )
                used.update(row)
        if unused := next((name for name in patterns if name not in used), None):
            raise ValueError(
                f"patterns.{unused} is used by no head: remove it or use it in prefill.layers"
            )

    def _rows(self) -> Iterator[tuple[str, Rows]]:
        """Rows of the section and of the points of its front, with the names of their fields."""
        yield "prefill.layers", self.layers
        if self.front is not None:
            for i, rows in self.front.rows:
                yield f"prefill.front.points[{i}].layers", rows


class Sidecar(Record):
    """The safetensors file next to the YAML."""

    file: SidecarName = Field(description="the bare name of a .safetensors file in the same folder")
    sha256: Sha256 = Field(description="of its bytes")


class Artifact(Record):
    """Results for a model: patterns of heads, their search, and measurements.

    artifacts.save fills in `sidecar` and `content_sha256`; an artifact that was never saved has
    None and "".
    """

    schema_version: Literal[1] = Field(default=1, description="the layout of this file")
    created_at: Timestamp = Field(
        default_factory=now, description="when it was written, UTC, `2025-01-31T12:00:00Z`"
    )
    model: ModelInfo = Field(description="which model it is for")
    search: SearchInfo | None = Field(
        description=(
            "how the patterns were found; null: none was searched here, and `prefill.imported` "
            "says where they come from"
        )
    )
    patterns: dict[PatternName, Pattern] = Field(
        description="the patterns in use; an unused one is an error"
    )
    prefill: Prefill = Field(description="which query head gets which pattern")
    decode: Decode | None = Field(
        default=None, description="which layers choose the tokens that others attend to in decode"
    )
    kv_cache: KVCache | None = Field(
        default=None, description="what each layer and KV head keeps of its keys and values"
    )
    evidence: Evidence = Field(
        default=Evidence(), description="what was measured, and on which prompts"
    )
    sidecar: Sidecar | None = Field(default=None, description="the file with the arrays")
    content_sha256: SavedSha256 = Field(
        default="", description="hash of the content, see [Hashes](artifact.md#hashes)"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self.prefill.validate_for(self.model, self.patterns)
        if self.search is None and self.prefill.imported is None and self.patterns:
            raise ValueError(
                "search must say how the patterns were found, or prefill.imported where they come "
                "from"
            )
        if self.prefill.front is not None:
            self._check_unit(self.prefill.front)
        if self.search is not None:
            self._check_winners(self.search)
        if self.decode is not None:
            self.decode.omnikv.validate_for(self.model)
        if self.kv_cache is not None:
            self.kv_cache.validate_for(self.model)
            if self.decode is not None:
                _check_exclusive(self.decode.omnikv, self.kv_cache)
        return self

    def at_point(self, point: str) -> Self:
        """Return the artifact with the rows of a point of its front, and without the front.

        `search` and the hashes still describe the file. Of rows other than the default ones there
        is no evidence: their loss is predicted, not proven.

        Args:
            point: request for a point (see artifacts.schema.front.read_point).

        Raises:
            HeadwiseError: the artifact has no front, or as in Front.choose.
        """
        if self.prefill.front is None:
            raise HeadwiseError(
                f"point {shorten(point)}: the artifact has no front to choose from: load it "
                "without, or search with one budget for the whole model"
            )
        chosen = self.prefill.front.choose(point)
        served: dict[str, object] = {"front": None}
        if chosen.layers is not None:
            served["layers"] = chosen.layers
        if chosen.dense_tail is not None:
            served["dense_tail"] = chosen.dense_tail
        changes: dict[str, object] = {"prefill": self.prefill.model_copy(update=served)}
        if len(served) > 1:
            changes["evidence"] = Evidence()
        return self.model_copy(update=changes)

    def _check_unit(self, front: Front) -> None:
        """Raise ValueError if the front and the search have different cost units."""
        cost = None if self.search is None else self.search.cost
        unit = None if cost is None else cost.unit
        if front.unit != unit:
            raise ValueError(
                f"prefill.front.unit is {front.unit}, but search.cost has {unit or 'no unit'}"
            )

    def _check_winners(self, search: SearchInfo) -> None:
        """Raise ValueError if the summary does not match the rows."""
        rows = Counter(
            str(self.patterns[name].kind) for row in self.prefill.layers for name in row or ()
        )
        stated = {kind: count for kind, count in search.summary.winners.items() if count}
        if stated != dict(rows):
            raise ValueError(
                f"search.summary.winners says {_counts(stated)}, prefill.layers has "
                f"{_counts(rows)}: after a change of rows by hand, update winners"
            )


def _check_exclusive(omnikv: OmniKV, kv_cache: KVCache) -> None:
    """Raise ValueError if a policy drops tokens that OmniKV selects from."""
    for layer, row in enumerate(kv_cache.layers):
        names = (row,) if isinstance(row, str) else row or ()
        free = layer in omnikv.dense_layers or layer < omnikv.filter_layers[0]
        if not free and any(kv_cache.policies[name].kind != "full" for name in names):
            raise ValueError(
                f"kv_cache.layers[{layer}] drops tokens that decode.omnikv chooses from: keep it "
                "full, or name the layer in decode.omnikv.dense_layers"
            )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {counts[kind]}" for kind in sorted(counts)) or "none"
