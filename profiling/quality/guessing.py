"""What guessing gives: below it, and at it, a task says nothing of what was read in its prompt."""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

from profiling.prompts.metrics import score
from profiling.prompts.prompt import Prompt

Measure = Literal["score", "choice"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
# Choices that are compared of those that a prompt has, the right one among them.
CHOICES = 8
# Metrics of answers that say one of the prompt's choices; other metrics have choices only to compare their losses.
_OPTIONS = frozenset(["begins", "classes", "letter", "marked"])


def guessed(prompt: Prompt, measure: Measure) -> float:
    """What one is right in on average, from 0 to 1, without reading the prompt.

    Of a forced choice one of those that are compared; of a score one of the options, where an answer is one; of answers
    inside the prompt the commonest of them, always.
    """
    if measure == "choice":
        return 1 / len(compared(prompt)) if compared(prompt) else 0.0
    if prompt.scored:
        commonest = Counter(prompt.input_ids[start:stop] for start, stop in prompt.scored).most_common(1)
        return commonest[0][1] / len(prompt.scored)
    if prompt.choices and prompt.metric in _OPTIONS:
        return sum(score(prompt, choice) for choice in prompt.choices) / len(prompt.choices)
    return 0.0


def compared(prompt: Prompt) -> tuple[str, ...]:
    """The answers that a forced choice compares, in the prompt's order: the right one and CHOICES - 1 at most.

    None where the right one is not among its choices.
    """
    if prompt.answer not in prompt.choices:
        return ()
    wrong = [choice for choice in prompt.choices if choice != prompt.answer][: CHOICES - 1]
    return tuple(choice for choice in prompt.choices if choice == prompt.answer or choice in wrong)
