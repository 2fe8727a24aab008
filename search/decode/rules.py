"""Rules of others for which layers and heads choose, to compare ours with.

IndexCache (arXiv 2603.12201): one layer after the other gives up choosing, each time the one without which the language
model's loss is least. Kascade (arXiv 2512.16391, section 3): anchors are found by dynamic programming over
similarities, weighted by how much a layer's attention turns the residual stream, and each KV head is mapped to the
anchor's KV head that is most similar. Similarity is the least share that the anchor's tokens keep of what the head's
own keep: over decode steps here, over tiles of a prompt there.

Shapes: L layers, G KV heads, U sets of a layer's KV heads that can choose, all of them last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from search.decode.filter_layers import Choice, Rules, served

RULES = ("error", "kascade", "loss")


def by_loss(loss: Callable[[Choice], float], layers: Sequence[int], rules: Rules) -> Choice:
    """IndexCache's greedy search: as many layers attend to everything as may, the first one of them."""
    full = list(layers)
    while len(full) > rules.full(len(layers)):
        # The first layer has none before it that could choose for it.
        full = min(
            ([kept for kept in full if kept != gone] for gone in full[1:]), key=lambda t: loss(of_full(t, layers))
        )
    return of_full(full, layers)


def by_kascade(
    least: np.ndarray, turn: np.ndarray, choosers: Sequence[tuple[int, ...]], layers: Sequence[int], rules: Rules
) -> Choice:
    """As many anchors as layers may attend to everything, the first layer one of them, with Kascade's map.

    An anchor attends to everything here, and to its own top tokens there; one that serves no other layer is dense.

    Args:
        least: (L, U, L, G) similarities. turn: (L) importances.
        choosers: the sets of KV heads; only single ones are taken.
    """
    singles = [at for at, heads in enumerate(choosers) if len(heads) == 1]
    best = least[:, singles].max(axis=1).mean(axis=-1) * turn
    at = best_anchors(best[np.ix_(layers, layers)], rules.full(len(layers)))
    choice = of_full([layers[anchor] for anchor in at], layers)
    takes = np.full((least.shape[2], least.shape[3]), len(choosers) - 1)
    for layer, filter_layer in served(layers, choice).items():
        takes[layer] = np.array(singles)[least[filter_layer, singles, layer].argmax(axis=0)]
    return replace(choice, takes=tuple(map(tuple, takes.tolist())))


def best_anchors(score: np.ndarray, count: int) -> list[int]:
    """At most `count` anchors of N layers, 0 the first, by which all layers' scores with the last anchor up to them are
    largest.

    score: (N, N), read where the column is not before the row.
    """
    n = len(score)
    sums = np.concatenate([np.zeros((n, 1)), np.triu(np.nan_to_num(score)).cumsum(axis=1)], axis=1)
    # Of the layers from anchor a up to the one before b.
    gains = sums - np.diagonal(sums)[:, None]
    reached, turns = gains[:, n], list[np.ndarray]()
    for _ in range(1, count):
        ways = np.where(np.triu(np.ones((n, n), dtype=bool), 1), gains[:, :n] + reached, -np.inf)
        turns.append(np.where(ways.max(axis=1) > reached, ways.argmax(axis=1), -1))
        reached = np.maximum(reached, ways.max(axis=1))
    anchors = [0]
    for turn in reversed(turns):
        if turn[anchors[-1]] >= 0:
            anchors.append(int(turn[anchors[-1]]))
    return anchors


def of_full(full: Sequence[int], layers: Sequence[int]) -> Choice:
    """The choice in which exactly these layers attend to everything; one that serves no other stays dense."""
    following = dict(pairwise(layers))
    filters = tuple(layer for layer in full if following.get(layer) not in (None, *full))
    return Choice(filters, tuple(layer for layer in full if layer not in filters))
