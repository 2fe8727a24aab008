"""What patterns lose against dense attention, by task and over all answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil, exp

import numpy as np

from artifacts import TaskFigures, Verdict
from artifacts.errors import plural
from profiling.evaluation.intervals import share_of
from profiling.quality.sequences import Losses, TokenSequence

# With fewer answers that dense attention gets right, in four contexts, a loss of one in five is
# often not seen.
ENOUGH = 72
# An interval of what answers lose takes so many contexts. Answers of one are alike, and say nothing
# of other contexts.
CONTEXTS = 4
# All answers of all tasks together.
POOL = "all answers"


@dataclass(frozen=True, kw_only=True)
class ContextLoss:
    """What one sequence loses.

    digest: of the sequence. text: mean rise of -log p of its tokens; None where answers are asked
    for. rise, tokens: of its answers' -log p in all, and how many tokens they have. answers,
    dense_right, lost, won: as TaskLoss has them."""

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
    """What one task's sequences lose against dense attention: the numbers of an artifact's
    TaskFigures.

    task: its name; where its answers are of several kinds, one of them after a slash. kl: mean over
    the sequences. perplexity_ratio: over dense attention's, of text; None where answers are asked
    for. nll_rise: mean rise of -log p of the answers, nats a token, None without answers. answers:
    how many. dense_right, lost, won: answers that dense attention gets right; of these those that
    go wrong; those it gets wrong and the patterns get right. nll_rise_low, nll_rise_high,
    fewer_low, fewer_high: the 95% intervals of `nll_rise` and `fewer` over contexts; None with
    fewer than four. contexts: what each sequence loses."""

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
        rises = [one.rise for one in asked]
        tokens = [one.tokens for one in asked]
        fewer = [float(one.lost - one.won) for one in asked]
        right = [float(one.dense_right) for one in asked]
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
    def dense_accuracy(self) -> float:
        """Of dense attention, over all answers."""
        return self.dense_right / max(1, self.answers)

    @property
    def accuracy(self) -> float:
        """With the patterns."""
        return (self.dense_right - self.lost + self.won) / max(1, self.answers)

    @property
    def loss(self) -> float:
        """In nats a token: the KL, and the rise of the answers' loss where there is one."""
        return self.kl + max(0.0, self.nll_rise or 0.0)

    def times(self, factor: float) -> TaskLoss:
        """With so many times the KL and the rises; which answers are lost cannot be foreseen, and
        stays."""

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
    """All answers of tasks together, where several have some: one task's may be too few for a loss
    to show.

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
        contexts.append(
            replace(
                parts[0], **{name: sum(getattr(one, name) for one in parts) for name in counted}
            )
        )
    return [TaskLoss.of(POOL, contexts)]


def line(task: TaskLoss) -> str:
    """A task's losses, for people."""
    said = f"{task.task:<26} KL {task.kl:.4f}"
    if task.perplexity_ratio is not None:
        said += f"  perplexity {task.perplexity_ratio - 1:+.2%}"
    if not task.answers:
        return said
    said += (
        f"  accuracy dense {task.dense_accuracy:.2f}, artifact "
        f"{task.accuracy:.2f} of {task.answers} questions"
    )
    if (interval := _interval(task)) is not None:
        said += f", {0 - task.fewer:+.0%} ({interval})"
    if task.nll_rise is not None:
        said += f", -log p {task.nll_rise:+.3f}"
    if task.nll_rise_low is None:
        return f"{said}  (not tested: answers take {CONTEXTS} contexts, got {task.prompts})"
    said += f" ({task.nll_rise_low:+.3f} to {task.nll_rise_high:+.3f})"
    return f"{said}  (too few to see a loss of one in five)" if _too_few(task) else said


def verdict(tasks: Sequence[TaskLoss]) -> Verdict:
    """Whether a loss of one in five answers would show, in one task's or in those of all
    together."""
    asked = _asked(tasks)
    if not asked:
        return Verdict(proven=True, why="text alone, no answers were asked for")
    most = _most_right(asked)
    why = f"{plural(most.dense_right, 'right answer')} of {plural(most.prompts, 'context')}"
    return Verdict(proven=not all(map(_too_few, asked)), why=why)


def remedy(tasks: Sequence[TaskLoss], samples: int) -> str:
    """How to have answers enough. samples: what --samples was."""
    most = _most_right(_asked(tasks))
    if not most.dense_right:
        return (
            "dense attention gets none right: take a --task that it can "
            "answer, or a shorter --length"
        )
    if most.prompts < CONTEXTS:
        return f"a longer file would give the {CONTEXTS} contexts that answers take"
    return f"--samples {samples * ceil(ENOUGH / most.dense_right)} would see a loss of one in five"


def summary(tasks: Sequence[TaskLoss]) -> str:
    """What tasks that passed the gate have shown, in a few words."""
    asked = _asked(tasks)
    if not asked:
        worst = max(task.perplexity_ratio or 1.0 for task in tasks)
        return f"text holds (perplexity {worst - 1:+.2%})"
    return f"answers hold ({_interval(_most_right(asked))})"


def _asked(tasks: Sequence[TaskLoss]) -> list[TaskLoss]:
    """Tasks with answers, and all answers together."""
    return [task for task in (*tasks, *pooled(tasks)) if task.answers]


def _most_right(asked: Sequence[TaskLoss]) -> TaskLoss:
    return max(asked, key=lambda task: task.dense_right)


def _too_few(task: TaskLoss) -> bool:
    """Whether a loss of one in five would often not be seen."""
    return task.nll_rise_low is None or task.dense_right < ENOUGH


def _interval(task: TaskLoss) -> str | None:
    """The 95% interval of the change in right answers, as a share of dense attention's."""
    if not task.dense_right or task.fewer_low is None or task.fewer_high is None:
        return None
    # 0 - x, so that no change is +0%.
    return f"95% interval {0 - task.fewer_high:+.0%} to {0 - task.fewer_low:+.0%}"


def mean_kl(tasks: Sequence[TaskLoss]) -> float:
    """Over the sets of prompts, nats a token: kinds of answers of the same prompts have one KL,
    which counts once."""
    sets = {tuple(one.digest for one in task.contexts): task.kl for task in tasks}
    return float(np.mean(list(sets.values())))


def lost_answers(tasks: Sequence[TaskLoss]) -> Mapping[str, int]:
    """Over the tasks: answers that dense attention gets right, and those of them that are lost."""
    return {
        "dense_right": sum(task.dense_right for task in tasks),
        "lost": sum(task.lost for task in tasks),
    }
