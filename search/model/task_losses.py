"""Losses of patterns against dense attention, by task and over all answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil, exp
from operator import attrgetter

import numpy as np

from artifacts import TaskFigures, Verdict
from artifacts.errors import plural
from profiling.evaluation.intervals import share_of
from profiling.quality.sequences import Losses, TokenSequence

# With fewer answers that dense attention gets right, in four contexts, a loss of one in five is
# often not seen.
ENOUGH = 72
# Contexts that an interval of lost answers takes. Answers of one context are alike, and say nothing
# of other contexts.
CONTEXTS = 4
# The name of all answers of all tasks together.
POOL = "all answers"


@dataclass(frozen=True, kw_only=True)
class ContextLoss:
    """Losses of one sequence.

    Attributes:
        digest: of the sequence.
        text: mean rise of -log p of its tokens; None where answers are asked for.
        rise, tokens: of its answers' -log p in all, and their number of tokens.
        answers, dense_right, lost, won: as in TaskLoss.
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
    def of(cls, sequence: TokenSequence, losses: Losses) -> ContextLoss:
        """Of a sequence, or of some of its answers."""
        text = None
        if not len(losses.right):
            text = float((losses.nll - losses.dense_nll).mean())
        return cls(
            digest=sequence.digest,
            kl=float(losses.kl.mean()),
            text=text,
            rise=float((losses.answer_nll - losses.answer_dense_nll).sum()),
            tokens=float(losses.answer_tokens.sum()),
            answers=len(losses.right),
            dense_right=int(losses.dense_right.sum()),
            lost=int((losses.dense_right & ~losses.right).sum()),
            won=int((~losses.dense_right & losses.right).sum()),
        )


@dataclass(frozen=True, kw_only=True)
class TaskLoss:
    """Losses of one task's sequences against dense attention, as an artifact's TaskFigures.

    Attributes:
        task: its name; where its answers are of several kinds, one of them after a slash.
        kl: mean over the sequences.
        perplexity_ratio: to dense attention's, of text; None where answers are asked for.
        nll_rise: mean rise of -log p of the answers, nats a token, None without answers.
        answers: how many.
        dense_right, lost, won: answers that dense attention gets right; those of them that the
            patterns get wrong; those that only the patterns get right.
        nll_rise_low, nll_rise_high, fewer_low, fewer_high: the 95% intervals of `nll_rise` and
            `fewer` over contexts; None with fewer than four.
        contexts: losses of each sequence.
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
        """Of a task's contexts, the units of the intervals; there are none with fewer than four."""
        loss = cls(
            task=task,
            prompts=len(contexts),
            kl=float(np.mean([context.kl for context in contexts])),
            perplexity_ratio=None,
            nll_rise=None,
            nll_rise_low=None,
            nll_rise_high=None,
            answers=sum(context.answers for context in contexts),
            dense_right=sum(context.dense_right for context in contexts),
            lost=sum(context.lost for context in contexts),
            won=sum(context.won for context in contexts),
            contexts=tuple(contexts),
        )
        text = [context.text for context in contexts if context.text is not None]
        if text:
            loss = replace(loss, perplexity_ratio=exp(float(np.mean(text))))
        answered = [context for context in contexts if context.answers]
        rises = [context.rise for context in answered]
        tokens = [context.tokens for context in answered]
        if answered:
            loss = replace(loss, nll_rise=sum(rises) / sum(tokens))
        if len(answered) < CONTEXTS:
            return loss
        rise = share_of(rises, tokens)
        fewer = share_of(
            [float(context.lost - context.won) for context in answered],
            [float(context.dense_right) for context in answered],
        )
        return replace(
            loss,
            nll_rise_low=rise.low,
            nll_rise_high=rise.high,
            fewer_low=fewer.low,
            fewer_high=fewer.high,
        )

    @property
    def fewer(self) -> float:
        """Right answers lost, less those won, relative to dense attention's right ones."""
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

    def figures(self, length: int) -> TaskFigures:
        """As an artifact has them.

        Args:
            length: of the prompts, in tokens.
        """
        figures = {
            name: getattr(self, name) for name in TaskFigures.model_fields if name != "length"
        }
        if not self.answers:
            figures |= dict.fromkeys(("answers", "dense_right", "lost", "won"))
        return TaskFigures(**figures, length=length)


def by_task(sequences: Sequence[TokenSequence], losses: Sequence[Losses]) -> list[TaskLoss]:
    """The losses of sequences by task and kind of answer, in the order of each one's first."""
    tasks: dict[str, list[ContextLoss]] = {}
    for sequence, loss in zip(sequences, losses, strict=True):
        for label in dict.fromkeys(sequence.labels):
            is_label = np.array([each == label for each in sequence.labels])
            context = ContextLoss.of(sequence, loss.of(is_label))
            tasks.setdefault(f"{sequence.task}/{label}", []).append(context)
        if not sequence.labels:
            tasks.setdefault(sequence.task, []).append(ContextLoss.of(sequence, loss))
    return [TaskLoss.of(task, contexts) for task, contexts in tasks.items()]


def pooled(tasks: Sequence[TaskLoss]) -> list[TaskLoss]:
    """All answers of tasks together, if several tasks have some; else nothing.

    One task's answers may be too few for a loss to show. Answers of one context, of whatever kinds,
    are one unit of the interval.
    """
    with_answers = [task for task in tasks if any(each.answers for each in task.contexts)]
    if len(with_answers) < 2:
        return []
    contexts = sorted(
        (context for task in with_answers for context in task.contexts),
        key=attrgetter("digest"),
    )
    joined = []
    for _, group in groupby(contexts, key=attrgetter("digest")):
        parts = list(group)
        sums = {
            name: sum(getattr(part, name) for part in parts)
            for name in ("rise", "tokens", "answers", "dense_right", "lost", "won")
        }
        joined.append(replace(parts[0], **sums))
    return [TaskLoss.of(POOL, joined)]


def line(task: TaskLoss) -> str:
    """A task's losses, for people."""
    text = f"{task.task:<26} KL {task.kl:.4f}"
    if task.perplexity_ratio is not None:
        text += f"  perplexity {task.perplexity_ratio - 1:+.2%}"
    if not task.answers:
        return text
    text += (
        f"  accuracy dense {task.dense_accuracy:.2f}, artifact {task.accuracy:.2f} of "
        f"{task.answers} questions"
    )
    interval = _interval(task)
    if interval is not None:
        text += f", {0 - task.fewer:+.0%} ({interval})"
    if task.nll_rise is not None:
        text += f", -log p {task.nll_rise:+.3f}"
    if task.nll_rise_low is None:
        return f"{text}  (not tested: answers take {CONTEXTS} contexts, got {task.prompts})"
    text += f" ({task.nll_rise_low:+.3f} to {task.nll_rise_high:+.3f})"
    if _too_few(task):
        text += "  (too few to see a loss of one in five)"
    return text


def verdict(tasks: Sequence[TaskLoss]) -> Verdict:
    """Proven if a loss of one in five answers would show in a task, or in all answers together."""
    answered = _answered(tasks)
    if not answered:
        return Verdict(proven=True, why="text alone, no answers were asked for")
    largest = _most_right(answered)
    why = f"{plural(largest.dense_right, 'right answer')} of {plural(largest.prompts, 'context')}"
    return Verdict(proven=not all(map(_too_few, answered)), why=why)


def remedy(tasks: Sequence[TaskLoss], samples: int) -> str:
    """Advice for more answers.

    Args:
        samples: the value of --samples.
    """
    largest = _most_right(_answered(tasks))
    if not largest.dense_right:
        return (
            "dense attention gets none right: take a --task that it can answer, or a shorter "
            "--length"
        )
    if largest.prompts < CONTEXTS:
        return f"answers take {CONTEXTS} contexts, which needs a longer file"
    return (
        f"--samples {samples * ceil(ENOUGH / largest.dense_right)} would see a loss of one in five"
    )


def summary(tasks: Sequence[TaskLoss]) -> str:
    """The finding on tasks that passed the gate, in a few words."""
    answered = _answered(tasks)
    if not answered:
        worst = max(task.perplexity_ratio or 1.0 for task in tasks)
        return f"text holds (perplexity {worst - 1:+.2%})"
    return f"answers hold ({_interval(_most_right(answered))})"


def _answered(tasks: Sequence[TaskLoss]) -> list[TaskLoss]:
    """Tasks with answers, and all answers together."""
    return [task for task in (*tasks, *pooled(tasks)) if task.answers]


def _most_right(answered: Sequence[TaskLoss]) -> TaskLoss:
    return max(answered, key=lambda task: task.dense_right)


def _too_few(task: TaskLoss) -> bool:
    """True if a loss of one in five would often not be seen."""
    return task.nll_rise_low is None or task.dense_right < ENOUGH


def _interval(task: TaskLoss) -> str | None:
    """The 95% interval of the change in right answers, as a fraction of dense attention's."""
    if not task.dense_right or task.fewer_low is None or task.fewer_high is None:
        return None
    # 0 - x, so that no change is +0%.
    return f"95% interval {0 - task.fewer_high:+.0%} to {0 - task.fewer_low:+.0%}"


def mean_kl(tasks: Sequence[TaskLoss]) -> float:
    """Mean KL over the sets of prompts, nats a token.

    Kinds of answers of the same prompts have one KL, which counts once."""
    sets = {tuple(each.digest for each in task.contexts): task.kl for task in tasks}
    return float(np.mean(list(sets.values())))


def lost_answers(tasks: Sequence[TaskLoss]) -> Mapping[str, int]:
    """Over the tasks: answers that dense attention gets right, and those of them that are lost."""
    return {
        "dense_right": sum(task.dense_right for task in tasks),
        "lost": sum(task.lost for task in tasks),
    }
