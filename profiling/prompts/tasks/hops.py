"""Questions that take several facts hidden in a text, answered step by step.

A prompt is prefix + text with facts + worked examples + question. The text is the user's or a
generated one.
"""

from __future__ import annotations

import random
from itertools import pairwise

from profiling.prompts.kind import Evidence, Prompt, Request, Span, task
from profiling.prompts.tasks.retrieval import Hay
from profiling.prompts.tokens import Ids
from profiling.prompts.words import names

_RELATIONS = "teacher brother sister neighbour doctor lawyer cousin uncle aunt boss friend partner"
_FACT = "\n{}'s {} is {}.\n"
_HEAD = "The text below has facts about some people hidden in it. Remember who is who.\n\n"
_STEPS = "\n\nAnswer each question step by step, from the facts in the text above.\n\n"
_QUESTION = "Question: Who is the {other} of {a}'s {one}?\nAnswer: {a}'s {one} is"
_EXAMPLES = 3
# People whom nothing is asked about, in facts of the same kind.
_OTHERS = 2
_HOPS = 2


@task(
    "multi_hop",
    takes_file="may",
    asks="a relation of a person's relation, such as the aunt of a teacher",
    scored="whether the text begins with the first step's result and later has the answer",
    source="OmniKV, section 3",
)
def multi_hop(request: Request) -> list[Prompt]:
    """Multi-hop questions in chain-of-thought form, OmniKV's section 3.

    The chain that is asked for, those of the worked examples and some others lie in the text fact
    by fact, at random depths. The answer has to name B and C.
    """
    hay = Hay(request)
    return request.prompts_in(hay.cells, lambda rng, cell: _prompt(request, hay, rng, cell))


def _prompt(request: Request, hay: Hay, rng: random.Random, cell: Span | None) -> Prompt:
    chains = _chains(1 + _EXAMPLES + _OTHERS, hay.text, rng)
    facts = [_FACT.format(who, relation, whom) for chain in chains for who, relation, whom in chain]
    (a, relation, b), (_, other, c) = chains[0]
    question = (
        _STEPS
        + "".join(map(_worked, chains[1 : 1 + _EXAMPLES]))
        + _QUESTION.format(a=a, one=relation, other=other)
    )
    encode = request.encode
    head = encode(_HEAD)
    question_ids = encode(question)
    hidden = encode.each(facts)
    room = request.room(head, question_ids, *hidden)
    text = hay.tokens(room, rng, cell)
    depths = sorted(rng.randint(0, room) for _ in hidden)
    order = rng.sample(range(len(hidden)), len(hidden))
    items: list[Ids] = []
    for (start, end), fact in zip(pairwise([0, *depths]), order, strict=True):
        items += [text[start:end], hidden[fact]]
    ids, spans = request.assemble(head, [*items, text[depths[-1] :]], question_ids)
    places = dict(zip(order, spans[1::2], strict=True))
    evidence = (
        Evidence(f" {b}", places[0]),
        Evidence(f" {c}", places[1], lead=f". {b}'s {other} is"),
    )
    text_spans = request.text_spans(spans, places.values())
    return Prompt.answered_by(ids, *evidence, text_spans=text_spans, cell=cell)


def _chains(count: int, text: str, rng: random.Random) -> list[list[tuple[str, str, str]]]:
    """Facts (who, relation, whom) that hang together; nobody is in two chains."""
    people = iter(names(rng, count * (_HOPS + 1), apart_from=text))
    chains = []
    for _ in range(count):
        chain = [next(people) for _ in range(_HOPS + 1)]
        chains.append(
            list(zip(chain, rng.sample(_RELATIONS.split(), _HOPS), chain[1:], strict=False))
        )
    return chains


def _worked(chain: list[tuple[str, str, str]]) -> str:
    (a, relation, b), (_, other, c) = chain
    return f"{_QUESTION.format(a=a, one=relation, other=other)} {b}. {b}'s {other} is {c}.\n\n"
