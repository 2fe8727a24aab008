"""Searches some heads of a model again, by the rule that an artifact's own search went by for all of them.

Shapes: S prompt length, D head dim, h heads that are scored, C candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from artifacts import Artifact, HeadwiseError, Pattern, pattern_name
from kernels.index import with_dense_tail
from kernels.patterns import Pattern as KernelPattern
from profiling.inside.capture import LayerInputs
from profiling.inside.head_fidelity import dense_attention, index_fidelity
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel
from profiling.prompts.prompt import Prompt
from search.common.layers import score_layers
from search.common.measures import MEASURES
from search.common.scores import as_artifact_pattern
from search.explaining.findings import Findings
from search.model.candidates import ladder
from search.model.hulls import at_price
from search.model.scoring import build_all
from search.published.score import HeadBudget, least_error, mean_scores
from search.published.space import initial_space, target_tiles

if TYPE_CHECKING:
    from artifacts.sidecar import Array

Head = tuple[int, int]
"""A layer and a query head of it."""


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """What a head got in place of its pattern, and what the sidecar has to say of it: a value by each array's name."""

    pattern: Pattern
    values: dict[str, float]

    @classmethod
    def of(cls, pattern: Pattern, candidate: int, chosen: Mapping[str, float], values: Mapping[str, float]) -> Self:
        """With the values of what was chosen beside those of all candidates."""
        own = {f"chosen.{name}": value for name, value in chosen.items()}
        return cls(pattern=pattern, values={"chosen.candidate": candidate, **own, **values})


class LeastError(HeadBudget):
    """Each head has the same budget, and of what keeps to it takes the least error (MInference 1.0, Algorithm 1)."""

    def replacement(self, layer: int, head: int, samples: Sequence[Mapping[str, np.ndarray]]) -> Replacement:
        """What a head gets by its scores on all prompts.

        Raises:
            HeadwiseError: no candidate may be taken.
        """
        scores = mean_scores(samples)
        best = least_error(scores)
        if best is None:
            raise HeadwiseError(f"no candidate keeps to the budget of {self.target} tiles for head {layer}.{head}")
        values: dict[str, float] = {}
        for number, family in enumerate(self.families):
            sizes = {name: int(size) for (name, _), size in zip(family.start, scores["sizes"][number], strict=False)}
            found = {name: float(scores[name][number]) for name in MEASURES} | sizes
            values |= {f"candidates.{number}.{family.name}.{name}": value for name, value in found.items()}
        pattern = as_artifact_pattern(self.families[best].sized(scores["sizes"][best]))
        return Replacement.of(pattern, best, {name: float(scores[name][best]) for name in MEASURES}, values)


class ModelPrice:
    """One budget for the model: at its price each head takes the least of loss and cost.

    The candidates are those that the search tried for the head. A candidate costs what it did, times how many more
    tiles it computes on this model; an error costs as much as the head's errors did there.
    """

    def __init__(self, found: Findings, backend: str) -> None:
        if found.ranks > 1:
            raise HeadwiseError(
                f"this artifact was searched for {found.ranks} ranks of tensor parallelism, which share a layer's "
                "price: no head is chosen by it alone; search the model with python -m search.heads"
            )
        if found.price is None:
            raise HeadwiseError(
                "this artifact has no allocation.price in its sidecar: nobody knows what its heads were weighed by; "
                "search the model with python -m search.heads"
            )
        self._found, self._price, self._backend = found, found.price, backend
        self._patterns = _tried(found)
        self._tail = found.artifact.prefill.dense_tail

    def score(self, inputs: LayerInputs, first: Mapping[str, np.ndarray] | None) -> Mapping[str, np.ndarray]:
        """The scores of h heads on one prompt, (h, C) by name; inputs: of these heads alone, in this order."""
        dense = dense_attention(inputs, backend=self._backend)
        indices = (with_dense_tail(index, self._tail) for index in build_all(inputs, self._patterns))
        each = [index_fidelity(inputs, index, dense=dense, backend=self._backend) for index in indices]
        return {name: np.stack([getattr(one, name) for one in each], axis=1) for name in MEASURES}

    def replacement(self, layer: int, head: int, samples: Sequence[Mapping[str, np.ndarray]]) -> Replacement:
        """As LeastError.replacement; some candidate always may be taken."""
        means = {name: np.mean([one[name] for one in samples], axis=0) for name in MEASURES}
        tried = self._found.results(layer, head)
        errors = sum(result.error**2 for result in tried)
        here = []
        for c, before in enumerate(tried):
            now: dict[str, Any] = {name: float(values[c]) for name, values in means.items()}
            for name in ("seconds", "flops"):
                if (spent := getattr(before, name)) is not None:
                    now[name] = spent * now["density"] / before.density
            for name in ("change", "objective"):
                if errors and getattr(before, name) is not None:
                    now[name] = now["error"] ** 2 * sum(getattr(result, name) for result in tried) / errors
            here.append(replace(before, **now))
        losses = [float(self._found.weight[layer]) * result.loss for result in here]
        best = at_price(losses, [result.cost for result in here], float(self._price[layer]))
        candidates = self._found.candidates
        values = {
            f"candidates.{candidate.number}.{candidate.name}.{name}": value
            for candidate, result in zip(candidates, here, strict=True)
            for name, value in result.measured.items()
        }
        pattern = as_artifact_pattern(self._patterns[best])
        return Replacement.of(pattern, candidates[best].number, here[best].measured, values)


def _tried(found: Findings) -> list[KernelPattern]:
    """The patterns of a search's candidates, which it knows by their names.

    Raises:
        HeadwiseError: it tried some that searches try no more.
    """
    assert found.artifact.search is not None
    known = {
        pattern_name(as_artifact_pattern(pattern)): pattern
        for pattern in ladder(max(found.artifact.search.calibration.lengths))
    }
    names = [candidate.name for candidate in found.candidates]
    if gone := [name for name in names if name not in known]:
        raise HeadwiseError(
            f"the search tried {gone[0]}, which searches try no more: search the model with python -m search.heads"
        )
    return [known[name] for name in names]


def rule_of(artifact: Artifact, arrays: Mapping[str, Array], *, backend: str) -> LeastError | ModelPrice:
    """The rule that the artifact's search went by.

    Raises:
        HeadwiseError: the sidecar lacks what the rule needs.
    """
    search, tail = artifact.search, artifact.prefill.dense_tail
    assert search is not None
    if search.allocation == "heads":
        (length,) = search.calibration.lengths
        families, target = (
            initial_space(length, scaled=search.preset == "scaled"),
            target_tiles(search.budget, length, tail),
        )
        return LeastError(families=families, target=target, dense_tail=tail, backend=backend)
    return ModelPrice(Findings.of(artifact, arrays), backend)


def search_again(
    loaded: LoadedModel, rule: LeastError | ModelPrice, prompts: Sequence[Prompt], heads: Sequence[Head], ledger: Ledger
) -> dict[Head, Replacement]:
    """Score these heads' candidates on every prompt, and choose.

    Raises:
        HeadwiseError: nothing can be chosen for one of them.
    """
    by_layer: dict[int, list[int]] = {}
    for layer, head in heads:
        by_layer.setdefault(layer, []).append(head)

    def score(inputs: LayerInputs, first: Mapping[str, Any] | None) -> Mapping[str, Any]:
        return rule.score(of_heads(inputs, by_layer[inputs.layer]), first)

    layers = {layer: {"heads": some} for layer, some in by_layer.items()}
    scores = score_layers(loaded, prompts, layers, score, ledger, "searching again")
    return {
        (layer, head): rule.replacement(
            layer, head, [{name: of[at] for name, of in one.items()} for one in scores[layer]]
        )
        for layer, some in by_layer.items()
        for at, head in enumerate(some)
    }


def of_heads(inputs: LayerInputs, heads: Sequence[int]) -> LayerInputs:
    """The inputs of these query heads alone, (1, h, S, D), each with a KV head of its own."""
    group = inputs.q.shape[1] // inputs.k.shape[1]
    read = [head // group for head in heads]
    sinks = None if inputs.sinks is None else inputs.sinks[list(heads)]
    return replace(inputs, q=inputs.q[:, list(heads)], k=inputs.k[:, read], v=inputs.v[:, read], sinks=sinks)
