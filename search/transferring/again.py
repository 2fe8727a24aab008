"""Searches some heads of a model again, by the rule that an artifact's own search went by for all of them.

Shapes: H query heads, G KV heads, S prompt length, D head dim, h of the heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from profiling.inside.capture import LayerInputs, capture
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel
from profiling.progress import phase
from profiling.prompts.prompt import Prompt
from runtime.layers import attention_layers
from search.transferring.rules import Found, Rule

Head = tuple[int, int]
"""A layer and a query head of it."""
# When heads are scored again: as they pass by while drift is measured, or in passes of their own after it.
_BESIDE, _AFTER = "again beside", "again after"


class Again:
    """Scores heads on prompts, each once, and keeps that in the ledger: while others look at them, or for itself."""

    def __init__(self, loaded: LoadedModel, rule: Rule, prompts: Sequence[Prompt], ledger: Ledger) -> None:
        """Search on this model and these prompts by the rule of an artifact's search, from rules.rule_of."""
        self._loaded, self._rule, self._prompts, self._ledger = loaded, rule, prompts, ledger
        self._scores: dict[tuple[int, int, int], Any] = {}
        for sample in range(len(prompts)):
            for layer in attention_layers(loaded.model):
                for when in (_BESIDE, _AFTER):
                    self._keep(sample, layer, ledger.get(ledger.unit(f"{when} {sample}.{layer}")))

    def score(self, sample: int, inputs: LayerInputs, heads: Iterable[int], when: str = _BESIDE) -> None:
        """Score these heads of a layer on a prompt that is passing by; for each `when` once at most.

        Left out are those that are scored already, and those that were not on the first prompt, which settles sizes.
        """
        missing = [head for head in heads if self._may(sample, inputs.layer, head)]
        if not missing:
            return
        first = [self._scores[0, inputs.layer, head] for head in missing] if sample else None
        scores = self._rule.score(of_heads(inputs, missing), inputs.layer, missing, first)
        # As one unit: the last bits of a score depend on which heads were scored together.
        unit = self._ledger.unit(f"{when} {sample}.{inputs.layer}")
        found = {str(head): {name: of[at] for name, of in scores.items()} for at, head in enumerate(missing)}
        self._keep(sample, inputs.layer, self._ledger.put(unit, found))

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
        with phase("searching again", total, "layers") as shown:
            for sample, layers in missing.items():

                def visit(inputs: LayerInputs, sample: int = sample, layers: Mapping[int, list[int]] = layers) -> None:
                    if inputs.layer in layers:
                        self.score(sample, inputs, layers[inputs.layer], _AFTER)
                        shown.update()

                ids = torch.tensor([self._prompts[sample].input_ids], device=self._loaded.model.device)
                capture(self._loaded.model, ids, visit)
        return {
            (layer, head): self._rule.choose(layer, head, [self._scores[sample, layer, head] for sample in samples])
            for layer, head in heads
        }

    def _may(self, sample: int, layer: int, head: int) -> bool:
        settled = not sample or (0, layer, head) in self._scores
        return settled and (sample, layer, head) not in self._scores

    def _keep(self, sample: int, layer: int, found: dict[str, Any] | None) -> None:
        self._scores |= {(sample, layer, int(head)): score for head, score in (found or {}).items()}


def of_heads(inputs: LayerInputs, heads: Sequence[int]) -> LayerInputs:
    """The inputs of these query heads alone, (1, h, S, D), each with a KV head of its own."""
    group = inputs.q.shape[1] // inputs.k.shape[1]
    read = [head // group for head in heads]
    sinks = None if inputs.sinks is None else inputs.sinks[list(heads)]
    return replace(inputs, q=inputs.q[:, list(heads)], k=inputs.k[:, read], v=inputs.v[:, read], sinks=sinks)
