"""What patterns lose against dense attention, task by task, and limits on it; the worst task decides.

Shapes: A answers of a task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Any

import numpy as np

from artifacts import HeadwiseError
from profiling.evaluation.intervals import share_of
from profiling.quality.sequences import Losses, TokenSequence

MAX_KL, MAX_PERPLEXITY, MAX_NLL, MAX_LOST = 0.05, 0.03, 0.1, 0.1
# With fewer answers that dense attention gets right, in four contexts, a loss of one in five is often not seen.
ENOUGH = 72
# An interval of what answers lose takes so many contexts. Answers of one are alike, and tell nothing of other contexts.
CONTEXTS = 4


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What each task may lose at most; None: no limit.

    kl: mean nats a token to dense attention. perplexity: rise over dense attention's, of text. nll: rise of -log p of
    the right answer, nats for each of its tokens. lost: share of the answers that dense attention gets right by which
    the patterns get fewer right, those that they win counted; one answer alone fails nothing. A rise or a share that
    has no interval, or that its interval does not tell from none, fails nothing either.
    """

    kl: float | None = MAX_KL
    perplexity: float | None = MAX_PERPLEXITY
    nll: float | None = MAX_NLL
    lost: float | None = MAX_LOST

    def __post_init__(self) -> None:
        for name in ("kl", "perplexity", "nll", "lost"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise HeadwiseError(f"--max-{name} must be above 0, got {value}")

    def fault(self, tasks: Sequence[TaskLoss]) -> str | None:
        """Why the tasks lose too much, the worst of them; None where none does."""
        faults = [fault for task in tasks for fault in self._faults(task)]
        return max(faults)[1] if faults else None

    def strain(self, tasks: Sequence[TaskLoss]) -> float:
        """How many times a limit the worst task has, by what would be a finding above it; 0 without limits."""
        return max([times for task in tasks for times, sure, _ in self._measured(task) if sure], default=0.0)

    def _faults(self, task: TaskLoss) -> list[tuple[float, str]]:
        """(how many times the limit, why)."""
        found = []
        for times, sure, said in self._measured(task):
            # `not <=` so that NaN fails.
            if not times <= 1 and sure:
                found.append((times, f"{task.task}: {said}"))
        return found

    def _measured(self, task: TaskLoss) -> list[tuple[float, bool, str]]:
        """(how many times the limit, whether that is a finding if it is above it, in words) of all that is limited."""
        found = []
        if self.kl is not None:
            said = f"KL to dense attention is {task.kl:.4g} nats a token, the limit (--max-kl) is {self.kl:g}"
            found.append((task.kl / self.kl, True, said))
        if self.perplexity is not None and task.perplexity is not None:
            rise = task.perplexity - 1
            said = f"perplexity rises by {rise:.2%}, the limit (--max-perplexity) is {self.perplexity:.2%}"
            found.append((rise / self.perplexity, True, said))
        if self.nll is not None and task.nll is not None and task.nll_low is not None:
            said = (
                f"-log p of the right answer rises by {task.nll:.3f} nats a token "
                f"({task.nll_low:.3f} to {task.nll_high:.3f}), the limit (--max-nll) is {self.nll:g}"
            )
            found.append((task.nll / self.nll, not task.nll_low <= 0, said))
        # Near a tie answers turn both ways: those that are won stand against those that are lost.
        if self.lost is not None and task.lost - task.won > 1 and task.fewer_low is not None:
            said = (
                f"{task.lost} of {task.dense_right} answers that dense attention gets right are lost and {task.won} of "
                f"the others won, {task.fewer:.0%} fewer ({task.fewer_low:.0%} to {task.fewer_high:.0%}), the limit "
                f"(--max-lost) is {self.lost:.0%}"
            )
            found.append((task.fewer / self.lost, task.fewer_low > 0, said))
        return found


@dataclass(frozen=True, kw_only=True)
class TaskLoss:
    """What one task's sequences lose against dense attention.

    task: its name; where its answers are of several kinds, one of them after a slash. kl: mean over the sequences.
    perplexity: over dense attention's, of text; None where answers are asked for. nll: mean rise of -log p of the
    answers, nats a token, None without answers. answers: how many. dense_right, lost, won: answers that dense attention
    gets right; of these those that go wrong; those it gets wrong and the patterns get right. nll_low, nll_high,
    fewer_low, fewer_high: the 95% intervals of `nll` and `fewer` over contexts; None with fewer than four.
    """

    task: str
    sequences: int
    kl: float
    perplexity: float | None
    nll: float | None
    nll_low: float | None
    nll_high: float | None
    answers: int
    dense_right: int
    lost: int
    won: int
    fewer_low: float | None = None
    fewer_high: float | None = None

    @property
    def fewer(self) -> float:
        """By which share of dense attention's right answers the patterns get fewer right."""
        return (self.lost - self.won) / max(1, self.dense_right)

    @property
    def loss(self) -> float:
        """In nats a token: the KL, and the rise of the answers' loss where there is one."""
        return self.kl + max(0.0, self.nll or 0.0)

    def times(self, factor: float) -> TaskLoss:
        """With so many times the KL and the rises; answers are not foretold."""
        rises = {name: getattr(self, name) for name in ("kl", "nll", "nll_low", "nll_high")}
        more: dict[str, Any] = {name: None if rise is None else factor * rise for name, rise in rises.items()}
        perplexity = None if self.perplexity is None else 1 + factor * (self.perplexity - 1)
        return replace(self, **more, perplexity=perplexity)

    def line(self) -> str:
        """For people."""
        said = f"{self.task:<28} KL {self.kl:.4f}"
        if self.perplexity is not None:
            return f"{said}  perplexity {self.perplexity - 1:+.2%}"
        wrong = self.answers - self.dense_right
        said = f"{said}  answers lost {self.lost} of {self.dense_right}, won {self.won} of {wrong}"
        if self.nll_low is None:
            few = f"(not judged: answers take {CONTEXTS} contexts, got {self.sequences})"
            return f"{said}, -log p {self.nll:+.3f}  {few}"
        few = "" if self.dense_right >= ENOUGH else "  (too few to see a loss of one in five)"
        share = f", {self.fewer:+.0%} ({self.fewer_low:+.0%} to {self.fewer_high:+.0%})" if self.dense_right else ""
        return f"{said}{share}, -log p {self.nll:+.3f} ({self.nll_low:+.3f} to {self.nll_high:+.3f}){few}"


def by_task(found: Sequence[TokenSequence], losses: Sequence[Losses]) -> list[TaskLoss]:
    """The losses of some sequences by task and kind of answer, in the order of each one's first."""
    tasks: dict[str, list[Losses]] = {}
    for one, loss in zip(found, losses, strict=True):
        for label in dict.fromkeys(one.labels):
            own = np.array([other == label for other in one.labels])
            tasks.setdefault(f"{one.task}/{label}", []).append(loss.of(own))
        if not one.labels:
            tasks.setdefault(one.task, []).append(loss)
    return [_task(task, each) for task, each in tasks.items()]


def _task(task: str, losses: Sequence[Losses]) -> TaskLoss:
    """Contexts are the unit of what is claimed of answers; of fewer than four nothing is."""
    kl = [float(one.kl.mean()) for one in losses]
    text = [float((one.nll - one.dense_nll).mean()) for one in losses if not len(one.right)]
    asked = [one for one in losses if len(one.right)]
    # Of each context: the rise of -log p and its tokens; answers lost, less those won, and those right under dense.
    rises = [float((one.answer_nll - one.answer_dense_nll).sum()) for one in asked]
    tokens = [float(one.answer_tokens.sum()) for one in asked]
    fewer = [float(one.dense_right.sum() - one.right.sum()) for one in asked]
    right = [float(one.dense_right.sum()) for one in asked]
    enough = len(asked) >= CONTEXTS
    risen, lost = (share_of(rises, tokens), share_of(fewer, right)) if enough else (None, None)
    return TaskLoss(
        task=task,
        sequences=len(losses),
        kl=float(np.mean(kl)),
        perplexity=exp(float(np.mean(text))) if text else None,
        nll=sum(rises) / sum(tokens) if asked else None,
        nll_low=risen.low if risen else None,
        nll_high=risen.high if risen else None,
        answers=sum(len(one.right) for one in losses),
        dense_right=sum(int(one.dense_right.sum()) for one in losses),
        lost=sum(int((one.dense_right & ~one.right).sum()) for one in losses),
        won=sum(int((~one.dense_right & one.right).sum()) for one in losses),
        fewer_low=lost.low if lost else None,
        fewer_high=lost.high if lost else None,
    )


def mean_kl(tasks: Sequence[TaskLoss]) -> float:
    """Over the tasks, nats a token."""
    return float(np.mean([task.kl for task in tasks]))


def lost_answers(tasks: Sequence[TaskLoss]) -> Mapping[str, int]:
    """Over the tasks: answers that dense attention gets right, and those of them that are lost."""
    return {"dense_right": sum(task.dense_right for task in tasks), "lost": sum(task.lost for task in tasks)}
