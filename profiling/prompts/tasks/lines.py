"""Prompts over a list of generated lines: a value by its name, and a value by way of another line.

Such a prompt is prefix + head + lines + question. The lines that the question needs are whole; what
is too much is cut from the start of one that it does not need.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice

from profiling.prompts.kind import QUESTION_FIRST, Evidence, Prompt, Request, Span, task
from profiling.prompts.tokens import Ids
from profiling.prompts.words import five_digits, words

_HEAD = "Below is a list of facts, one a line.\n\n"
_VALUE = "The value of {} is {}."
_ASKED_FIRST = "Question: What is the value of {}? The answer is in the list.\n\n"
_ASKED_BACK = "\nThe answer to the question at the start: the value is"
_BOX = "{} owns the box {}."
_BOTH = "\nFind the box of the owner first, then the value of the box.\n\n"
# Worked examples: with fewer, models of some hundred million parameters do not continue to the
# second stage.
_EXAMPLES = 3
_BATCH = 256


@task(
    "line_retrieval",
    parameters=(QUESTION_FIRST,),
    asks="the number of one word, from a list of words with numbers",
    source="LongEval, Li et al. 2023",
)
def line_retrieval(request: Request, *, question_first: int = 0) -> list[Prompt]:
    """Ask for the number of one word in a list of words with numbers (LongEval's lines).

    With `question_first`, the word is named only before the list.
    """

    def make_prompt(rng: random.Random) -> Prompt:
        word = words(rng)
        name = next(word)
        number = five_digits(rng)
        needed = [_line(_VALUE, name, number)]
        if question_first:
            head = f"{_ASKED_FIRST.format(name)}{_HEAD}"
        else:
            head = _HEAD
        if question_first:
            question = _ASKED_BACK
        else:
            question = "\n" + _asked(_VALUE, name)

        def more() -> list[str]:
            return [_line(_VALUE, next(word), five_digits(rng))]

        ids, spans = _listed(request, needed, more, question, rng, head=head)
        return Prompt.answered_by(ids, Evidence(f" {number}", spans[0]))

    return request.prompts(make_prompt)


@task(
    "two_stage_retrieval",
    asks="the box of an owner, then the value of that box",
    scored="whether the text begins with the box and later has its value",
    source="OmniKV, appendix A",
)
def two_stage_retrieval(request: Request) -> list[Prompt]:
    """Ask for the value of an owner's box, over owners with boxes and boxes with values.

    After OmniKV's 2StageRetr (appendix A): the target of the second stage is not known before the
    first has answered, so tokens that look unimportant while the prompt is read are needed later.
    The answer has to name both.
    """

    def make_prompt(rng: random.Random) -> Prompt:
        word = words(rng)
        chains = [(next(word), next(word), five_digits(rng)) for _ in range(_EXAMPLES + 1)]
        needed = [line for chain in chains for line in _stages(*chain)]
        worked = [f"{_BOX.format(a, b)} {_VALUE.format(b, c)}\n\n" for a, b, c in chains[1:]]
        owner, box, value = chains[0]
        question = _BOTH + "".join(worked) + _asked(_BOX, owner)
        ids, spans = _listed(
            request,
            needed,
            lambda: _stages(next(word), next(word), five_digits(rng)),
            question,
            rng,
        )
        first = Evidence(f" {box}", spans[0])
        return Prompt.answered_by(
            ids, first, Evidence(f" {value}", spans[1], lead=f". {_asked(_VALUE, box)}")
        )

    return request.prompts(make_prompt)


def _stages(owner: str, box: str, value: str) -> list[str]:
    return [_line(_BOX, owner, box), _line(_VALUE, box, value)]


def _line(form: str, *filled: str) -> str:
    return form.format(*filled) + "\n"


def _asked(form: str, name: str) -> str:
    """The form up to where the answer goes, without the space before it."""
    return form.format(name, "\n").partition(" \n")[0]


def _listed(
    request: Request,
    needed: list[str],
    more: Callable[[], list[str]],
    question: str,
    rng: random.Random,
    *,
    head: str = _HEAD,
) -> tuple[Ids, list[Span]]:
    """Join head, lines and question; return the ids and the span of each needed line.

    Args:
        request: what the prompts should be.
        needed: the lines that the answer depends on.
        more: makes the lines of one more item.
        question: printed after the lines.
        rng: source of the order and the places.
        head: printed before the lines.
    """
    encode = request.encode
    before = encode(head)
    after = encode(question)
    lines = encode.each(needed)
    room = request.room(before, after, *lines)
    last: list[Ids] = []
    while room > 0:
        items = [more() for _ in range(_BATCH)]
        encoded = iter(encode.each([line for item in items for line in item]))
        for item in items:
            lines += last
            last = list(islice(encoded, len(item)))
            room -= sum(map(len, last))
            if room <= 0:
                break
    # Only the item that exceeds the length is cut, so it comes first.
    order = rng.sample(range(len(lines)), len(lines))
    rng.shuffle(last)
    ids, spans = request.assemble(before, [*last, *(lines[at] for at in order)], after)
    placed = dict(zip(order, spans[len(last) :], strict=True))
    return ids, [placed[at] for at in range(len(needed))]
