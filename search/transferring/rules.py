"""How a search scores the candidates of a head and chooses among them, for searching heads again under its own rule.

Shapes: H query heads, G KV heads, S prompt length, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from artifacts import Artifact, HeadwiseError, Pattern
from kernels.patterns import LayerPlan, make
from profiling.inside.capture import LayerInputs
from profiling.inside.head_fidelity import dense_attention, layer_fidelity
from runtime.patterns import kernel_growth
from search.common.recording import as_artifact_pattern
from search.explaining.findings import MEASURES, Findings, at_price
from search.published.choose import choose, mean_scores
from search.published.score import Score, score_layer
from search.published.space import initial_space, target_tiles

if TYPE_CHECKING:
    from artifacts.sidecar import Array


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a head got, and what the sidecar has to say of it: a value for each array, by the array's name."""

    pattern: Pattern
    values: dict[str, float]


class Rule(Protocol):
    """A way of scoring and choosing."""

    def score(self, inputs: LayerInputs, layer: int, heads: Sequence[int], first: list[Any] | None) -> list[Any]:
        """The scores of a layer's heads on one prompt, as plain data, one entry a head.

        inputs: of these heads alone, in this order. first: what it returned for the first prompt, None on that one.
        """

    def choose(self, layer: int, head: int, samples: Sequence[Any]) -> Found:
        """What a head gets by its scores on all prompts.

        Raises:
            HeadwiseError: no candidate may be taken.
        """


def rule_of(artifact: Artifact, arrays: Mapping[str, Array], *, backend: str) -> Rule:
    """The rule that the artifact's search went by.

    Raises:
        HeadwiseError: the sidecar lacks what the rule needs.
    """
    assert artifact.search is not None
    if artifact.search.allocation == "heads":
        return HeadBudget(artifact, backend)
    return ModelPrice(Findings.of(artifact, arrays), backend)


class HeadBudget:
    """Each head has the same budget, and of what keeps to it takes the least error (MInference 1.0, Algorithm 1)."""

    def __init__(self, artifact: Artifact, backend: str) -> None:
        assert artifact.search is not None
        search = artifact.search
        length, self._tail = search.calibration.lengths[0], artifact.prefill.dense_tail
        self._families = initial_space(length, scaled=search.preset == "scaled")
        self._target = target_tiles(search.budget, length, self._tail)
        self._budget, self._backend = search.budget, backend

    def score(self, inputs: LayerInputs, layer: int, heads: Sequence[int], first: list[Any] | None) -> list[Any]:
        """See Rule."""
        settled = None if first is None else [[score["sizes"] for score in head] for head in first]
        scores = score_layer(inputs, self._families, self._target, self._tail, settled, backend=self._backend)
        return [[asdict(score) for score in head] for head in scores]

    def choose(self, layer: int, head: int, samples: Sequence[Any]) -> Found:
        """See Rule."""
        scores = mean_scores([[Score(**score) for score in sample] for sample in samples])
        choice = choose(scores, self._families)
        if choice is None:
            raise HeadwiseError(f"no candidate keeps to the budget {self._budget} for head {layer}.{head}")
        values: dict[str, float] = {"chosen.candidate": choice.candidate}
        values |= {f"chosen.{measure}": getattr(choice.score, measure) for measure in MEASURES}
        for number, (family, score) in enumerate(zip(self._families, scores, strict=True)):
            found = {measure: getattr(score, measure) for measure in MEASURES} | score.sizes
            values |= {f"candidates.{number}.{family.name}.{name}": value for name, value in found.items()}
        return Found(pattern=as_artifact_pattern(choice.pattern), values=values)


class ModelPrice:
    """One budget for the model: at its price each head takes the least of loss and cost.

    The candidates are those that the search tried for the head. A candidate costs what it did, times how many more
    tiles it computes on this model; an error costs as much as the head's errors did there.
    """

    def __init__(self, found: Findings, backend: str) -> None:
        if found.price is None:
            raise HeadwiseError(
                "this artifact has no allocation.price in its sidecar: nobody knows what its heads were weighed by; "
                "search the model with python -m search.heads"
            )
        self._found, self._price, self._backend = found, found.price, backend
        self._growth, self._tail = kernel_growth(found.artifact), found.artifact.prefill.dense_tail

    def score(self, inputs: LayerInputs, layer: int, heads: Sequence[int], first: list[Any] | None) -> list[Any]:
        """See Rule."""
        dense = dense_attention(inputs, backend=self._backend)
        tried: list[dict[str, Any]] = [{} for _ in heads]
        for candidate in self._found.candidates:
            asked = [at for at, head in enumerate(heads) if candidate.tried(layer, head)]
            if not asked:
                continue
            # One that was not tried for a head stands in with what was tried for another: its scores are dropped.
            patterns = [candidate.pattern(layer, heads[at if at in asked else asked[0]]) for at in range(len(heads))]
            kernels = [make(**pattern.model_dump()) for pattern in patterns]
            plan = LayerPlan(kernels, len(heads), dense_tail=self._tail, growth=self._growth)
            one = layer_fidelity(inputs, plan, dense=dense, backend=self._backend)
            for at in asked:
                values = {measure: float(getattr(one, measure)[at]) for measure in MEASURES}
                tried[at][str(candidate.number)] = values
        return tried

    def choose(self, layer: int, head: int, samples: Sequence[Any]) -> Found:
        """See Rule."""
        values: dict[str, float] = {}
        tried = self._found.trials(layer, head)
        errors = sum(trial.error**2 for trial in tried)
        shares = {
            name: sum(getattr(trial, name) for trial in tried) / errors
            for name in ("change", "objective")
            if errors and tried and getattr(tried[0], name) is not None
        }
        losses, costs = [], []
        scores: dict[int, dict[str, float]] = {}
        for candidate in self._found.candidates:
            if str(candidate.number) not in samples[0]:
                continue
            own = [sample[str(candidate.number)] for sample in samples]
            mean = {measure: fmean(one[measure] for one in own) for measure in MEASURES}
            before = candidate.trial(layer, head)
            for unit in ("seconds", "flops"):
                if (spent := getattr(before, unit)) is not None:
                    mean[unit] = spent * mean["density"] / before.density
            mean |= {name: share * mean["error"] ** 2 for name, share in shares.items()}
            scores[candidate.number] = mean
            loss = mean.get("objective", mean.get("change", mean["error"] ** 2))
            losses.append(float(self._found.weight[layer]) * loss)
            costs.append(mean.get("seconds", mean.get("flops", mean["density"])))
            values |= {f"candidates.{candidate.number}.{candidate.name}.{name}": mean[name] for name in mean}
        if not scores:
            raise HeadwiseError(f"no candidate was tried for head {layer}.{head}")
        number = list(scores)[at_price(losses, costs, float(self._price[layer]))]
        values |= {"chosen.candidate": number} | {f"chosen.{name}": value for name, value in scores[number].items()}
        chosen = next(candidate for candidate in self._found.candidates if candidate.number == number)
        return Found(pattern=chosen.pattern(layer, head), values=values)
