"""Searches some heads of a model again, by the rule that an artifact's own search went by for all of them.

Shapes: H query heads, G KV heads, S prompt length, D head dim, h of the heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from tqdm import tqdm

from profiling.capture import LayerInputs, capture
from profiling.journal import Journal
from profiling.models import LoadedModel
from profiling.prompts import Prompt
from search.rules import Found, Rule

Head = tuple[int, int]
"""A layer and a query head of it."""


def search_again(
    loaded: LoadedModel, rule: Rule, prompts: Sequence[Prompt], heads: Sequence[Head], journal: Journal
) -> dict[Head, Found]:
    """Score the candidates for these heads on this model, and choose.

    Args:
        loaded: the model to search on.
        rule: that of the artifact's search, from search.rules.rule_of.
        prompts: those of the search.
        heads: only these are scored.
        journal: keeps each layer as it is finished; those that it has are not scored again.

    Raises:
        HeadwiseError: nothing can be chosen for one of the heads.
    """
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
                first = journal[f"again.0.{inputs.layer}"] if sample else None
                scores = rule.score(of_heads(inputs, these), inputs.layer, these, first)
                journal.add(f"again.{sample}.{inputs.layer}", scores)
                progress.update()

            if left:
                capture(loaded.model, torch.tensor([prompt.input_ids], device=loaded.model.device), visit)
    found = {}
    for layer, these in by_layer.items():
        samples = [journal[f"again.{sample}.{layer}"] for sample in range(len(prompts))]
        for at, head in enumerate(these):
            found[layer, head] = rule.choose(layer, head, [sample[at] for sample in samples])
    return found


def of_heads(inputs: LayerInputs, heads: Sequence[int]) -> LayerInputs:
    """The inputs of these query heads alone, (1, h, S, D), each with a KV head of its own."""
    group = inputs.q.shape[1] // inputs.k.shape[1]
    read = [head // group for head in heads]
    sinks = None if inputs.sinks is None else inputs.sinks[list(heads)]
    return replace(inputs, q=inputs.q[:, list(heads)], k=inputs.k[:, read], v=inputs.v[:, read], sinks=sinks)
