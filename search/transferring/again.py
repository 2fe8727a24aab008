"""Searches some heads of a model again, by the rule that an artifact's own search went by for all of them.

Shapes: S prompt length, D head dim, h of the heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from profiling.inside.capture import LayerInputs
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel
from profiling.prompts.prompt import Prompt
from search.common.layers import score_layers
from search.transferring.rules import Replacement, Rule

Head = tuple[int, int]
"""A layer and a query head of it."""


def search_again(
    loaded: LoadedModel, rule: Rule, prompts: Sequence[Prompt], heads: Sequence[Head], ledger: Ledger
) -> dict[Head, Replacement]:
    """Score these heads' candidates on every prompt, and choose.

    Raises:
        HeadwiseError: nothing can be chosen for one of them.
    """
    by_layer: dict[int, list[int]] = {}
    for layer, head in heads:
        by_layer.setdefault(layer, []).append(head)

    def score(inputs: LayerInputs, first: Mapping[str, Any] | None) -> Mapping[str, Any]:
        some = by_layer[inputs.layer]
        return rule.score(of_heads(inputs, some), inputs.layer, some, first)

    layers = {layer: {"heads": some} for layer, some in by_layer.items()}
    scores = score_layers(loaded, prompts, layers, score, ledger, "searching again")
    return {
        (layer, head): rule.choose(layer, head, [{name: of[at] for name, of in one.items()} for one in scores[layer]])
        for layer, some in by_layer.items()
        for at, head in enumerate(some)
    }


def of_heads(inputs: LayerInputs, heads: Sequence[int]) -> LayerInputs:
    """The inputs of these query heads alone, (1, h, S, D), each with a KV head of its own."""
    group = inputs.q.shape[1] // inputs.k.shape[1]
    read = [head // group for head in heads]
    sinks = None if inputs.sinks is None else inputs.sinks[list(heads)]
    return replace(inputs, q=inputs.q[:, list(heads)], k=inputs.k[:, read], v=inputs.v[:, read], sinks=sinks)
