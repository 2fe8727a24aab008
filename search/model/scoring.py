"""Scores of a layer's candidates against dense attention, on sampled query tiles.

Shapes: H query heads, G KV heads, S tokens, E value dim, C candidates, n sampled tiles of 64
queries, T dense tails.

A candidate's loss is a sum over query tiles, estimated by a few of them (sampled_tiles.py). The
kernels that serve compute the scores: for one query tile, all candidates of all heads but dense are
heads of one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels.attention import attend
from kernels.call import AttentionCall
from kernels.index import PAD, TILE, SparseIndex, dense_from, lists, num_tiles
from kernels.patterns import KINDS, Builder, Inputs, Pattern, largest
from profiling.inside.capture import LayerInputs
from profiling.inside.gradients import LayerGradients
from profiling.inside.head_fidelity import kept_mass
from profiling.inside.residual import ResidualStream
from search.model.sampled_tiles import sampled

# Rows whose tiles are counted for density and cost, evenly spread.
_COUNTED = 32
# Query heads of one launch: outputs of all candidates are held at once.
_HEADS = 1024


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores:
    """Sums over a prompt's tokens for one dense tail, (H, C) fp64 each.

    Attributes:
        change: squared change of the head's part of the residual stream, relative to the stream's;
            each query's output is first multiplied by the factor that brings it nearest to dense
            attention's.
        squared: squared change of its output.
        size: the output's own squared size.
        recall: attention mass kept.
        first_order: change of the loss to first order.
        fisher: half the sum over queries of its square.
        tiles: 64 x 64 tiles computed, skipped ones by half.
    """

    change: np.ndarray
    squared: np.ndarray
    size: np.ndarray
    recall: np.ndarray
    first_order: np.ndarray
    fisher: np.ndarray
    tiles: np.ndarray


def score_layer(
    layer: LayerGradients,
    stream: ResidualStream,
    candidates: Sequence[Pattern],
    *,
    length: int,
    tails: Sequence[int],
    seed: int,
    gradients: bool = True,
    backend: str = "auto",
) -> dict[int, Scores]:
    """Score all heads and candidates of a layer, by dense tail.

    Args:
        layer: inputs and gradients of the pass.
        stream: of the model that it runs.
        candidates: C of them.
        length: tokens of the prefill. Later turns attend to everything and are not scored.
        tails: dense tails, in tokens.
        seed: of the tiles that are drawn.
        gradients: False leaves `first_order` and `fisher` 0.
        backend: as for kernels.attention.sparse_attention.
    """
    whole = layer.inputs
    inputs = replace(
        whole, q=whole.q[:, :, :length], k=whole.k[:, :, :length], v=whole.v[:, :, :length]
    )
    if gradients:
        by_out = layer.by_out
    else:
        by_out = None
    sample = sampled(by_out, length, tails, seed)
    indices = build_all(inputs, candidates)
    heads = inputs.q.shape[1]
    count = len(candidates)
    # A tail's first tile: rows from there on compute everything.
    firsts = {tail: dense_from(tail, length) for tail in tails}
    names = ("change", "squared", "recall", "first_order", "fisher", "skipped")
    sums = {tail: {name: np.zeros((heads, count)) for name in names} for tail in tails}
    sizes = np.zeros((heads, 1))
    tiles_seen = dict.fromkeys(tails, 0.0)
    drawn = list(zip(sample.rows.tolist(), sample.weights.tolist(), strict=True))
    for row, weight in drawn:
        for tail, first in firsts.items():
            tiles_seen[tail] += weight * (row + 1) * (row < first)
        squares = layer.out[0, :, _span(row, length)].float().square().sum((1, 2))
        sizes += weight * squares.cpu().double().numpy()[:, None]
    dense = [c for c, pattern in enumerate(candidates) if pattern.kind == "dense"]
    sparse = [c for c in range(count) if c not in dense]
    step = max(1, _HEADS // heads)
    for at in range(0, len(sparse), step):
        columns = sparse[at : at + step]
        joined = _StackedIndices([indices[c] for c in columns])
        for row, weight in drawn:
            span = _span(row, length)
            scores = None
            # From the last tail's first tile on all is dense: there is nothing to score.
            if row < max(firsts.values()):
                scores = _row(
                    inputs,
                    joined,
                    row,
                    layer.out[0, :, span].float(),
                    layer.lse[0, :, span],
                    None if by_out is None else by_out[0, :, span].float(),
                    stream,
                    backend,
                )
            for tail, first in firsts.items():
                if scores is not None and row < first:
                    for name, values in scores.items():
                        sums[tail][name][:, columns] += weight * values
                else:
                    sums[tail]["recall"][:, columns] += weight * (span.stop - span.start)
    tiles = torch.stack(
        [index.density(_COUNTED)[0].double() * index.causal_tiles for index in indices], dim=-1
    )
    by_tail = {}
    for tail, first in firsts.items():
        sums[tail]["recall"][:, dense] = length
        # Skipped tiles go with a row's length: their fraction of the drawn rows is that of all
        # before the tail. Row r has r + 1 tiles, and a skipped one counts half.
        skipped = (
            sums[tail].pop("skipped") / max(tiles_seen[tail], 1.0) * first * (first + 1) / 2 / 2
        )
        by_tail[tail] = Scores(
            **sums[tail],
            size=np.broadcast_to(sizes, (heads, count)),
            tiles=tiles.cpu().numpy() + _tail_tiles(indices, tail) - skipped,
        )
    return by_tail


def build_all(inputs: LayerInputs, candidates: Sequence[Pattern]) -> list[SparseIndex]:
    """The index of all heads for each candidate."""
    builders = prepare_all(inputs, candidates)
    return [builders[estimate_of(pattern)]([pattern] * inputs.q.shape[1]) for pattern in candidates]


def prepare_all(
    inputs: LayerInputs, candidates: Sequence[Pattern]
) -> dict[tuple[str, int], Builder]:
    """Builders of an index from one pattern a head, by estimate, up to the largest sizes."""
    heads = range(inputs.q.shape[1])
    prompt = Inputs(heads, inputs.q, inputs.k, inputs.scale)
    alike: dict[tuple[str, int], list[Pattern]] = {}
    for pattern in candidates:
        alike.setdefault(estimate_of(pattern), []).append(pattern)
    builders = {}
    for estimate, patterns in alike.items():
        widest = [largest(patterns)] * len(heads)
        kind = KINDS[estimate[0]]
        builders[estimate] = kind.prepare(widest, prompt)
    return builders


def estimate_of(pattern: Pattern) -> tuple[str, int]:
    """A pattern's kind and its last queries, 0 without: those alike share an estimate."""
    return pattern.kind, getattr(pattern, "last_q", 0)


class _StackedIndices:
    """Many indices of the same heads as heads of one index: head by head, index by index."""

    def __init__(self, indices: Sequence[SparseIndex]) -> None:
        self.indices = indices
        # The same for all query tiles.
        self.diagonals = _join([index.diagonals for index in indices])
        self.columns = _join([index.columns for index in indices])
        self.skip = None
        if any(index.skip is not None for index in indices):
            none = indices[0].diagonals.new_full(
                indices[0].diagonals.shape[:2], -torch.inf, dtype=torch.float32
            )
            skips = [none if index.skip is None else index.skip for index in indices]
            self.skip = _join([skip[..., None] for skip in skips])[..., 0]

    def of_row(self, row: int, start: int, stop: int) -> SparseIndex:
        """Of one query tile."""
        tiles = _join([index.padded_tiles(slice(row, row + 1)) for index in self.indices])
        return SparseIndex.built(
            q_len=stop - start,
            k_len=stop,
            diagonals=self.diagonals,
            **lists(tiles),
            columns=self.columns,
            skip=self.skip,
        )


def _join(parts: Sequence[Tensor]) -> Tensor:
    """(1, H * parts, ...) of parts (1, H, ...), their last dimension padded to the widest."""
    width = max(part.shape[-1] for part in parts)
    padded = [
        torch.nn.functional.pad(part, (0, width - part.shape[-1]), value=PAD) for part in parts
    ]
    return torch.stack(padded, dim=2).flatten(1, 2).contiguous()


def _span(row: int, length: int) -> slice:
    """The tokens of a tile."""
    return slice(row * TILE, min((row + 1) * TILE, length))


def _row(
    inputs: LayerInputs,
    joined: _StackedIndices,
    row: int,
    dense: Tensor,
    dense_lse: Tensor,
    by_out: Tensor | None,
    stream: ResidualStream,
    backend: str,
) -> dict[str, np.ndarray]:
    """(H, C) of each sum, over the queries of one tile.

    Args:
        inputs: of the layer.
        joined: the indices of all candidates of all heads.
        row: number of the query tile.
        dense: (H, queries, E), output of dense attention.
        dense_lse: (H, queries), its log-sum-exp.
        by_out: (H, queries, E), gradient of the loss by the output; None if it is not known.
        stream: of the model.
        backend: as for kernels.attention.sparse_attention.
    """
    heads = inputs.q.shape[1]
    groups = inputs.k.shape[1]
    count = len(joined.indices)
    start = row * TILE
    stop = row * TILE + dense.shape[1]
    # Candidates of a head are adjacent.
    skipped = inputs.q.new_zeros((1, heads * count), dtype=torch.int32)
    many = (
        inputs.q[:, :, start:stop]
        .unflatten(1, (groups, -1))
        .repeat_interleave(count, dim=2)
        .flatten(1, 2)
    )
    sinks = inputs.logits.sinks
    logits = inputs.logits
    if sinks is not None:
        logits = replace(logits, sinks=sinks.repeat_interleave(count))
    call = AttentionCall(
        many,
        inputs.k[:, :, :stop],
        inputs.v[:, :, :stop],
        joined.of_row(row, start, stop),
        logits=logits,
        skipped=skipped,
    )
    out, lse = attend(call, backend)
    sparse = out[0].float().unflatten(0, (heads, count))
    # Before the difference is taken in place.
    without_scale = _without_scale(sparse, dense[:, None])
    difference = sparse.sub_(dense[:, None])
    recall = kept_mass(lse[0].unflatten(0, (heads, count)), dense_lse[:, None], sinks)
    sums = {
        "squared": torch.linalg.vector_norm(difference, dim=(2, 3)).double().square(),
        "recall": recall.sum(-1),
        "skipped": skipped.view(heads, count),
        "change": stream.by_head(inputs.layer, without_scale, slice(start, stop)),
    }
    if by_out is not None:
        first_order = (difference * by_out[:, None]).sum(-1).double()
        sums["first_order"] = first_order.sum(-1)
        sums["fisher"] = first_order.square().sum(-1) / 2
    return {name: values.cpu().double().numpy() for name, values in sums.items()}


def _without_scale(sparse: Tensor, dense: Tensor) -> Tensor:
    """Difference (..., E) to dense attention after the best factor on each query's output.

    It is c * sparse - dense with c = <sparse, dense> / |sparse|^2.
    """
    along = (sparse * dense).sum(-1, keepdim=True)
    size = sparse.square().sum(-1, keepdim=True).clamp_min(1e-30)
    return (sparse * (along / size)).sub_(dense)


def _tail_tiles(indices: Sequence[SparseIndex], tail: int) -> np.ndarray:
    """(H, C) tiles that a dense tail adds to those of the indices in its rows."""
    if not tail:
        return np.zeros((indices[0].num_heads, len(indices)))
    more = []
    for index in indices:
        first = dense_from(tail, index.k_len)
        n = num_tiles(index.k_len)
        causal = n * (n + 1) // 2 - first * (first + 1) // 2
        rows = replace(
            index,
            q_len=index.k_len - first * TILE,
            offsets=index.offsets[:, :, first:],
            dense_tail=0,
        )
        more.append(causal - rows.computed_tiles()[0].double())
    return torch.stack(more, dim=-1).cpu().numpy()
