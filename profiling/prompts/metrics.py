"""Scores of answers, from 0 to 1, by the metric of the prompt's task."""

from __future__ import annotations

import re
from collections.abc import Sequence

from artifacts import HeadwiseError
from profiling.prompts.prompt import Prompt


def score(prompt: Prompt, text: str) -> float:
    """Score a model's answer, from 0 to 1.

    Raises:
        HeadwiseError: the prompt has no answer.
    """
    references = prompt.references or ((prompt.answer,) if prompt.answer is not None else ())
    if not references:
        raise HeadwiseError("a prompt without an answer cannot be scored")
    if prompt.metric == "all":
        return _all(text, references)
    return _begins(prompt, text.strip(), references)


def is_final(prompt: Prompt, text: str) -> bool:
    """True if the score is 1, which no further text can lower: not even another digit."""
    has_answer = bool(prompt.references) or prompt.answer is not None
    return has_answer and score(prompt, text) == 1 and score(prompt, f"{text}0") == 1


def _begins(prompt: Prompt, text: str, references: Sequence[str]) -> float:
    """Score 1 where the text begins with an answer, or names all parts of it in their order."""
    if len(prompt.evidence) < 2:
        return float(any(re.match(_whole(reference), text) for reference in references))
    pattern = ".*?".join(_whole(part.expected) for part in prompt.evidence)
    return float(re.match(pattern, text, re.DOTALL) is not None)


def _whole(answer: str) -> str:
    """Make a pattern of an answer in which a number is no part of a longer one.

    The papers of these tasks compare the number that the text states.
    """
    answer = answer.strip()
    pattern = re.escape(answer)
    if answer[0].isdigit():
        pattern = rf"(?<!\d){pattern}"
    if answer[-1].isdigit():
        pattern = rf"{pattern}(?!\d)"
    return pattern


def _all(text: str, references: Sequence[str]) -> float:
    """Compute the fraction of the references that the text contains (RULER's string_match_all)."""
    return sum(reference.lower() in text.lower() for reference in references) / len(references)
