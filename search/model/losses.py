"""Losses of patterns against dense attention, by task and over all answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import exp
from typing import Any

import numpy as np

from artifacts import TaskFigures
from profiling.evaluation.intervals import Interval, share_of, student
from profiling.quality.sequences import Losses, TokenSequence

# Contexts that an interval takes. Answers of one context are alike, and say nothing of other
# contexts.
CONTEXTS = 4
# The name of all answers of all tasks together.
POOL = "all answers"
_SUMS = ("rise", "tokens", "answers", "dense_right", "lost", "won", "clear", "fall")


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
        clear: answers that dense attention gets right, near ties in part.
        fall: by how much the patterns lower this sum.
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
    clear: float = 0.0
    fall: float = 0.0
    unit: str = ""

    @classmethod
    def from_sequence(cls, task: str, sequence: TokenSequence, losses: Losses) -> ContextLoss:
        """The loss of a sequence, or of some of its answers."""
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
            clear=float(losses.dense_clear.sum()),
            fall=float((losses.dense_clear - losses.clear).sum()),
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
            contexts.append(ContextLoss.from_sequence(sequence.task, sequence, loss))
        for label in dict.fromkeys(sequence.labels):
            is_label = np.array([each == label for each in sequence.labels])
            name = f"{sequence.task}/{label}"
            contexts.append(ContextLoss.from_sequence(name, sequence, loss.select(is_label)))
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
        figures.append(_figures(POOL, pooled(chain.from_iterable(with_answers)), length))
    return tuple(figures)


def _by_task(contexts: Iterable[ContextLoss]) -> dict[str, list[ContextLoss]]:
    """Contexts by task, in the order of each task's first."""
    tasks: dict[str, list[ContextLoss]] = {}
    for context in contexts:
        tasks.setdefault(context.task, []).append(context)
    return tasks


def pooled(contexts: Iterable[ContextLoss]) -> list[ContextLoss]:
    """Join the answers of each unit of an interval, of whatever kinds: of a sequence, or several.

    One task's answers may be too few for a loss to show.
    """
    joined = []
    for parts in _by_unit(context for context in contexts if context.answers):
        sums = {name: sum(getattr(part, name) for part in parts) for name in _SUMS}
        joined.append(replace(parts[0], **sums))
    return joined


def _by_unit(contexts: Iterable[ContextLoss]) -> list[list[ContextLoss]]:
    """Contexts of the same or of shared text together: they say nothing of other texts."""
    units: dict[str, list[ContextLoss]] = {}
    for context in contexts:
        units.setdefault(context.unit or context.digest, []).append(context)
    return list(units.values())


def lost_fraction(contexts: Sequence[ContextLoss], confidence: float) -> Interval:
    """The fraction of dense attention's correct answers that is lost, with its interval.

    At a near tie an answer turns from right to wrong by chance, so it counts in part: each token by
    Phi(m / 0.5), where m is its logit less the highest of the others. Where a
    model answers few questions the interval is half as wide as that of counts (docs/internals.md).

    Args:
        contexts: with answers, one of each sequence.
        confidence: of the interval over contexts, two-sided.
    """
    return share_of(
        [context.fall for context in contexts],
        [context.clear for context in contexts],
        confidence=confidence,
    )


def perplexity_rise(contexts: Sequence[ContextLoss], confidence: float) -> Interval:
    """The relative rise of the perplexity of text, with its interval over windows."""
    texts = [context for context in contexts if context.text is not None]
    rises = [float(np.mean([part.text for part in parts])) for parts in _by_unit(texts)]
    interval = student(rises, confidence=confidence)
    return Interval(
        exp(interval.value) - 1, exp(interval.low) - 1, exp(interval.high) - 1, interval.count
    )


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
        if len(text) >= CONTEXTS and np.isfinite(text).all():
            rise = perplexity_rise(contexts, 0.95)
            figures |= {"perplexity_low": 1 + rise.low, "perplexity_high": 1 + rise.high}
    answered = [context for context in contexts if context.answers]
    if not answered:
        return TaskFigures.model_construct(**figures)
    for name in ("answers", "dense_right", "lost", "won"):
        figures[name] = sum(getattr(context, name) for context in contexts)
    rises = [context.rise for context in answered]
    tokens = [context.tokens for context in answered]
    figures["nll_rise"] = sum(rises) / sum(tokens)
    clear = sum(context.clear for context in answered)
    figures["loss"] = sum(context.fall for context in answered) / max(1.0, clear)
    if len(answered) < CONTEXTS or not np.isfinite([*rises, figures["loss"]]).all():
        return TaskFigures.model_construct(**figures)
    rise = share_of(rises, tokens)
    loss = lost_fraction(answered, 0.95)
    fewer = share_of(
        [float(context.lost - context.won) for context in answered],
        [float(context.dense_right) for context in answered],
    )
    for name, interval in (("nll_rise", rise), ("fewer", fewer), ("loss", loss)):
        if interval.is_known:
            figures |= {f"{name}_low": interval.low, f"{name}_high": interval.high}
    return TaskFigures.model_construct(**figures)


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
        if task.perplexity_low is not None and task.perplexity_high is not None:
            text += f" ({task.perplexity_low - 1:+.2%} to {task.perplexity_high - 1:+.2%})"
    if not task.answers:
        return text
    dense = task.dense_right or 0
    text += (
        f"  correct of {task.answers}: dense {dense}, artifact {dense - task.net_lost} "
        f"({task.lost} lost, {task.won} won), {0 - task.fewer:+.1%}"
    )
    if task.fewer_low is not None and task.fewer_high is not None:
        text += f" ({0 - task.fewer_high:+.1%} to {0 - task.fewer_low:+.1%})"
    if task.loss is not None:
        text += f", ties smoothed {-task.loss:+.1%}"
    if task.loss_low is not None and task.loss_high is not None:
        text += f" ({-task.loss_high:+.1%} to {-task.loss_low:+.1%})"
    return text


def mean_kl(contexts: Sequence[ContextLoss]) -> float:
    """Mean KL over the sets of prompts, nats a token.

    Kinds of answers of the same prompts have one KL, which counts once.
    """
    sets = {
        tuple(each.digest for each in task): float(np.mean([each.kl for each in task]))
        for task in _by_task(contexts).values()
    }
    return float(np.mean(list(sets.values())))
