"""RULER's variable tracking (Hsieh et al. 2024, section 3.2): names that hand a value on.

A prompt is prefix + worked example + head + noise with assignments + question.
"""

from __future__ import annotations

import itertools
import random
import string

from artifacts import HeadwiseError
from profiling.prompts import haystacks
from profiling.prompts.kind import RULER, SHARE, Evidence, Parameter, Prompt, Request, task
from profiling.prompts.tokens import Encoder, Ids, flat

_HEAD = (
    "Variables are assigned in the text below, some of them from "
    "others. Keep track of their values.\n"
)
_FIRST = "\nVAR {} = {}"
_NEXT = "\nVAR {} = VAR {}"
_QUESTION = (
    "\n\nWhich variables have the value {value} in the text above? {count} variables have it:"
)
_EXAMPLE_LINES = 5
# Half of the names of three letters that the worked example has.
_MOST_VARIABLES = 26**3 // 2
# What RULER lets a model answer with.
_NEW_TOKENS = 30


@task(
    "vt",
    parameters=(
        Parameter("chains", int, "number of chains of assignments (default 1)", 1, 1000),
        Parameter(
            "hops", int, "assignments from variable to variable in a chain (default 4)", 1, 1000
        ),
    ),
    asks="all variables with one value, which the first has and the others copy",
    metric="all",
    scored=SHARE,
    source=RULER,
)
def variable_tracking(request: Request, *, chains: int = 1, hops: int = 4) -> list[Prompt]:
    """Assign `chains` chains of `hops` hops each; ask for all variables of one chain."""
    variables = chains * (hops + 1)
    if variables > _MOST_VARIABLES:
        raise HeadwiseError(
            f"vt needs chains * (hops + 1) of at most {_MOST_VARIABLES} variables, got "
            f"chains={chains} and hops={hops}, {variables} variables"
        )
    encode = request.encode
    noise = haystacks.noise(encode)

    def make_prompt(rng: random.Random) -> Prompt:
        example = _example(encode, chains, hops, rng)
        assigned = _chains(chains, hops, 5, rng)
        value, names = rng.choice(assigned)
        hidden = [line for chain in assigned for line in _lines(*chain)]
        depths = [
            depth for _ in assigned for depth in sorted(rng.random() for _ in range(hops + 1))
        ]
        ids_hidden = encode.each(hidden)
        head = example + encode(_HEAD)
        question = encode(_QUESTION.format(value=value, count=len(names)))
        room = request.room(head, question, *ids_hidden)
        items, at_items = haystacks.hide(ids_hidden, depths, noise(room, rng))
        ids, spans = request.assemble(head, items, question)
        places = [spans[at_items[hidden.index(line)]] for line in _lines(value, names)]
        evidence = [
            Evidence(f" {name}", span, lead="," if at else "")
            for at, (name, span) in enumerate(zip(names, places, strict=True))
        ]
        return Prompt.answered_by(ids, *evidence, references=tuple(names), new_tokens=_NEW_TOKENS)

    return request.prompts(make_prompt)


def _chains(count: int, hops: int, letters: int, rng: random.Random) -> list[tuple[str, list[str]]]:
    """A value and the variables that get it, for each chain; no value and no variable twice."""
    drawn = dict[str, None]()
    while len(drawn) < count * (hops + 1):
        drawn["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    names = list(drawn)
    values = rng.sample(range(10**4, 10**5), count)
    return [
        (str(value), names[at * (hops + 1) : (at + 1) * (hops + 1)])
        for at, value in enumerate(values)
    ]


def _lines(value: str, names: list[str]) -> list[str]:
    nexts = [_NEXT.format(name, before) for before, name in itertools.pairwise(names)]
    return [_FIRST.format(names[0], value), *nexts]


def _example(encode: Encoder, chains: int, hops: int, rng: random.Random) -> Ids:
    """Work an example; its variables have three letters, so that none is asked for."""
    assigned = _chains(chains, hops, 3, rng)
    value, names = assigned[0]
    lines = [line for chain in assigned for line in _lines(*chain)]
    noise = [encode(haystacks.NOISE)] * _EXAMPLE_LINES
    depths = [depth for _ in assigned for depth in sorted(rng.random() for _ in range(hops + 1))]
    items, _ = haystacks.hide(encode.each(lines), depths, noise)
    question = _QUESTION.format(value=value, count=len(names)) + " " + ", ".join(names) + "\n\n"
    return encode(_HEAD) + flat(items) + encode(question)
