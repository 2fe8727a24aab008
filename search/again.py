"""Searches some heads of a model again as an artifact's own search did all of them.

Shapes: H query heads, G KV heads, S prompt length, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from tqdm import tqdm

from artifacts import Artifact, HeadwiseError
from profiling.capture import LayerInputs, capture
from profiling.journal import Journal
from profiling.models import LoadedModel
from profiling.prompts import Prompt
from search.choose import Choice, choose, mean_scores
from search.score import Score, score_layer
from search.space import Family, initial_space, target_tiles

Head = tuple[int, int]
"""A layer and a query head of it."""


@dataclass(frozen=True, kw_only=True)
class Again:
    """What was found: of each head its candidates' scores, averaged over the prompts, and the choice."""

    families: tuple[Family, ...]
    scores: dict[Head, list[Score]]
    choices: dict[Head, Choice]


def search_again(
    loaded: LoadedModel,
    artifact: Artifact,
    prompts: Sequence[Prompt],
    heads: Sequence[Head],
    journal: Journal,
    *,
    backend: str = "auto",
) -> Again:
    """Score the search's candidates for these heads on this model, and choose by its rule.

    Args:
        loaded: the model to search on.
        artifact: whose space, budget and dense tail are used.
        prompts: those of the search.
        heads: only these are scored.
        journal: keeps each layer as it is finished; those that it has are not scored again.
        backend: as for kernels.attention.sparse_attention.

    Raises:
        HeadwiseError: no candidate keeps to the budget for one of the heads.
    """
    search = artifact.search
    assert search is not None
    length, tail = search.calibration.lengths[0], artifact.prefill.dense_tail
    families = initial_space(length, scaled=search.preset == "scaled")
    target = target_tiles(search.budget, length, tail)
    by_layer: dict[int, list[int]] = {}
    for layer, head in heads:
        by_layer.setdefault(layer, []).append(head)

    with tqdm(total=len(by_layer) * len(prompts), desc="searching again", unit="layer", disable=None) as progress:
        for sample, prompt in enumerate(prompts):
            left = {layer: these for layer, these in by_layer.items() if f"again.{sample}.{layer}" not in journal}
            progress.update(len(by_layer) - len(left))

            def visit(inputs: LayerInputs, sample: int = sample, left: Mapping[int, list[int]] = left) -> None:
                these = left.get(inputs.layer)
                if these is None:
                    return
                settled = None
                if sample:
                    first = journal[f"again.0.{inputs.layer}"]
                    settled = [[score["sizes"] for score in head] for head in first]
                part = of_heads(inputs, these)
                scores = score_layer(part, families, target, tail, settled, backend=backend)
                journal.add(f"again.{sample}.{inputs.layer}", [[asdict(score) for score in head] for head in scores])
                progress.update()

            if left:
                capture(loaded.model, torch.tensor([prompt.input_ids], device=loaded.model.device), visit)
    found = Again(families=families, scores={}, choices={})
    for layer, these in by_layer.items():
        records = [journal[f"again.{sample}.{layer}"] for sample in range(len(prompts))]
        parsed = [[[Score(**score) for score in head] for head in record] for record in records]
        for head, samples in zip(these, zip(*parsed, strict=True), strict=True):
            scores = mean_scores(samples)
            choice = choose(scores, families)
            if choice is None:
                raise HeadwiseError(f"no candidate keeps to the budget {search.budget} for head {layer}.{head}")
            found.scores[layer, head], found.choices[layer, head] = scores, choice
    return found


def of_heads(inputs: LayerInputs, heads: Sequence[int]) -> LayerInputs:
    """The inputs of these query heads alone, (1, h, S, D), each with a KV head of its own."""
    group = inputs.q.shape[1] // inputs.k.shape[1]
    read = [head // group for head in heads]
    sinks = None if inputs.sinks is None else inputs.sinks[list(heads)]
    return replace(inputs, q=inputs.q[:, list(heads)], k=inputs.k[:, read], v=inputs.v[:, read], sinks=sinks)
