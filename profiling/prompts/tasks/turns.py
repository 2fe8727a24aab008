"""Questions in a later turn over a shared context, which its prefill did not know.

After SCBench's shared contexts (Li et al. 2024). A prompt is prefix + head + lines, and as its turn
the question. The lines that questions need are whole; excess tokens are cut from the start of a
line that none needs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from profiling.prompts.kind import BEGINS, QUESTIONS, Evidence, Prompt, Request, task
from profiling.prompts.tokens import Ids, enough
from profiling.prompts.words import five_digits, words

_BATCH = 256


_HEAD = "Below is a list of facts, one a line.\n\n"
_TAIL = "\n"


class Item(NamedTuple):
    """A question with the line that answers it."""

    line: str
    question: str
    answer: str


@task(
    "line_turns",
    parameters=(QUESTIONS,),
    asks="the number of one word, from a list of words with numbers; asked in a later turn",
    scored=BEGINS,
    source="a shared context and later turns: SCBench, Li et al. 2024",
)
def line_turns(request: Request, *, questions: int = 8) -> list[Prompt]:
    """Make contexts with `questions` questions each, the last one with the rest of `samples`."""
    prompts: list[Prompt] = []
    for number in range(-(-request.samples // questions)):
        prompts += _context(
            request, min(questions, request.samples - len(prompts)), request.rng(number)
        )
    return prompts


def _items(rng: random.Random) -> Iterator[Item]:
    for name in words(rng):
        value = five_digits(rng)
        yield Item(f"The value of {name} is {value}.\n", f"\nThe value of {name} is", f" {value}")


def _context(request: Request, count: int, rng: random.Random) -> list[Prompt]:
    encode = request.encode
    head = encode(_HEAD)
    tail = encode(_TAIL)
    source = _items(random.Random(rng.random()))
    items: list[Item] = []
    lines: list[Ids] = []
    while sum(map(len, lines)) < request.length:
        more = list(islice(source, _BATCH))
        items += more
        lines += encode.each([item.line for item in more])
    # Questions of one context have as many tokens each: it leaves the same room before all of them.
    questions = encode.each([item.question for item in items])
    size = Counter(map(len, questions[: max(count, request.length // 64)])).most_common(1)[0][0]
    # As many items as fit, and the one that is cut.
    *whole, cut = enough(lines, request.room(head, tail) - size)
    fit = [at for at in range(len(whole)) if len(questions[at]) == size]
    if len(fit) < count:
        raise request.too_small(
            f"it has {len(fit)} of the {count} questions that a context needs; give more tokens, "
            f"or fewer with "
            f"{request.name}@questions=N"
        )
    selected = rng.sample(fit, count)
    order = list(range(len(whole)))
    rng.shuffle(order)
    made = []
    for at in selected:
        after = (*tail, *questions[at])
        ids, spans = request.assemble(head, [cut, *(whole[line] for line in order)], after)
        fact = Evidence(items[at].answer, spans[1 + order.index(at)])
        made.append(Prompt.answered_by(ids, fact, turn=size))
    return made
