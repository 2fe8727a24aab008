"""How many tokens a budget is worth: a count is itself, a share goes by the tokens seen."""

from __future__ import annotations

import math

# What a share's product may be above a whole number by rounding: 0.1 of 30 tokens are 3.
_ROUNDING = 1e-6


def tokens(budget: int | float, seen: int) -> int:
    """A share is rounded up, so that it grows by no more than one with each token."""
    return max(0, math.ceil(budget * seen - _ROUNDING)) if isinstance(budget, float) else budget
