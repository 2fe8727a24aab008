"""What a search left in the sidecar about each head: the candidates that it tried, their scores, and the price it paid.

Shapes: L layers, H query heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from pydantic import TypeAdapter

from artifacts import Artifact, HeadwiseError, Pattern, pattern_name
from artifacts.patterns import KINDS, NAMES
from search.common.measures import MEASURES, OF_MODEL
from search.model.hulls import hull

if TYPE_CHECKING:
    from artifacts.sidecar import Array

_PATTERN: TypeAdapter[Pattern] = TypeAdapter(Pattern)
_SHORT = {form.partition("_")[0]: kind for kind, form in NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one candidate did for one head.

    error: relative L2 of the head's output. recall: attention mass kept. density: share of the causal tiles computed.
    objective: what the budget was spent to make small, nats a token (search.model.curves.Curves.loss). change: of the
        residual stream, squared and relative. seconds, flops: of the head's attention over a prompt. None
    where the search did not count by it.
    """

    candidate: int
    pattern: str
    kind: str
    error: float
    recall: float
    density: float
    objective: float | None = None
    change: float | None = None
    seconds: float | None = None
    flops: float | None = None

    @property
    def measured(self) -> dict[str, float]:
        """What is known, by name."""
        known = {name: getattr(self, name) for name in (*MEASURES, *OF_MODEL)}
        return {name: value for name, value in known.items() if value is not None}

    @property
    def loss(self) -> float:
        """The objective, else the change of the residual stream, else the squared error: what adds up over heads."""
        return next(lost for lost in (self.objective, self.change, self.error**2) if lost is not None)

    @property
    def cost(self) -> float:
        """Seconds, else FLOPs, else the density: what the search weighs the loss against."""
        return next(cost for cost in (self.seconds, self.flops, self.density) if cost is not None)


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """The arrays of one candidate, (L, H) each: its measures, and its sizes where they differ from head to head."""

    number: int
    name: str
    measures: dict[str, np.ndarray] = field(default_factory=dict)
    sizes: dict[str, np.ndarray] = field(default_factory=dict)

    def tried(self, layer: int, head: int) -> bool:
        """Whether it was tried for that head."""
        return bool(np.isfinite(self.measures["error"][layer, head]))

    def result(self, layer: int, head: int) -> Result:
        """How it did for a head that it was tried for."""
        measures = {name: float(array[layer, head]) for name, array in self.measures.items()}
        pattern = self.name
        if self.sizes:
            sizes = {name: int(array[layer, head]) for name, array in self.sizes.items()}
            pattern = pattern_name(_PATTERN.validate_python({"kind": kind_of(self.name), **sizes}))
        return Result(candidate=self.number, pattern=pattern, kind=kind_of(self.name), **measures)


@dataclass(frozen=True, kw_only=True, eq=False)
class Findings:
    """The findings of a search of heads.

    chosen: (L, H) candidate of each head, -1 in layers left alone. price: (L,) weighted loss that a unit of cost has to
    save, None where each head had a budget of its own. weight: (L,) of the layers' losses, ones without. ranks: of
    tensor parallelism that it was searched for: of several the price is that of a layer's slowest one, not of a head.
    scores: (L, H) of each measure, of what was chosen; by a transfer measured on the model that it went to.
    drift, before, again: of an artifact that was transferred from another model, (L, H) each, see search.transfer.
    """

    artifact: Artifact
    candidates: tuple[Candidate, ...]
    chosen: np.ndarray
    price: np.ndarray | None
    weight: np.ndarray
    scores: dict[str, np.ndarray]
    ranks: int = 1
    drift: np.ndarray | None = None
    before: np.ndarray | None = None
    again: np.ndarray | None = None

    @classmethod
    def of(cls, artifact: Artifact, arrays: Mapping[str, Array]) -> Findings:
        """Read what `artifact` and the arrays of its sidecar say.

        Raises:
            HeadwiseError: nothing was searched here, or the sidecar lacks the candidates' scores.
        """
        if artifact.search is None:
            where = artifact.prefill.imported
            came = f"was imported from {where.file} ({where.format})" if where else "has no search"
            raise HeadwiseError(f"this artifact {came}: no candidates were tried; python -m search.heads tries some")
        layers, heads = artifact.model.num_layers, artifact.model.num_heads
        candidates = _candidates(arrays, (layers, heads))
        if not candidates or "chosen.candidate" not in arrays:
            raise HeadwiseError(
                "this artifact has no scores of candidates in its sidecar (chosen.candidate, candidates.*): "
                "python -m search.heads writes them"
            )

        def table(name: str, shape: tuple[int, ...]) -> np.ndarray | None:
            return None if name not in arrays else _checked(name, np.asarray(arrays[name]), shape)

        price, weight = (_by_layer(arrays.get(f"allocation.{name}"), layers, name) for name in ("price", "weight"))
        chosen = table("chosen.candidate", (layers, heads))
        assert chosen is not None
        return cls(
            artifact=artifact,
            candidates=candidates,
            chosen=chosen.astype(int),
            price=price,
            weight=np.ones(layers) if weight is None else weight,
            scores={
                name: known
                for name in (*MEASURES, *OF_MODEL)
                if (known := table(f"chosen.{name}", (layers, heads))) is not None
            },
            ranks=int(np.max(arrays.get("allocation.ranks", 1))),
            drift=table("transfer.drift", (layers, heads)),
            before=table("transfer.before", (layers, heads)),
            again=table("transfer.again", (layers, heads)),
        )

    def results(self, layer: int, head: int) -> list[Result]:
        """What was tried for a head, in the search's order."""
        return [candidate.result(layer, head) for candidate in self.candidates if candidate.tried(layer, head)]

    def winner(self, layer: int, head: int) -> Result | None:
        """The candidate that the search chose for a head; None in a layer left alone."""
        chosen = int(self.chosen[layer, head])
        found = (candidate for candidate in self.candidates if candidate.number == chosen)
        candidate = next(found, None)
        return candidate.result(layer, head) if candidate and candidate.tried(layer, head) else None


def kind_of(name: str) -> str:
    """The kind of the pattern, or of the family of patterns, that has this name; "?" for a name that is neither."""
    for kind in KINDS:
        if name == kind or name.startswith(f"{kind}_"):
            return kind
    return _SHORT.get(name.partition("_")[0], "?")


def on_hull(results: Sequence[Result]) -> list[int]:
    """Numbers of the results on the lower convex hull of loss over cost, the cheapest first: others win at no price."""
    return hull([result.cost for result in results], [result.loss for result in results])


def _candidates(arrays: Mapping[str, Array], shape: tuple[int, int]) -> tuple[Candidate, ...]:
    """From arrays candidates.<number>.<name>.<measure or size>; a name may have dots of its own."""
    found: dict[int, Candidate] = {}
    for key, array in arrays.items():
        if not key.startswith("candidates."):
            continue
        number, _, rest = key.removeprefix("candidates.").partition(".")
        name, _, measure = rest.rpartition(".")
        if not number.isdecimal() or not name:
            raise HeadwiseError(f"the sidecar's array {key!r} is not named candidates.NUMBER.NAME.MEASURE")
        candidate = found.setdefault(int(number), Candidate(number=int(number), name=name))
        values = candidate.measures if measure in (*MEASURES, *OF_MODEL) else candidate.sizes
        values[measure] = _checked(key, np.asarray(array), shape)
    for candidate in found.values():
        for measure in MEASURES:
            if measure not in candidate.measures:
                raise HeadwiseError(f"the sidecar has no {measure} of the candidate {candidate.name}")
    return tuple(found[number] for number in sorted(found))


def _checked(name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if array.shape != shape:
        raise HeadwiseError(f"the sidecar's array {name} has the shape {array.shape}, the model's heads are {shape}")
    return array


def _by_layer(array: Array | None, layers: int, name: str) -> np.ndarray | None:
    """One number for all layers or one for each, as one for each."""
    if array is None:
        return None
    values = np.asarray(array, dtype=float)
    if values.size not in (1, layers):
        raise HeadwiseError(f"the sidecar's array allocation.{name} has {values.size} values for {layers} layers")
    return np.broadcast_to(values.reshape(-1), (layers,))
