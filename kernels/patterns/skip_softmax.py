"""Skip-softmax: all scores, softmax and values where scores are high (BLASST, arXiv 2512.12087)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from kernels.index import PAD
from kernels.patterns.base import Pattern


def _no_factor(value: object) -> str | None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    if fits:
        return None
    return f"must be a positive number, got {value!r}"


@dataclass(frozen=True, kw_only=True)
class SkipSoftmax(Pattern):
    """Every causal tile but those whose largest weight is below a threshold.

    Attributes:
        scale_factor: the threshold is scale_factor / K on K keys, as BLASST calibrates it and
            ModelOpt stores it; from 1 on nothing is skipped. SparseIndex.skip has the comparison.
    """

    kind: ClassVar[str] = "skip_softmax"
    scale_factor: float = field(metadata={"fault": _no_factor})

    def bound(self, k_len: int) -> float:
        """The log of the threshold on `k_len` keys; -inf where nothing is skipped."""
        if self.scale_factor < k_len:
            return math.log(self.scale_factor / k_len)
        return -math.inf

    def limits(self) -> tuple[int, int]:
        """See Pattern.limits. Nothing is chosen here: the kernel skips."""
        return 0, PAD
