"""How an answer is scored: score(prompt, text), from 0 to 1, by the metric that the prompt's task has.

A metric compares what a model wrote with the references of a prompt, and may know the choices it had. `first_line+`
before a metric's name drops all but the first line of what was written, as LongBench does for tasks by example.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from artifacts import HeadwiseError
from profiling.prompts import list_metrics
from profiling.prompts.prompt import Prompt
from profiling.prompts.text_metrics import (
    characters,
    edit_similarity,
    f1,
    rouge_l,
    rouge_l_summary,
    words_of_answer,
    words_of_summary,
)

Metric = Callable[[str, Sequence[str], Sequence[str]], float]
_FIRST_LINE = "first_line+"
# Where a model that explains itself says which option it takes.
_CHOSEN = re.compile(r"(?i:answer is|answer|option is)\s*:?\s*(?i:option\s*)?\W?([A-Z])\b")


def score(prompt: Prompt, text: str) -> float:
    """What a model's answer is worth, from 0 to 1.

    Raises:
        HeadwiseError: the prompt says no answer, or a metric that is not known.
    """
    references = prompt.references or ((prompt.answer,) if prompt.answer is not None else ())
    if not references:
        raise HeadwiseError("a prompt without an answer cannot be scored")
    name = prompt.metric
    if name.startswith(_FIRST_LINE):
        name, text = name.removeprefix(_FIRST_LINE), text.lstrip("\n").partition("\n")[0]
    if name == "begins":
        return _begins(prompt, text.strip(), references)
    if name not in METRICS:
        raise HeadwiseError(f"unknown metric {name!r}; known: begins, {', '.join(METRICS)}")
    return METRICS[name](text, references, prompt.choices)


def _begins(prompt: Prompt, text: str, references: Sequence[str]) -> float:
    """1 where the text begins with an answer; one of several finds names them all in their order."""
    if len(prompt.finds) < 2:
        return float(any(text.startswith(reference.strip()) for reference in references))
    wanted = ".*?".join(re.escape(find.expected.strip()) for find in prompt.finds)
    return float(re.match(wanted, text, re.DOTALL) is not None)


def _exact(text: str, references: Sequence[str], choices: Sequence[str]) -> float:
    return float(any(text.strip() == reference.strip() for reference in references))


def _all(text: str, references: Sequence[str], choices: Sequence[str]) -> float:
    """The share of the references that are in the text: RULER's string_match_all."""
    return sum(reference.lower() in text.lower() for reference in references) / len(references)


def _any(text: str, references: Sequence[str], choices: Sequence[str]) -> float:
    """Whether any reference is in the text: RULER's string_match_part."""
    return float(any(reference.lower() in text.lower() for reference in references))


def _classes(text: str, references: Sequence[str], choices: Sequence[str]) -> float:
    """1 over how many classes the text names, if the right one is among them; parts of its name do not count."""
    best = 0.0
    for right in references:
        named = [c for c in choices if c in text and not (c in right and c != right)]
        best = max(best, right in named and 1 / len(named))
    return best


def _numbers(text: str, references: Sequence[str], choices: Sequence[str]) -> float:
    """The share of the numbers in the text that are the reference's, such as the 7 of `Paragraph 7`."""
    given = re.findall(r"\d+", text)
    wanted = {number for reference in references for number in re.findall(r"\d+", reference)[:1]}
    return sum(number in wanted for number in given) / len(given) if given else 0.0


def _code_line(text: str, references: Sequence[str], choices: Sequence[str]) -> float:
    """Edit similarity of the first line that is neither a comment nor a fence."""
    lines = text.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return max(edit_similarity(line, reference) for reference in references)


def _word(text: str, references: Sequence[str], choices: Sequence[str]) -> float:
    """Whether a reference is one of the text's words, in any case."""
    given = {word.upper() for word in re.split(r"[\s:\"'.,?!{}]+", text)}
    return float(any(reference.upper() in given for reference in references))


def _first_integer(text: str, references: Sequence[str], choices: Sequence[str]) -> float:
    """Whether the first run of digits is the reference, digit by digit."""
    first = re.search(r"\d+", text)
    return float(first is not None and first[0] in references)


def _first_number(text: str, references: Sequence[str], choices: Sequence[str]) -> float:
    """Whether the first number has the reference's value."""
    first = re.search(r"-?\d+(?:\.\d+)?", text)
    return float(first is not None and any(float(first[0]) == float(reference) for reference in references))


def _last_integer(text: str, references: Sequence[str], choices: Sequence[str]) -> float:
    """Whether the text ends with the reference's value."""
    last = (re.sub(r"[\s.`'\":]+", " ", text).split() or [""])[-1]
    return float(re.fullmatch(r"-?\d+", last) is not None and any(float(last) == float(r) for r in references))


def _integers_in_turn(text: str, references: Sequence[str], choices: Sequence[str]) -> float:
    """The share of the references that come in turn before the first wrong number."""
    right = 0
    for given, wanted in zip(re.findall(r"\d+", text), references, strict=False):
        if float(given) != float(wanted):
            break
        right += 1
    return right / len(references)


def _letter(text: str, references: Sequence[str], choices: Sequence[str]) -> float:
    """Whether the letter that the text chooses is right; the first letter if it says nothing like `the answer is B`."""
    text = text.strip()
    begins = re.match(r"\(?([A-Z])(?:$|[^\w'])", text)
    chosen = begins or _CHOSEN.search(text) or re.search(r"\b([A-Z])\b", text)
    letters = [letter for letter in references if len(letter) == 1]
    if chosen is not None and chosen[1] in letters:
        return 1.0
    return float(any(text.startswith(option) for option in references if len(option) > 1))


def _best(compare: Callable[[str, str], float]) -> Metric:
    return lambda text, references, choices: max(compare(text, reference) for reference in references)


def _whole(compare: Callable[[str, Sequence[str]], float]) -> Metric:
    return lambda text, references, choices: compare(text, references)


METRICS: dict[str, Metric] = {
    "exact": _exact,
    "all": _all,
    "any": _any,
    "f1": _best(lambda text, reference: f1(words_of_answer(text), words_of_answer(reference))),
    "f1_zh": _best(lambda text, reference: f1(characters(text), characters(reference))),
    "rouge_l": _best(lambda text, reference: rouge_l(words_of_summary(text), words_of_summary(reference))),
    "rouge_l_zh": _best(lambda text, reference: rouge_l(characters(text), characters(reference))),
    "rouge_l_summary": _best(rouge_l_summary),
    "classes": _classes,
    "numbers": _numbers,
    "code_line": _code_line,
    "word": _word,
    "first_integer": _first_integer,
    "first_number": _first_number,
    "last_integer": _last_integer,
    "integers_in_turn": _integers_in_turn,
    "letter": _letter,
    "nodes": _whole(list_metrics.nodes),
    "chapters": _whole(list_metrics.chapters),
    "numbered": _whole(list_metrics.numbered),
    "item": _whole(list_metrics.item),
    "marked": _whole(list_metrics.marked),
    "countdown": _whole(list_metrics.countdown),
    "countdown_partial": _whole(list_metrics.lines_in_turn(list_metrics.lines_before("<Solution>"))),
    "route": _whole(list_metrics.same_lines(list_metrics.lines_before("</Route>"))),
    "route_partial": _whole(list_metrics.lines_in_turn(list_metrics.lines_before("</Route>"))),
    "tom": _whole(list_metrics.same_lines(list_metrics.steps)),
    "tom_partial": _whole(list_metrics.lines_in_turn(list_metrics.steps)),
}
