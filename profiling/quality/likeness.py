"""How near a prefill comes to dense attention's on a prompt, whatever the right answers are.

For lengths at which the model itself gives no right answers: what is then to be kept is what dense attention does.

Shapes: P positions that are compared, V vocabulary, H query heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from profiling.inside.capture import LayerInputs, capture
from profiling.inside.head_fidelity import dense_attention, layer_fidelity
from profiling.prompts.prompt import Prompt
from profiling.quality.contexts import scored_places
from profiling.quality.logits import check_logits
from profiling.quality.method import Method
from runtime import apply_dense
from runtime.plans import layer_plans

# Raised where the same prompt under the same method would give another record.
VERSION = 1
# Positions of a context that are compared, and dense log-probabilities that are held, in half precision.
_MOST, _HELD = 256, 1 << 26
# Log-probabilities turned to fp32 at once.
_ROWS = 64
# What a model forbids altogether has a log-probability that half precision cannot hold.
_LEAST = -1e4


class Likeness:
    """Dense attention's predictions in a prompt's context, by Headwise's kernel, and how near methods come to them."""

    def __init__(self, model: Any, prompt: Prompt) -> None:
        """Run the model over the context once.

        Args:
            model: a causal model with logits_to_keep, with nothing applied to it.
            prompt: its context is what is compared, with the answers inside it.

        Raises:
            HeadwiseError: the model computes the logits of all tokens or none.
        """
        check_logits(model)
        self._model = model
        self._ids = torch.tensor([prompt.context], device=model.device)
        vocabulary = model.get_output_embeddings().weight.shape[0]
        count = min(self._ids.shape[1], max(16, min(_MOST, _HELD // vocabulary)))
        self._spread = torch.linspace(0, self._ids.shape[1] - 1, count, device=model.device).long()
        self._answers = torch.tensor(scored_places(prompt), dtype=torch.long, device=model.device)
        self._edges = np.cumsum([0, *(stop - start for start, stop in prompt.scored)]).tolist()
        with apply_dense(model):
            self._dense, self._likeliest = self._predicted()

    def record(self, method: Method) -> dict[str, float | None]:
        """What the method makes of it, as plain data for a ledger.

        kl: KL(dense || method), nats a token, mean over positions spread over the context. same: the share of these
            whose likeliest token is dense attention's. as_dense: the share of the answers inside the prompt of which
            every token is; None where it has none.
        """
        with method.apply(self._model):
            found, likeliest = self._predicted()
        same = likeliest == self._likeliest
        kl = [
            (wide.exp() * (wide - other.float())).sum(-1)
            for wide, other in zip((rows.float() for rows in self._dense.split(_ROWS)), found.split(_ROWS), strict=True)
        ]
        spread = len(self._spread)
        answers = [bool(same[spread + a : spread + b].all()) for a, b in pairwise(self._edges)]
        return {
            "kl": float(torch.cat(kl).clamp_min(0).mean()),
            "same": float(same[:spread].float().mean()),
            "as_dense": sum(answers) / len(answers) if answers else None,
        }

    def recall(self, methods: Sequence[Method]) -> dict[str, float]:
        """The share of dense attention's mass that each method's patterns keep, mean over its heads, by name.

        One dense pass for all; methods without patterns have none.
        """
        served = {method.name: method.headwise for method in methods if method.headwise is not None}
        plans = {name: layer_plans(each.artifact, each.arrays) for name, each in served.items()}
        found: dict[str, list[np.ndarray]] = {}

        def visit(inputs: LayerInputs) -> Tensor | None:
            dense = None
            for name, layers in plans.items():
                if (plan := layers.get(inputs.layer)) is not None:
                    dense = dense or dense_attention(inputs)
                    found.setdefault(name, []).append(layer_fidelity(inputs, plan, dense=dense).recall)
            return None if dense is None else dense[0]

        if served:
            capture(self._model, self._ids, visit)
        return {name: float(np.concatenate(heads).mean()) for name, heads in found.items()}

    @torch.inference_mode()
    def _predicted(self) -> tuple[Tensor, Tensor]:
        """Log-probabilities in half precision at the spread positions (P, V), and the likeliest tokens at all."""
        kept = torch.cat([self._spread, self._answers])
        logits = self._model(self._ids, use_cache=False, logits_to_keep=kept).logits[0]
        rows = logits[: len(self._spread)].split(_ROWS)
        held = [part.float().log_softmax(-1).clamp_min_(_LEAST).half() for part in rows]
        return torch.cat(held), logits.argmax(-1)


def as_dense(
    prompts: Sequence[Prompt], records: Sequence[Mapping[str, Any]], dense: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The records of trials, `as_dense` beside where an answer follows the prompt: whether its text is dense's."""
    return [
        dict(own) if prompt.scored or "text" not in own else {**own, "as_dense": float(own["text"] == other["text"])}
        for prompt, own, other in zip(prompts, records, dense, strict=True)
    ]
