"""Limits on what patterns may lose, by task and over all answers; the worst decides."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from artifacts.cli.options import SHARE, Arg, CommandConfig

if TYPE_CHECKING:
    from artifacts import TaskFigures

MAX_KL = 0.05
MAX_PERPLEXITY = 0.03
MAX_NLL = 0.1
MAX_LOST = 0.1
_GROUP = "limits on held-out prompts, task by task"


class Limits(CommandConfig):
    """Limits on the losses of each task; None: no limit.

    Attributes:
        max_kl: mean nats a token to dense attention.
        max_perplexity: rise over dense attention's, of text.
        max_nll: rise of -log p of the right answer, nats for each of its tokens.
        max_lost: right answers lost, less those won, as a fraction of dense attention's. One answer
            alone fails nothing. A rise or a fraction fails only if its 95% interval is above 0.
    """

    max_kl: Annotated[
        float | None, Arg("nats a token to dense attention", group=_GROUP), Field(gt=0)
    ] = MAX_KL
    max_perplexity: Annotated[float | None, Arg("rise on text", group=_GROUP), Field(gt=0)] = (
        MAX_PERPLEXITY
    )
    max_nll: Annotated[
        float | None,
        Arg("rise of -log p of right answers, nats a token", group=_GROUP),
        Field(gt=0),
    ] = MAX_NLL
    max_lost: Annotated[
        float | None,
        Arg("right answers lost, as a fraction of dense attention's", group=_GROUP),
        SHARE,
    ] = MAX_LOST

    def violation(self, tasks: Sequence[TaskFigures]) -> str | None:
        """The worst loss beyond a limit, in words; None where there is none.

        Args:
            tasks: figures of each task, and of all answers together.
        """
        # `not <=` so that NaN fails.
        faults = [(times, text) for times, text in self._measured(tasks) if not times <= 1]
        if not faults:
            return None
        return max(faults, key=lambda fault: (isnan(fault[0]), fault[0]))[1]

    def worst_ratio(self, tasks: Sequence[TaskFigures]) -> float:
        """The largest loss in multiples of its limit, NaN if one is; 0 without limits."""
        return float(np.max([times for times, _ in self._measured(tasks)], initial=0.0))

    def _measured(self, tasks: Sequence[TaskFigures]) -> list[tuple[float, str]]:
        """(multiple of its limit, in words) of all losses that are beyond chance."""
        measured = []
        for task in tasks:
            for times, beyond_chance, text in self._of(task):
                if beyond_chance:
                    measured.append((times, f"{task.task}: {text}"))
        return measured

    def _of(self, task: TaskFigures) -> list[tuple[float, bool, str]]:
        """(multiple of its limit, True if its interval is above 0, in words) of a task's losses."""
        losses = []
        if self.max_kl is not None:
            text = (
                f"KL to dense attention is {task.kl:.4g} nats a token, the limit is "
                f"{self.max_kl:g} (--max-kl)"
            )
            losses.append((task.kl / self.max_kl, True, text))
        if self.max_perplexity is not None and task.perplexity_ratio is not None:
            rise = task.perplexity_ratio - 1
            text = (
                f"perplexity rises by {rise:.2%}, the limit is {self.max_perplexity:.2%} "
                "(--max-perplexity)"
            )
            losses.append((rise / self.max_perplexity, True, text))
        if self.max_nll is not None and task.nll_rise is not None and task.nll_rise_low is not None:
            text = (
                f"-log p of the right answer rises by {task.nll_rise:.3f} nats a token "
                f"({task.nll_rise_low:.3f} to {task.nll_rise_high:.3f}), the limit is "
                f"{self.max_nll:g} (--max-nll)"
            )
            losses.append((task.nll_rise / self.max_nll, not task.nll_rise_low <= 0, text))
        # Near a tie answers turn both ways, so answers won offset answers lost.
        if self.max_lost is not None and task.fewer_low is not None and task.net_lost > 1:
            text = (
                f"of {task.dense_right} correct answers {task.lost} are lost, and {task.won} "
                f"others are won: {task.fewer:.0%} fewer ({task.fewer_low:.0%} to "
                f"{task.fewer_high:.0%}), the limit is {self.max_lost:.0%} (--max-lost)"
            )
            losses.append((task.fewer / self.max_lost, task.fewer_low > 0, text))
        return losses
