"""MRCR (Vodrahalli et al. 2024; OpenAI 2025): a chat with several identical asks; the answer to one comes again.

A prompt is prefix + padding + turns + last ask. The answers that follow identical asks differ, so that counting asks is
the only way to the right one.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from itertools import product

from profiling.prompts.filler import sentences
from profiling.prompts.filling import laid_out, whole_items
from profiling.prompts.kind import Kind, Parameter, Prompt, Wanted
from profiling.prompts.words import nouns

_FORMS = ["poem", "story", "letter", "riddle", "speech", "song", "recipe", "review"]
_TURN = "User: Write a {} about a {}.\nAssistant: {}\n"
_LAST = (
    "User: Put {mark} before the {nth} {form} about a {topic} that you wrote, say the two together, and nothing else.\n"
    "Assistant:"
)
_NTH = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_MARK, _SENTENCES = 10, 3


def repeated_asks(wanted: Wanted, *, needles: int = 2) -> list[Prompt]:
    """Chats in which one ask comes `needles` times among others; the answer is a random string and one of theirs."""
    encode = wanted.encode

    def one(rng: random.Random) -> Prompt:
        asks = list(product(_FORMS, nouns()))
        form, topic = rng.choice(asks)
        said = _answers(rng)
        right = [next(said) for _ in range(needles)]
        needed = encode.each([_TURN.format(form, topic, answer) for answer in right])
        which, mark = rng.randrange(needles), "".join(rng.choices(string.ascii_letters + string.digits, k=_MARK))
        last = encode(_LAST.format(mark=mark, nth=_NTH[which], form=form, topic=topic))
        room = wanted.room(*needed, last)

        def others() -> Iterator[str]:
            while True:
                ask = rng.choice(asks)
                if ask != (form, topic):
                    yield _TURN.format(*ask, next(said))

        turns = whole_items(encode, others(), room)
        # The same asks keep their order.
        places = sorted(rng.randint(0, len(turns)) for _ in needed)
        for place, turn in reversed(list(zip(places, needed, strict=True))):
            turns.insert(place, turn)
        return Prompt(
            laid_out(wanted, *turns, last),
            mark + right[which],
            metric="marked",
            references=(mark + right[which],),
            choices=tuple(mark + answer for answer in right),
        )

    return wanted.prompts(one)


def _answers(rng: random.Random) -> Iterator[str]:
    """Texts without end, none twice."""
    source, taken = sentences(rng), set[str]()
    while True:
        text = " ".join(next(source).strip() for _ in range(_SENTENCES))
        if text not in taken:
            taken.add(text)
            yield text


KINDS = (
    Kind(
        name="mrcr",
        make=repeated_asks,
        parameters=(Parameter("needles", int, "how often the same is asked for (2)", 1, 8),),
        asks="the answer to the n-th of several identical asks in a chat, once more",
        scored="0 without the random string before it, else the ratio of difflib's SequenceMatcher",
        source="MRCR, Vodrahalli et al. 2024; OpenAI 2025",
    ),
)
