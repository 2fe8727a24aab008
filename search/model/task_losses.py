"""What patterns lose against dense attention, task by task, and limits on it; the worst task decides.

Shapes: A answers of a task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from artifacts import HeadwiseError
from profiling.evaluation.intervals import bootstrap
from profiling.quality.sequences import Losses, TokenSequence

MAX_KL, MAX_PERPLEXITY, MAX_NLL, MAX_LOST = 0.05, 0.03, 0.1, 0.1
# With fewer answers that dense attention gets right, a loss of one in five goes unseen more often than once in twenty.
ENOUGH = 14


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What each task may lose at most; None: no limit.

    kl: mean nats a token to dense attention. perplexity: rise over dense attention's, of text. nll: rise of -log p of
    the right answer, nats for each of its tokens. lost: share of the answers that dense attention gets right by which
    the patterns get fewer right, those that they win counted; one answer alone fails nothing.
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
        """How many times its limit of KL or perplexity the worst task has: these two go smoothly with the budget."""
        kl = [task.kl / self.kl for task in tasks if self.kl is not None]
        rises = [task.perplexity - 1 for task in tasks if task.perplexity is not None]
        return max([0.0, *kl, *(rise / self.perplexity for rise in rises if self.perplexity is not None)])

    def _faults(self, task: TaskLoss) -> list[tuple[float, str]]:
        """(how many times the limit, why)."""
        found = []
        if self.kl is not None and not task.kl <= self.kl:
            said = f"KL to dense attention is {task.kl:.4f} nats a token, the limit (--max-kl) is {self.kl:g}"
            found.append((task.kl / self.kl, said))
        if self.perplexity is not None and task.perplexity is not None and not task.perplexity - 1 <= self.perplexity:
            rise = task.perplexity - 1
            said = f"perplexity rises by {rise:.2%}, the limit (--max-perplexity) is {self.perplexity:.2%}"
            found.append((rise / self.perplexity, said))
        # A rise that its interval does not tell from none is no finding.
        if self.nll is not None and task.nll is not None and not task.nll <= self.nll and not task.nll_low <= 0:
            said = (
                f"-log p of the right answer rises by {task.nll:.3f} nats a token "
                f"({task.nll_low:.3f} to {task.nll_high:.3f}), the limit (--max-nll) is {self.nll:g}"
            )
            found.append((task.nll / self.nll, said))
        # Near a tie answers turn both ways: those that are won stand against those that are lost.
        fewer = task.lost - task.won
        if self.lost is not None and fewer > 1 and not fewer <= self.lost * task.dense_right:
            said = (
                f"{task.lost} of {task.dense_right} answers that dense attention gets right are lost and {task.won} of "
                f"the others won, the limit (--max-lost) is {self.lost:.0%} fewer"
            )
            found.append((fewer / task.dense_right / self.lost, said))
        return [(times, f"{task.task}: {said}") for times, said in found]


@dataclass(frozen=True, kw_only=True)
class TaskLoss:
    """What one task's sequences lose against dense attention.

    kl: mean over the sequences. perplexity: over dense attention's, of text; None where answers are asked for. nll:
    mean rise of -log p of the answers, nats a token, with its 95% interval; None without answers. answers: how many.
    dense_right, lost, won: answers that dense attention gets right; of these those that go wrong; those it gets wrong
    and the patterns get right.
    """

    task: str
    sequences: int
    kl: float
    perplexity: float | None
    nll: float | None
    nll_low: float
    nll_high: float
    answers: int
    dense_right: int
    lost: int
    won: int

    @property
    def loss(self) -> float:
        """In nats a token: the KL, and the rise of the answers' loss where there is one."""
        return self.kl + max(0.0, self.nll or 0.0)

    def line(self) -> str:
        """For people."""
        said = f"{self.task:<28} KL {self.kl:.4f}"
        if self.perplexity is not None:
            return f"{said}  perplexity {self.perplexity - 1:+.2%}"
        few = "" if self.dense_right >= ENOUGH else "  (too few to see a loss of one in five)"
        rise = f"-log p {self.nll:+.3f} ({self.nll_low:+.3f} to {self.nll_high:+.3f})"
        wrong = self.answers - self.dense_right
        return f"{said}  answers lost {self.lost} of {self.dense_right}, won {self.won} of {wrong}, {rise}{few}"


def by_task(found: Sequence[TokenSequence], losses: Sequence[Losses]) -> list[TaskLoss]:
    """The losses of some sequences by task, in the order of each task's first."""
    tasks: dict[str, list[tuple[TokenSequence, Losses]]] = {}
    for one, loss in zip(found, losses, strict=True):
        tasks.setdefault(one.task, []).append((one, loss))
    return [_task(task, [loss for _, loss in each]) for task, each in tasks.items()]


def _task(task: str, losses: Sequence[Losses]) -> TaskLoss:
    """Sequences are the unit of what is claimed; where there are fewer than four, their answers are."""
    kl = [float(np.concatenate([one.kl, np.repeat(one.answer_kl, one.answer_tokens)]).mean()) for one in losses]
    answers = sum(len(one.right) for one in losses)
    text = [float((one.nll - one.dense_nll).mean()) for one in losses if not len(one.right)]
    rises = [(one.answer_nll - one.answer_dense_nll, one.answer_tokens) for one in losses if len(one.right)]
    nll, low, high = None, 0.0, 0.0
    if rises:
        units = [rise.sum() / tokens.sum() for rise, tokens in rises]
        if len(units) < 4:
            units = [value for rise, tokens in rises for value in rise / tokens]
        nll = float(sum(rise.sum() for rise, _ in rises) / sum(tokens.sum() for _, tokens in rises))
        interval = bootstrap(units)
        low, high = interval.low, interval.high
    dense_right = sum(int(one.dense_right.sum()) for one in losses)
    return TaskLoss(
        task=task,
        sequences=len(losses),
        kl=float(np.mean(kl)),
        perplexity=exp(float(np.mean(text))) if text else None,
        nll=nll,
        nll_low=low,
        nll_high=high,
        answers=answers,
        dense_right=dense_right,
        lost=sum(int((one.dense_right & ~one.right).sum()) for one in losses),
        won=sum(int((~one.dense_right & one.right).sum()) for one in losses),
    )


def mean_kl(tasks: Sequence[TaskLoss]) -> float:
    """Over the tasks, nats a token."""
    return float(np.mean([task.kl for task in tasks]))


def lost_answers(tasks: Sequence[TaskLoss]) -> Mapping[str, int]:
    """Over the tasks: answers that dense attention gets right, and those of them that are lost."""
    return {"dense_right": sum(task.dense_right for task in tasks), "lost": sum(task.lost for task in tasks)}
