"""How much each head loses with each candidate: the curves that a budget for the whole model is spent by.

Shapes: L layers, H query heads, C candidates, S prompt length, E value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from artifacts import HeadwiseError
from kernels.index import with_dense_tail
from kernels.patterns import KINDS, Pattern, make
from profiling.inside.capture import LayerInputs, capture
from profiling.inside.head_fidelity import attend, dense_attention
from profiling.inside.loss_gradients import loss_gradients
from profiling.inside.residual import ResidualStream
from profiling.models.loading import LoadedModel
from profiling.prompts.prompt import Prompt

# Tokens of text from which the change of a head's loss is known as well as it is not. Measured on SmolLM2.
_TOKENS_TO_TRUST = 30_000
# Tokens whose changes of the loss are taken together.
_GROUP = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Curves:
    """(L, H, C) fp32 each but for `tokens`, NaN in layers left alone.

    change: mean over the tokens of the squared change of what the head adds to the residual stream, relative to the
        stream's squared size. Of heads and layers these add up as far as changes are independent of one another.
    error: relative L2 of the head's output. recall: attention mass kept. tiles: 64 x 64 tiles computed.
    divergence: half the squared first-order change of the loss on the prompt's own tokens, by groups of 64 tokens, in
        nats a token: to second order, by the empirical Fisher information, what the KL to dense attention comes to.
    drop: the first-order change of that loss itself, nats a token, of prompts that are text to their end; else 0.
    tokens: how many tokens `drop` is of. Where a model's loss has no gradients, divergence is NaN and both are 0.
    """

    change: np.ndarray
    error: np.ndarray
    recall: np.ndarray
    tiles: np.ndarray
    divergence: np.ndarray = field(default_factory=lambda: np.array(np.nan))
    drop: np.ndarray = field(default_factory=lambda: np.array(0.0))
    tokens: np.ndarray = field(default_factory=lambda: np.array(0))

    @classmethod
    def mean(cls, curves: Sequence[Self]) -> Self:
        """Of several prompts of one length; `drop` is weighed by its tokens."""
        found = {f.name: np.mean([getattr(one, f.name) for one in curves], axis=0) for f in fields(cls)}
        tokens = np.sum([one.tokens for one in curves], axis=0)
        drop = np.sum([one.drop * one.tokens for one in curves], axis=0) / np.maximum(tokens, 1)
        return cls(**found | {"tokens": tokens, "drop": drop})

    @classmethod
    def worst(cls, curves: Sequence[Self]) -> Self:
        """What each head and candidate loses at most over several curves; means of all else."""
        mean = {f.name: getattr(cls.mean(curves), f.name) for f in fields(cls)}
        worst = {name: np.max([getattr(one, name) for one in curves], axis=0) for name in ("change", "divergence")}
        return cls(**mean | worst)

    @property
    def loss(self) -> np.ndarray:
        """(L, H, C) fp64: what a budget is spent to make small, nats a token; `change` where no gradients were taken.

        What a head loses by dropping keys is told by the geometric mean of its change and its divergence, on the scale
        of the latter: the one knows nothing of what the later layers make of it, the other only one sample of each
        token. To it comes the change of the loss on text, since text that repeats itself loses more by what is dropped
        than the KL says; as an estimate from few tokens it is shrunk towards none, and it never takes away more
        than three quarters.
        """
        change = self.change.astype(np.float64)
        divergence = self.divergence.astype(np.float64)
        if np.isnan(divergence).all() or not np.nansum(divergence) > 0:
            return change
        both = np.sqrt(np.maximum(change, 0) * np.maximum(divergence, 0))
        both *= np.nansum(divergence) / np.nansum(both)
        trust = float(self.tokens) / (float(self.tokens) + _TOKENS_TO_TRUST)
        found: np.ndarray = np.maximum(both + trust * self.drop, both / 4)
        return found

    @property
    def searched(self) -> np.ndarray:
        """(L,) whether the layer has candidates."""
        found: np.ndarray = ~np.isnan(self.change).all(axis=(1, 2))
        return found


_MEASURES = tuple(one.name for one in fields(Curves) if one.name != "tokens")


def score_prompt(
    loaded: LoadedModel, prompt: Prompt, candidates: Sequence[Pattern], *, layers: int, dense_tail: int, backend: str
) -> Curves:
    """The curves of one prompt, by one dense pass forth and back: every layer gets the inputs of dense attention.

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
    ids = torch.tensor([prompt.input_ids], device=loaded.model.device)
    gradients = loss_gradients(loaded.model, ids, wanted=_searched)
    with ResidualStream(loaded.model) as stream:

        def visit(inputs: LayerInputs) -> None:
            nonlocal heads
            heads = inputs.q.shape[1]
            if not _searched(inputs):
                return
            gradient = None if gradients is None else gradients.pop(inputs.layer)
            found[inputs.layer] = _score_layer(inputs, stream, gradient, candidates, dense_tail, backend)

        capture(loaded.model, ids, visit)
        for layer, measures in found.items():
            # A norm between attention and stream is only known after the block.
            measures["change"] *= float(stream.gain(layer))
            if not all(np.isfinite(values).all() for values in measures.values()):
                dtype = str(loaded.model.dtype).removeprefix("torch.")
                raise HeadwiseError(
                    f"layer {layer} computes numbers that are not finite in {dtype}: try another --dtype"
                )
    shape = (layers, heads, len(candidates))
    filled = {name: np.full(shape, np.nan, dtype=np.float32) for name in _MEASURES}
    for layer, measures in found.items():
        for name, values in measures.items():
            filled[name][layer] = values
    # An answer is short, and what leads to it is not text that anyone wrote.
    tokens = len(prompt.input_ids) if prompt.answer is None and gradients is not None else 0
    if not tokens:
        filled["drop"][:] = 0
    return Curves(**filled, tokens=np.array(tokens))


def _searched(inputs: LayerInputs) -> bool:
    """Whether a layer has candidates: one that slides over a window has not.

    Raises:
        HeadwiseError: the layer has attention sinks of its own.
    """
    if inputs.sliding_window is not None:
        return False
    if inputs.sinks is not None:
        raise HeadwiseError(f"layer {inputs.layer} has attention sinks of its own, which no search weighs yet")
    return True


def _score_layer(
    inputs: LayerInputs,
    stream: ResidualStream,
    gradient: Tensor | None,
    candidates: Sequence[Pattern],
    dense_tail: int,
    backend: str,
) -> dict[str, np.ndarray]:
    """(H, C) of each measure. gradient: of the loss by the outputs, (S, H, E)."""
    dense, dense_lse = dense_attention(inputs, backend=backend)
    heads = range(inputs.q.shape[1])
    sizes = [dense[0, head].float().norm().clamp_min(1e-30) for head in heads]
    known = _MEASURES if gradient is not None else [name for name in _MEASURES if name not in ("divergence", "drop")]
    measures = {name: np.empty((len(heads), len(candidates)), dtype=np.float32) for name in known}
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
            if gradient is not None:
                lost = (gradient[:, head].float() * change).sum(-1)
                measures["drop"][head, c] = float(lost.mean())
                groups = pad(lost, (0, -len(lost) % _GROUP)).unflatten(0, (-1, _GROUP)).sum(-1)
                measures["divergence"][head, c] = float(groups.square().sum() / len(lost) / 2)
    return measures


def _largest(patterns: Sequence[Pattern]) -> Pattern:
    """A pattern that none of these, all of one kind and last_q, is larger than."""
    first = patterns[0]
    sizes = {name: max(getattr(p, name) for p in patterns) for name, value in vars(first).items() if type(value) is int}
    return make(first.kind, **sizes)
