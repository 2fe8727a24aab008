"""How settlements do on whole prompts, measured by all processes of a search together: each on each prompt once."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from profiling.prompts.prompt import Prompt
from profiling.quality.logits import DenseLogits, Drift
from search.refine import Problem
from search.settle import Settlement
from search.units import Units


class SharedDrifts:
    """Drifts of settlements on some prompts. What was measured is kept: it is not measured again."""

    def __init__(
        self, problem: Problem, model: Any, prompts: Sequence[Prompt], units: Callable[[Sequence[str]], Units]
    ) -> None:
        """Nothing is measured yet.

        Args:
            problem: that the settlements are of.
            model: with nothing applied to it.
            prompts: to measure on.
            units: from keys to units, of a name and settings that hold for these prompts and the problem's candidates.
        """
        self._problem = problem
        self._model = model
        self._units = units
        self._logits = DenseLogits(model, prompts, at_once=False)
        self._places = range(len(prompts))

    def __call__(self, settlements: Sequence[Settlement]) -> list[Drift]:
        """The drift of each, over all prompts; this process does its share of what nobody has measured yet."""
        named = {_name(settlement): settlement for settlement in settlements}
        units = self._units([f"{name}/{place}" for name in named for place in self._places])
        # A search with other settings may begin where this is cut off: nothing of it would be lost.
        units.finish()
        for key in units.claim(description="held out", choose=self._choose):
            name, place = _parts(key)
            self._logits.learn(place)
            units.put(key, asdict(self._problem.drift(self._model, self._logits, named[name], which=[place])))
        found = units.results()
        return [
            Drift.joined([Drift(**found[f"{_name(settlement)}/{place}"]) for place in self._places])
            for settlement in settlements
        ]

    def _choose(self, free: Sequence[str]) -> str:
        """Of a prompt that this process knows the dense predictions of, else of the one that others do least of."""
        known = [key for key in free if _parts(key)[1] in self._logits.known]
        left = Counter(_parts(key)[1] for key in free)
        return known[0] if known else max(free, key=lambda key: left[_parts(key)[1]])


def _name(settlement: Settlement) -> str:
    """Tells it from others by what each head gets."""
    return hashlib.sha256(settlement.chosen.astype(np.int64).tobytes()).hexdigest()[:16]


def _parts(key: str) -> tuple[str, int]:
    name, _, place = key.partition("/")
    return name, int(place)
