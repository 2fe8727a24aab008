"""How much each head loses with each candidate: the curves that a budget for the whole model is spent by.

Shapes: L layers, H query heads, C candidates, S prompt length, E value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels.index import with_dense_tail
from kernels.patterns import KINDS, Pattern, make
from profiling.capture import LayerInputs, capture
from profiling.head_fidelity import attend, dense_attention
from profiling.models import LoadedModel
from profiling.prompts import Prompt
from profiling.residual import ResidualStream


@dataclass(frozen=True, kw_only=True, eq=False)
class Curves:
    """(L, H, C) fp32 each, NaN in layers left alone.

    change: mean over the tokens of the squared change of what the head adds to the residual stream, relative to the
        stream's squared size. Of heads and layers these add up as far as changes are independent of one another.
    error: relative L2 of the head's output. recall: attention mass kept. tiles: 64 x 64 tiles computed.
    """

    change: np.ndarray
    error: np.ndarray
    recall: np.ndarray
    tiles: np.ndarray

    @classmethod
    def mean(cls, curves: Sequence[Self]) -> Self:
        """Of several prompts of one length."""
        return cls(**{f.name: np.mean([getattr(one, f.name) for one in curves], axis=0) for f in fields(cls)})

    @classmethod
    def worst(cls, curves: Sequence[Self]) -> Self:
        """The largest change of each head and candidate over several curves; means of all else."""
        mean = {f.name: getattr(cls.mean(curves), f.name) for f in fields(cls)}
        return cls(**mean | {"change": np.max([one.change for one in curves], axis=0)})

    @property
    def searched(self) -> np.ndarray:
        """(L,) whether the layer has candidates."""
        found: np.ndarray = ~np.isnan(self.change).all(axis=(1, 2))
        return found


def score_prompt(
    loaded: LoadedModel, prompt: Prompt, candidates: Sequence[Pattern], *, layers: int, dense_tail: int, backend: str
) -> Curves:
    """The curves of one prompt, by one dense forward pass: every layer gets the inputs of dense attention.

    Args:
        loaded: the model.
        prompt: of the length that the candidates are for.
        candidates: as search.ladder.ladder returns them.
        layers: how many the model has, those without attention included.
        dense_tail: last queries that see every key, whatever the candidate.
        backend: the attention backend, as for kernels.attention.sparse_attention.

    Raises:
        HeadwiseError: a layer has attention sinks of its own, or numbers that its dtype cannot hold.
    """
    found: dict[int, dict[str, np.ndarray]] = {}
    heads = 1
    with ResidualStream(loaded.model) as stream:

        def visit(inputs: LayerInputs) -> None:
            nonlocal heads
            heads = inputs.q.shape[1]
            if inputs.sliding_window is not None:
                return
            if inputs.sinks is not None:
                raise HeadwiseError(f"layer {inputs.layer} has attention sinks of its own, which no search weighs yet")
            found[inputs.layer] = _score_layer(inputs, stream, candidates, dense_tail, backend)

        capture(loaded.model, torch.tensor([prompt.input_ids], device=loaded.model.device), visit)
        for layer, measures in found.items():
            # A norm between attention and stream is only known after the block.
            measures["change"] *= float(stream.gain(layer))
            if not all(np.isfinite(values).all() for values in measures.values()):
                dtype = str(loaded.model.dtype).removeprefix("torch.")
                raise HeadwiseError(
                    f"layer {layer} computes numbers that are not finite in {dtype}: try another --dtype"
                )
    shape = (layers, heads, len(candidates))
    filled = {field.name: np.full(shape, np.nan, dtype=np.float32) for field in fields(Curves)}
    for layer, measures in found.items():
        for name, values in measures.items():
            filled[name][layer] = values
    return Curves(**filled)


def _score_layer(
    inputs: LayerInputs, stream: ResidualStream, candidates: Sequence[Pattern], dense_tail: int, backend: str
) -> dict[str, np.ndarray]:
    """(H, C) of each measure."""
    dense, dense_lse = dense_attention(inputs, backend=backend)
    heads = range(inputs.q.shape[1])
    sizes = [dense[0, head].float().norm().clamp_min(1e-30) for head in heads]
    measures = {name: np.empty((len(heads), len(candidates)), dtype=np.float32) for name in Curves.__annotations__}
    builders: dict[Any, Any] = {}
    for c, pattern in enumerate(candidates):
        key = (pattern.kind, getattr(pattern, "last_q", 0))
        if key not in builders:
            like = [p for p in candidates if (p.kind, getattr(p, "last_q", 0)) == key]
            builders[key] = KINDS[pattern.kind].prepare(
                [_largest(like)] * len(heads), heads, inputs.q, inputs.k, scale=inputs.scale
            )
        index = with_dense_tail(builders[key]([pattern] * len(heads)), dense_tail)
        out, lse = attend(inputs, index, backend)
        measures["tiles"][:, c] = index.computed_tiles()[0].cpu().numpy()
        measures["recall"][:, c] = (lse - dense_lse)[0].exp().clamp(max=1.0).mean(-1).cpu().numpy()
        for head in heads:
            # Head by head: the fp32 difference of a whole layer would be the largest tensor of the search.
            change: Tensor = out[0, head].float() - dense[0, head].float()
            measures["error"][head, c] = float(change.norm() / sizes[head])
            measures["change"][head, c] = float(stream.by_head(inputs.layer, change, head, len(heads)).mean())
    return measures


def _largest(patterns: Sequence[Pattern]) -> Pattern:
    """A pattern that none of these, all of one kind and last_q, is larger than."""
    first = patterns[0]
    sizes = {name: max(getattr(p, name) for p in patterns) for name, value in vars(first).items() if type(value) is int}
    return make(first.kind, **sizes)
