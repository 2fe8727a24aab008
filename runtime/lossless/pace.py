"""How many tokens to draft before verifying: what the seconds taken so far and the share that stood say is fastest.

With drafts that each stand with probability a, a round of n drafts gives (1 - a^(n+1)) / (1 - a) tokens (Leviathan et
al. 2023, equation 1).
"""

from __future__ import annotations

from collections import deque
from statistics import mean, median
from typing import NamedTuple

from kernels.decode import MAX_QUERIES

# Verification takes one token more than was drafted.
MOST = MAX_QUERIES - 1
# Drafting is taken where it is faster by more than a measurement is off.
_MARGIN = 1.03
# How much longer a context must be before drafts are tried again.
_LONGER = 1.25
# Seconds of how many rounds of a kind are kept.
_LATEST = 8
# A choice serves so many rounds: on a CPU to choose takes half as long as to attend.
_SERVES = 4


class Plan(NamedTuple):
    """A round: tokens to draft, and whether its verification chooses what the next drafts attend to."""

    drafts: int
    chooses: bool


# The first rounds of a generation: dense steps, then enough drafts for an estimate.
_FIRST = Plan(0, False), Plan(0, False), Plan(0, True), Plan(3, False), Plan(3, True)


class Pace:
    """Plans the rounds of one generation after the other; `fixed` is always so many drafts, whatever the time."""

    def __init__(self, fixed: int | None) -> None:
        self.fixed = fixed
        # Contexts shorter than this gained nothing.
        self.off_below = 0
        self.begin()

    def begin(self) -> None:
        """A new generation: its context has another length, its text another share of drafts that stand."""
        self._first = list(_FIRST if self.fixed is None else _FIRST[2:3])
        self._draft: deque[float] = deque(maxlen=_LATEST)
        self._verify: dict[int, deque[float]] = {}
        self._judged = self._stood = self._rounds = 0

    def plan(self, length: int, room: int) -> Plan:
        """The next round on a context of `length` tokens, with at most `room` drafts."""
        if self.fixed is None and length < self.off_below:
            return Plan(0, False)
        if self._first:
            plan = self._first.pop(0)
        elif self.fixed is not None:
            plan = Plan(self.fixed, self._chooses())
        else:
            plan = Plan(max(range(MOST + 1), key=self._speed), self._chooses())
            if self._speed(plan.drafts) < _MARGIN * self._speed(0):
                self.off_below = int(_LONGER * length)
                self.begin()
                return Plan(0, False)
        return plan._replace(drafts=max(min(plan.drafts, room), 0))

    def saw(self, plan: Plan, stood: int, draft_seconds: float, verify_seconds: float) -> None:
        """What a round gave and took."""
        if plan.drafts:
            self._draft.append(draft_seconds / plan.drafts)
        # A dense step that chooses is no measure of one that does not.
        if plan.drafts or not plan.chooses:
            self._verify.setdefault(plan.drafts, deque(maxlen=_LATEST)).append(verify_seconds)
        # What comes after the first that fell was not judged.
        self._judged += min(stood + 1, plan.drafts)
        self._stood += stood

    def _chooses(self) -> bool:
        """Whether the choice has served its rounds."""
        self._rounds += 1
        return self._rounds % _SERVES == 0

    def _speed(self, drafts: int) -> float:
        """Tokens a second of rounds with so many drafts."""
        share = self._stood / self._judged if self._judged else 0.0
        tokens = sum(share**i for i in range(drafts + 1))
        return tokens / (drafts * median(self._draft or [0.0]) + self._verification(drafts))

    def _verification(self, drafts: int) -> float:
        """Seconds to verify so many drafts: as seen, or on the line through the nearest two that were."""
        seen = {count: mean(seconds) for count, seconds in self._verify.items()}
        nearest = sorted(seen, key=lambda count: abs(count - drafts))[:2]
        if drafts in seen or len(seen) < 2:
            return seen[nearest[0]]
        low, high = sorted(nearest)
        return max(seen[low] + (seen[high] - seen[low]) * (drafts - low) / (high - low), min(seen.values()))
