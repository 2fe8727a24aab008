"""Scores the candidates of a layer against dense attention, and chooses (MInference 1.0, Algorithm 1, line 12).

Shapes: H query heads, G KV heads, S prompt length, D head dim, C candidates (families).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from profiling.inside.capture import LayerInputs
from profiling.inside.head_fidelity import dense_attention, index_fidelity
from search.common.measures import MEASURES
from search.published.space import Family, builders, change_space

FamilyScores = Mapping[str, np.ndarray]
"""Of heads (H, C), or of one (C,): error, recall and density as profiling.inside.head_fidelity has them; within:
whether the candidate keeps to the budget; sizes, with an axis more: its sizes in its family's order, 0 beyond them."""


@dataclass(frozen=True, kw_only=True)
class HeadBudget:
    """What every head has to keep to: `target` tiles, with the last `dense_tail` queries that see every key.

    families: the C entries of the initial space. backend: as for kernels.attention.sparse_attention.
    """

    families: Sequence[Family]
    target: int
    dense_tail: int
    backend: str

    def score(self, inputs: LayerInputs, first: Mapping[str, np.ndarray] | None) -> FamilyScores:
        """Scores of all heads and candidates of a layer, q (1, H, S, D), k (1, G, S, D) and v.

        first: those on the first prompt, whose sizes are taken; None chooses them by ChangeSpace.
        """
        (heads, length), count = inputs.q.shape[1:3], len(self.families)
        dense = dense_attention(inputs, backend=self.backend)
        build = builders(self.families, inputs.q, inputs.k, scale=inputs.scale, dense_tail=self.dense_tail)
        found = {name: np.empty((heads, count)) for name in MEASURES}
        found |= {"within": np.ones((heads, count), dtype=bool), "sizes": np.zeros((heads, count, 2), int)}
        for c, family in enumerate(self.families):
            if first is None:
                patterns = change_space(family, self.target, build[family.kind], num_heads=heads, length=length)
            else:
                patterns = [family.sized(own) for own in first["sizes"][:, c]]
            index = build[family.kind](patterns)
            one = index_fidelity(inputs, index, dense=dense, backend=self.backend)
            for name in MEASURES:
                found[name][:, c] = getattr(one, name)
            if first is None:
                found["within"][:, c] = index.computed_tiles()[0].cpu().numpy() <= self.target
            found["sizes"][:, c, : len(family.start)] = [family.sizes_of(pattern) for pattern in patterns]
        return found


def mean_scores(samples: Sequence[FamilyScores]) -> FamilyScores:
    """Over the prompts; sizes are chosen on the first, and what keeps to the budget does so on all."""
    means = {name: np.mean([one[name] for one in samples], axis=0) for name in MEASURES}
    return means | {"within": np.all([one["within"] for one in samples], axis=0), "sizes": samples[0]["sizes"]}


def least_error(scores: FamilyScores, allowed: np.ndarray | None = None) -> int | None:
    """Of one head's candidates within the budget the one with the least error; ties go to the cheaper.

    allowed: (C,) those that may be taken, all if None. None: there is none.
    """
    within = scores["within"] if allowed is None else scores["within"] & allowed
    if not within.any():
        return None
    return int(np.lexsort((scores["density"], scores["error"], ~within))[0])


def best_single_kind(heads: Sequence[FamilyScores], families: Sequence[Family]) -> tuple[str, float]:
    """The kind that does best when every head must take it, by mean recall, with that recall.

    A kind that some head cannot take within the budget is out; A-shape shrinks to any budget there is.
    """
    recalls = {}
    for kind in dict.fromkeys(family.kind for family in families):
        of_kind = np.array([family.kind == kind for family in families])
        forced = [least_error(scores, of_kind) for scores in heads]
        if None not in forced:
            recalls[kind] = float(np.mean([one["recall"][at] for one, at in zip(heads, forced, strict=True)]))
    return max(recalls.items(), key=lambda item: item[1])
