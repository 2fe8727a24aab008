"""Questions that take several facts hidden in a text, answered step by step.

A prompt is prefix + text with facts + worked examples + question. The text is the user's or a generated one.
"""

from __future__ import annotations

import random
from pathlib import Path

from artifacts import HeadwiseError
from profiling.prompts.prompt import Find, Prompt
from profiling.prompts.retrieval import haystack
from profiling.prompts.texts import read_ids, read_text
from profiling.prompts.tokens import Encoder, Ids
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


def multi_hop(encode: Encoder, file: Path | None, length: int, samples: int, seed: int) -> list[Prompt]:
    """Multi-hop questions in chain-of-thought form, the task of OmniKV's section 3: `A's teacher is B. B's aunt is C.`

    The chain that is asked for, those of the worked examples and some others lie in the text fact by fact, at random
    depths. The answer has to name B and C.
    """
    text = read_text(file) if file is not None else ""
    ids = read_ids(encode, file) if file is not None else None
    return [_asked(encode, text, ids, file, length, random.Random(f"{seed} multi_hop {i}")) for i in range(samples)]


def _asked(
    encode: Encoder, text: str, text_ids: Ids | None, file: Path | None, length: int, rng: random.Random
) -> Prompt:
    chains = _chains(1 + _EXAMPLES + _OTHERS, text, rng)
    facts = [_FACT.format(who, relation, whom) for chain in chains for who, relation, whom in chain]
    (a, one, b), (_, other, c) = chains[0]
    question = _STEPS + "".join(map(_worked, chains[1 : 1 + _EXAMPLES])) + _QUESTION.format(a=a, one=one, other=other)
    head, asked, hidden = encode.prefix + encode(_HEAD), encode(question), encode.each(facts)
    room = length - len(head) - len(asked) - sum(map(len, hidden))
    if room < 0:
        raise HeadwiseError(f"length {length} is too small for multi_hop: give at least {length - room}")
    hay = haystack(encode, text_ids, file, room, rng, f"multi_hop at length {length}")
    depths = sorted(rng.randint(0, room) for _ in hidden)
    ids, spans, done = list(head), {}, 0
    for depth, fact in zip(depths, rng.sample(range(len(hidden)), len(hidden)), strict=True):
        ids += hay[done:depth]
        spans[fact], done = (len(ids), len(ids) + len(hidden[fact])), depth
        ids += hidden[fact]
    found = Find(f" {b}", spans[0]), Find(f" {c}", spans[1], lead=f". {b}'s {other} is")
    return Prompt.to_find((*ids, *hay[done:], *asked), *found)


def _chains(count: int, text: str, rng: random.Random) -> list[list[tuple[str, str, str]]]:
    """Facts (who, relation, whom) that hang together; nobody is in two chains."""
    people = iter(names(rng, count * (_HOPS + 1), apart_from=text))
    chains = []
    for _ in range(count):
        chain = [next(people) for _ in range(_HOPS + 1)]
        chains.append(list(zip(chain, rng.sample(_RELATIONS.split(), _HOPS), chain[1:], strict=False)))
    return chains


def _worked(chain: list[tuple[str, str, str]]) -> str:
    (a, one, b), (_, other, c) = chain
    return f"{_QUESTION.format(a=a, one=one, other=other)} {b}. {b}'s {other} is {c}.\n\n"
