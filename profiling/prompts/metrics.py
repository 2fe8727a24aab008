"""Metrics: score(prompt, text), from 0 to 1, by the metric of the prompt's task.

A metric compares what a model wrote with the references of a prompt, as its task's authors score
it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from artifacts import HeadwiseError
from profiling.prompts.prompt import Prompt

Metric = Callable[[str, Sequence[str]], float]
_ARTICLES = ("a ", "an ", "the ")


def score(prompt: Prompt, text: str) -> float:
    """Score a model's answer, from 0 to 1.

    Raises:
        HeadwiseError: the prompt says no answer, or a metric that is not known.
    """
    references = prompt.references or ((prompt.answer,) if prompt.answer is not None else ())
    if not references:
        raise HeadwiseError("a prompt without an answer cannot be scored")
    if prompt.metric == "begins":
        return _begins(prompt, text.strip(), references)
    if prompt.metric not in METRICS:
        raise HeadwiseError(
            f"unknown metric {prompt.metric!r}; known: begins, {', '.join(METRICS)}"
        )
    return METRICS[prompt.metric](text, references)


def is_final(prompt: Prompt, text: str) -> bool:
    """True if the score is 1 and no further text can lower it."""
    has_answer = bool(prompt.references) or prompt.answer is not None
    return has_answer and prompt.metric in ("begins", "all") and score(prompt, text) == 1


def _begins(prompt: Prompt, text: str, references: Sequence[str]) -> float:
    """Score 1 where the text begins with an answer, or names all finds in their order."""
    if len(prompt.finds) < 2:
        return float(any(text.startswith(reference.strip()) for reference in references))
    pattern = ".*?".join(re.escape(find.expected.strip()) for find in prompt.finds)
    return float(re.match(pattern, text, re.DOTALL) is not None)


def _all(text: str, references: Sequence[str]) -> float:
    """The fraction of the references that are in the text: RULER's string_match_all."""
    return sum(reference.lower() in text.lower() for reference in references) / len(references)


def _chapters(text: str, references: Sequence[str]) -> float:
    """Intersection over union of the numbers before the closing tag. Both empty is 1."""
    given = set(re.findall(r"\d+", _answered(text)))
    right = set(references)
    if given | right:
        return len(given & right) / len(given | right)
    return 1.0


def _numbered(text: str, references: Sequence[str]) -> float:
    """Score the fraction of references after their numbers, without case or articles; 1 of none."""
    given = dict[str, str]()
    for number, value in re.findall(r"(?m)^\s*(\d+)\.\s*(.*)$", _answered(text)):
        given.setdefault(number, _plain(value))
    right = [given.get(str(at)) == _plain(each) for at, each in enumerate(references, start=1)]
    if right:
        return sum(right) / len(right)
    return 1.0


def _item(text: str, references: Sequence[str]) -> float:
    """Score 1 where the answer is a reference, in any case, without an article."""
    return float(any(_plain(_answered(text)) == _plain(reference) for reference in references))


def _answered(text: str) -> str:
    """Cut out the text within <answer>, which the prompt may have opened."""
    return text.partition("</answer>")[0].rpartition("<answer>")[2].strip()


def _plain(text: str) -> str:
    plain = text.lower().strip().rstrip(".")
    return next(
        (plain.removeprefix(article) for article in _ARTICLES if plain.startswith(article)), plain
    )


METRICS: dict[str, Metric] = {
    "all": _all,
    "chapters": _chapters,
    "numbered": _numbered,
    "item": _item,
}
