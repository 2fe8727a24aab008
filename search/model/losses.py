"""Losses of patterns against dense attention, by task and over all answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil, exp
from typing import Any

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
    """Losses of one sequence, or of its answers of one kind.

    Attributes:
        task: the sequence's; where its answers are of several kinds, one of them after a slash.
        digest: of the sequence.
        unit: the same for sequences that are not independent; empty: of its own.
        kl: mean over its compared positions, nats a token.
        text: mean rise of -log p of its tokens; None where answers are asked for.
        rise: rise of its answers' -log p in all.
        tokens: number of tokens of its answers.
        answers: how many.
        dense_right: answers that dense attention gets right.
        lost: those of them that the patterns get wrong.
        won: answers that only the patterns get right.
    """

    task: str
    digest: str
    kl: float
    text: float | None = None
    rise: float = 0.0
    tokens: float = 0.0
    answers: int = 0
    dense_right: int = 0
    lost: int = 0
    won: int = 0
    unit: str = ""

    @classmethod
    def of(cls, task: str, sequence: TokenSequence, losses: Losses) -> ContextLoss:
        """Of a sequence, or of some of its answers."""
        text = None
        if not len(losses.right):
            text = float((losses.nll - losses.dense_nll).mean())
        return cls(
            task=task,
            digest=sequence.digest,
            unit=sequence.unit,
            kl=float(losses.kl.mean()),
            text=text,
            rise=float((losses.answer_nll - losses.answer_dense_nll).sum()),
            tokens=float(losses.answer_tokens.sum()),
            answers=len(losses.right),
            dense_right=int(losses.dense_right.sum()),
            lost=int((losses.dense_right & ~losses.right).sum()),
            won=int((~losses.dense_right & losses.right).sum()),
        )


def task_names(sequence: TokenSequence) -> list[str]:
    """The names under which a sequence's losses are listed: its task, or one for each label."""
    if not sequence.labels:
        return [sequence.task]
    return [f"{sequence.task}/{label}" for label in dict.fromkeys(sequence.labels)]


def context_losses(
    sequences: Sequence[TokenSequence], losses: Sequence[Losses]
) -> tuple[ContextLoss, ...]:
    """Losses of sequences, apart for each kind of answer."""
    contexts = []
    for sequence, loss in zip(sequences, losses, strict=True):
        if not sequence.labels:
            contexts.append(ContextLoss.of(sequence.task, sequence, loss))
        for label in dict.fromkeys(sequence.labels):
            is_label = np.array([each == label for each in sequence.labels])
            name = f"{sequence.task}/{label}"
            contexts.append(ContextLoss.of(name, sequence, loss.of(is_label)))
    return tuple(contexts)


def task_figures(
    contexts: Sequence[ContextLoss], length: int | None = None
) -> tuple[TaskFigures, ...]:
    """Figures of each task, and of all answers together (`POOL`) where several tasks have some.

    Args:
        contexts: losses of each sequence.
        length: of the prompts, in tokens.
    """
    tasks = _by_task(contexts)
    figures = [_figures(task, each, length) for task, each in tasks.items()]
    with_answers = [each for each in tasks.values() if any(context.answers for context in each)]
    if len(with_answers) > 1:
        figures.append(_figures(POOL, _joined(chain.from_iterable(with_answers)), length))
    return tuple(figures)


def _by_task(contexts: Iterable[ContextLoss]) -> dict[str, list[ContextLoss]]:
    """Contexts by task, in the order of each task's first."""
    tasks: dict[str, list[ContextLoss]] = {}
    for context in contexts:
        tasks.setdefault(context.task, []).append(context)
    return tasks


def _joined(contexts: Iterable[ContextLoss]) -> list[ContextLoss]:
    """Join the answers of each unit of an interval, of whatever kinds: of a sequence, or several.

    One task's answers may be too few for a loss to show.
    """
    units: dict[str, list[ContextLoss]] = {}
    for context in contexts:
        units.setdefault(context.unit or context.digest, []).append(context)
    joined = []
    for parts in units.values():
        sums = {
            name: sum(getattr(part, name) for part in parts)
            for name in ("rise", "tokens", "answers", "dense_right", "lost", "won")
        }
        joined.append(replace(parts[0], **sums))
    return joined


def _figures(task: str, contexts: Sequence[ContextLoss], length: int | None) -> TaskFigures:
    """Figures of a task's contexts, which are the units of the intervals.

    They are not validated: the gate judges a loss that is not a number, too.
    """
    figures: dict[str, Any] = {
        "task": task,
        "length": length,
        "prompts": len(contexts),
        "kl": float(np.mean([context.kl for context in contexts])),
    }
    text = [context.text for context in contexts if context.text is not None]
    if text:
        figures["perplexity_ratio"] = exp(float(np.mean(text)))
    answered = [context for context in contexts if context.answers]
    if not answered:
        return TaskFigures.model_construct(**figures)
    for name in ("answers", "dense_right", "lost", "won"):
        figures[name] = sum(getattr(context, name) for context in contexts)
    rises = [context.rise for context in answered]
    tokens = [context.tokens for context in answered]
    figures["nll_rise"] = sum(rises) / sum(tokens)
    if len(answered) < CONTEXTS:
        return TaskFigures.model_construct(**figures)
    rise = share_of(rises, tokens)
    fewer = share_of(
        [float(context.lost - context.won) for context in answered],
        [float(context.dense_right) for context in answered],
    )
    return TaskFigures.model_construct(
        **figures,
        nll_rise_low=rise.low,
        nll_rise_high=rise.high,
        fewer_low=fewer.low,
        fewer_high=fewer.high,
    )


def loss_by_task(contexts: Sequence[ContextLoss]) -> dict[str, float]:
    """Loss of each task in nats a token: the KL, and the rise of its answers' loss if any."""
    return {
        # In this order NaN stays.
        task: figures.kl + max(figures.nll_rise or 0.0, 0.0)
        for task, each in _by_task(contexts).items()
        for figures in [_figures(task, each, None)]
    }


def loss_by_kind(contexts: Sequence[ContextLoss]) -> dict[str, float]:
    """Mean loss of the tasks of each kind of prompt, `text` and `answer` where there are some."""
    kinds: dict[str, list[float]] = {}
    with_answers = {context.task for context in contexts if context.answers}
    for task, loss in loss_by_task(contexts).items():
        kinds.setdefault("answer" if task in with_answers else "text", []).append(loss)
    return {kind: float(np.mean(losses)) for kind, losses in kinds.items()}


def format_row(task: TaskFigures) -> str:
    """A task's losses in a line."""
    text = f"{task.task:<26} KL {task.kl:.4f}"
    if task.perplexity_ratio is not None:
        text += f"  perplexity {task.perplexity_ratio - 1:+.2%}"
    if not task.answers:
        return text
    dense = task.dense_right or 0
    text += (
        f"  correct of {task.answers}: dense {dense}, artifact {dense - task.net_lost} "
        f"({task.lost} lost, {task.won} won)"
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


def verdict(tasks: Sequence[TaskFigures]) -> Verdict:
    """Proven if a loss of one in five answers would show in a task, or in all answers together."""
    answered = [task for task in tasks if task.answers]
    if not answered:
        return Verdict(proven=True, why="text alone, no answers were asked for")
    largest = _most_right(answered)
    right = plural(largest.dense_right or 0, "right answer")
    why = f"{right} of {plural(largest.prompts, 'context')}"
    return Verdict(proven=not all(map(_too_few, answered)), why=why)


def advice(tasks: Sequence[TaskFigures], samples: int) -> str:
    """Advice for more answers.

    Args:
        tasks: the figures of all tasks.
        samples: the value of --samples.
    """
    largest = _most_right([task for task in tasks if task.answers])
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


def summary(tasks: Sequence[TaskFigures]) -> str:
    """The finding on tasks that passed the gate, in a few words."""
    answered = [task for task in tasks if task.answers]
    if not answered:
        worst = max(task.perplexity_ratio or 1.0 for task in tasks)
        return f"perplexity {worst - 1:+.2%}"
    most = _most_right(answered)
    return f"correct answers {0 - most.fewer:+.0%} ({_interval(most)})"


def _most_right(answered: Sequence[TaskFigures]) -> TaskFigures:
    return max(answered, key=lambda task: task.dense_right or 0)


def _too_few(task: TaskFigures) -> bool:
    """True if a loss of one in five would often not be seen."""
    return task.nll_rise_low is None or (task.dense_right or 0) < ENOUGH


def _interval(task: TaskFigures) -> str | None:
    """The 95% interval of the change in right answers, as a fraction of dense attention's."""
    if not task.dense_right or task.fewer_low is None or task.fewer_high is None:
        return None
    # 0 - x, so that no change is +0%.
    return f"95% interval {0 - task.fewer_high:+.0%} to {0 - task.fewer_low:+.0%}"


def mean_kl(contexts: Sequence[ContextLoss]) -> float:
    """Mean KL over the sets of prompts, nats a token.

    Kinds of answers of the same prompts have one KL, which counts once.
    """
    sets = {
        tuple(each.digest for each in task): float(np.mean([each.kl for each in task]))
        for task in _by_task(contexts).values()
    }
    return float(np.mean(list(sets.values())))
