"""What patterns lose against dense attention, by task and over all answers, and limits on it; the worst decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import exp

import numpy as np

from artifacts import HeadwiseError, TaskFigures
from profiling.evaluation.intervals import share_of
from profiling.quality.sequences import Losses, TokenSequence

MAX_KL, MAX_PERPLEXITY, MAX_NLL, MAX_LOST = 0.05, 0.03, 0.1, 0.1
# With fewer answers that dense attention gets right, in four contexts, a loss of one in five is often not seen.
ENOUGH = 72
# An interval of what answers lose takes so many contexts. Answers of one are alike, and tell nothing of other contexts.
CONTEXTS = 4
# All answers of all tasks together.
POOL = "all answers"


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
        """Why the tasks lose too much, the worst of them or all answers together; None where none does."""
        faults = [fault for task in (*tasks, *pooled(tasks)) for fault in self._faults(task)]
        return max(faults)[1] if faults else None

    def strain(self, tasks: Sequence[TaskLoss]) -> float:
        """How many times a limit the worst task has, by what would be a finding above it; 0 without limits."""
        every = (*tasks, *pooled(tasks))
        return max([times for task in every for times, sure, _ in self._measured(task) if sure], default=0.0)

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
        if self.perplexity is not None and task.perplexity_ratio is not None:
            rise = task.perplexity_ratio - 1
            said = f"perplexity rises by {rise:.2%}, the limit (--max-perplexity) is {self.perplexity:.2%}"
            found.append((rise / self.perplexity, True, said))
        if self.nll is not None and task.nll_rise is not None and task.nll_rise_low is not None:
            said = (
                f"-log p of the right answer rises by {task.nll_rise:.3f} nats a token "
                f"({task.nll_rise_low:.3f} to {task.nll_rise_high:.3f}), the limit (--max-nll) is {self.nll:g}"
            )
            found.append((task.nll_rise / self.nll, not task.nll_rise_low <= 0, said))
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
class ContextLoss:
    """What one sequence loses.

    digest: of the sequence. text: mean rise of -log p of its tokens; None where answers are asked for. rise, tokens: of
    its answers' -log p in all, and how many tokens they have. answers, dense_right, lost, won: as TaskLoss has them.
    """

    digest: str
    kl: float
    text: float | None = None
    rise: float = 0.0
    tokens: float = 0.0
    answers: int = 0
    dense_right: int = 0
    lost: int = 0
    won: int = 0

    @classmethod
    def of(cls, one: TokenSequence, found: Losses) -> ContextLoss:
        """Of a sequence, or of some of its answers."""
        return cls(
            digest=one.digest,
            kl=float(found.kl.mean()),
            text=None if len(found.right) else float((found.nll - found.dense_nll).mean()),
            rise=float((found.answer_nll - found.answer_dense_nll).sum()),
            tokens=float(found.answer_tokens.sum()),
            answers=len(found.right),
            dense_right=int(found.dense_right.sum()),
            lost=int((found.dense_right & ~found.right).sum()),
            won=int((~found.dense_right & found.right).sum()),
        )


@dataclass(frozen=True, kw_only=True)
class TaskLoss:
    """What one task's sequences lose against dense attention: the numbers of an artifact's TaskFigures.

    task: its name; where its answers are of several kinds, one of them after a slash. kl: mean over the sequences.
    perplexity_ratio: over dense attention's, of text; None where answers are asked for. nll_rise: mean rise of -log p
    of the answers, nats a token, None without answers. answers: how many. dense_right, lost, won: answers that dense
    attention gets right; of these those that go wrong; those it gets wrong and the patterns get right. nll_rise_low,
    nll_rise_high, fewer_low, fewer_high: the 95% intervals of `nll_rise` and `fewer` over contexts; None with fewer
    than four. contexts: what each sequence loses.
    """

    task: str
    prompts: int
    kl: float
    perplexity_ratio: float | None
    nll_rise: float | None
    nll_rise_low: float | None
    nll_rise_high: float | None
    answers: int
    dense_right: int
    lost: int
    won: int
    fewer_low: float | None = None
    fewer_high: float | None = None
    contexts: tuple[ContextLoss, ...] = ()

    @classmethod
    def of(cls, task: str, contexts: Sequence[ContextLoss]) -> TaskLoss:
        """Contexts are the unit of what is claimed of answers; of fewer than four nothing is."""
        text = [one.text for one in contexts if one.text is not None]
        asked = [one for one in contexts if one.answers]
        rises, tokens = [one.rise for one in asked], [one.tokens for one in asked]
        fewer, right = [float(one.lost - one.won) for one in asked], [float(one.dense_right) for one in asked]
        enough = len(asked) >= CONTEXTS
        risen, lost = (share_of(rises, tokens), share_of(fewer, right)) if enough else (None, None)
        return cls(
            task=task,
            prompts=len(contexts),
            kl=float(np.mean([one.kl for one in contexts])),
            perplexity_ratio=exp(float(np.mean(text))) if text else None,
            nll_rise=sum(rises) / sum(tokens) if asked else None,
            nll_rise_low=risen.low if risen else None,
            nll_rise_high=risen.high if risen else None,
            answers=sum(one.answers for one in contexts),
            dense_right=sum(one.dense_right for one in contexts),
            lost=sum(one.lost for one in contexts),
            won=sum(one.won for one in contexts),
            fewer_low=lost.low if lost else None,
            fewer_high=lost.high if lost else None,
            contexts=tuple(contexts),
        )

    @property
    def fewer(self) -> float:
        """By which share of dense attention's right answers the patterns get fewer right."""
        return (self.lost - self.won) / max(1, self.dense_right)

    @property
    def loss(self) -> float:
        """In nats a token: the KL, and the rise of the answers' loss where there is one."""
        return self.kl + max(0.0, self.nll_rise or 0.0)

    def times(self, factor: float) -> TaskLoss:
        """With so many times the KL and the rises; which answers are lost cannot be foreseen, and stays."""

        def more(one: ContextLoss) -> ContextLoss:
            text = None if one.text is None else factor * one.text
            return replace(one, kl=factor * one.kl, text=text, rise=factor * one.rise)

        return TaskLoss.of(self.task, [more(one) for one in self.contexts])

    def figures(self, length: int) -> TaskFigures:
        """As an artifact has them. length: of the prompts, in tokens."""
        known = {name: getattr(self, name) for name in TaskFigures.model_fields if name != "length"}
        if not self.answers:
            known |= dict.fromkeys(("answers", "dense_right", "lost", "won"))
        return TaskFigures(**known, length=length)


def by_task(found: Sequence[TokenSequence], losses: Sequence[Losses]) -> list[TaskLoss]:
    """The losses of some sequences by task and kind of answer, in the order of each one's first."""
    tasks: dict[str, list[ContextLoss]] = {}
    for one, loss in zip(found, losses, strict=True):
        for label in dict.fromkeys(one.labels):
            own = np.array([other == label for other in one.labels])
            tasks.setdefault(f"{one.task}/{label}", []).append(ContextLoss.of(one, loss.of(own)))
        if not one.labels:
            tasks.setdefault(one.task, []).append(ContextLoss.of(one, loss))
    return [TaskLoss.of(task, each) for task, each in tasks.items()]


def pooled(tasks: Sequence[TaskLoss]) -> list[TaskLoss]:
    """All answers of tasks together, where several have some: one task's may be too few for a loss to show.

    Answers of one context, of whatever kinds, are one unit of the interval.
    """
    asked = [task for task in tasks if any(one.answers for one in task.contexts)]
    if len(asked) < 2:
        return []
    every = sorted((one for task in asked for one in task.contexts), key=lambda one: one.digest)
    contexts = []
    for _, group in groupby(every, key=lambda one: one.digest):
        parts = list(group)
        counted = ("rise", "tokens", "answers", "dense_right", "lost", "won")
        contexts.append(replace(parts[0], **{name: sum(getattr(one, name) for one in parts) for name in counted}))
    return [TaskLoss.of(POOL, contexts)]


def line(task: TaskLoss | TaskFigures) -> str:
    """A task's losses, for people."""
    said = f"{task.task:<26} KL {task.kl:.4f}"
    if task.perplexity_ratio is not None:
        said += f"  perplexity {task.perplexity_ratio - 1:+.2%}"
    if not task.dense_right and not task.answers:
        return said
    lost, won, right = task.lost or 0, task.won or 0, task.dense_right or 0
    said += f"  answers lost {lost} of {right}, won {won}"
    if right and task.fewer_low is not None:
        said += f", {(lost - won) / right:+.0%} fewer ({task.fewer_low:+.0%} to {task.fewer_high:+.0%})"
    if task.nll_rise is not None:
        said += f", -log p {task.nll_rise:+.3f}"
    if task.nll_rise_low is None:
        return f"{said}  (not tested: answers take {CONTEXTS} contexts, got {task.prompts})"
    said += f" ({task.nll_rise_low:+.3f} to {task.nll_rise_high:+.3f})"
    return said if right >= ENOUGH else f"{said}  (too few to see a loss of one in five)"


def mean_kl(tasks: Sequence[TaskLoss]) -> float:
    """Over the sets of prompts, nats a token: kinds of answers of the same prompts have one KL, which counts once."""
    sets = {tuple(one.digest for one in task.contexts): task.kl for task in tasks}
    return float(np.mean(list(sets.values())))


def lost_answers(tasks: Sequence[TaskLoss]) -> Mapping[str, int]:
    """Over the tasks: answers that dense attention gets right, and those of them that are lost."""
    return {"dense_right": sum(task.dense_right for task in tasks), "lost": sum(task.lost for task in tasks)}
