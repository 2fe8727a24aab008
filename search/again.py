"""Searches some heads of a model again, by the rule that an artifact's own search went by for all of them.

Shapes: H query heads, G KV heads, S prompt length, D head dim, h of the heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from profiling.inside.capture import LayerInputs, capture
from profiling.journal import Journal
from profiling.models.loading import LoadedModel
from profiling.prompts.prompt import Prompt
from search.rules import Found, Rule

Head = tuple[int, int]
"""A layer and a query head of it."""


class Again:
    """Scores heads on prompts, each once, and keeps that in the journal: while others look at them, or for itself."""

    def __init__(self, loaded: LoadedModel, rule: Rule, prompts: Sequence[Prompt], journal: Journal) -> None:
        """Search on this model and these prompts by the rule of an artifact's search, from search.rules.rule_of."""
        self._loaded, self._rule, self._prompts, self._journal = loaded, rule, prompts, journal
        self._scores: dict[tuple[int, int, int], Any] = {}
        for key in journal:
            if key.startswith("again."):
                self._keep(key)

    def score(self, sample: int, inputs: LayerInputs, heads: Iterable[int]) -> None:
        """Score these heads of a layer on a prompt that is passing by.

        Left out are those that are scored already, and those that were not on the first prompt, which settles sizes.
        """
        missing = [head for head in heads if self._may(sample, inputs.layer, head)]
        if not missing:
            return
        first = [self._scores[0, inputs.layer, head] for head in missing] if sample else None
        scores = self._rule.score(of_heads(inputs, missing), inputs.layer, missing, first)
        # In one line: the last bits of a score depend on which heads were scored together.
        key = f"again.{sample}.{inputs.layer}.{missing[0]}"
        self._journal.add(key, {str(head): score for head, score in zip(missing, scores, strict=True)})
        self._keep(key)

    def finish(self, heads: Sequence[Head]) -> dict[Head, Found]:
        """Score what is still missing of these heads, with a pass over each prompt that it takes, and choose.

        Raises:
            HeadwiseError: nothing can be chosen for one of them.
        """
        samples = range(len(self._prompts))
        missing: dict[int, dict[int, list[int]]] = {}
        for sample in samples:
            for layer, head in heads:
                if (sample, layer, head) not in self._scores:
                    missing.setdefault(sample, {}).setdefault(layer, []).append(head)
        total = sum(len(layers) for layers in missing.values())
        with tqdm(total=total, desc="searching again", unit="layer", disable=None) as progress:
            for sample, layers in missing.items():

                def visit(inputs: LayerInputs, sample: int = sample, layers: Mapping[int, list[int]] = layers) -> None:
                    if inputs.layer in layers:
                        self.score(sample, inputs, layers[inputs.layer])
                        progress.update()

                ids = torch.tensor([self._prompts[sample].input_ids], device=self._loaded.model.device)
                capture(self._loaded.model, ids, visit)
        return {
            (layer, head): self._rule.choose(layer, head, [self._scores[sample, layer, head] for sample in samples])
            for layer, head in heads
        }

    def _may(self, sample: int, layer: int, head: int) -> bool:
        settled = not sample or (0, layer, head) in self._scores
        return settled and (sample, layer, head) not in self._scores

    def _keep(self, key: str) -> None:
        _, sample, layer, _ = key.split(".")
        self._scores |= {(int(sample), int(layer), int(head)): score for head, score in self._journal[key].items()}


def of_heads(inputs: LayerInputs, heads: Sequence[int]) -> LayerInputs:
    """The inputs of these query heads alone, (1, h, S, D), each with a KV head of its own."""
    group = inputs.q.shape[1] // inputs.k.shape[1]
    read = [head // group for head in heads]
    sinks = None if inputs.sinks is None else inputs.sinks[list(heads)]
    return replace(inputs, q=inputs.q[:, list(heads)], k=inputs.k[:, read], v=inputs.v[:, read], sinks=sinks)
