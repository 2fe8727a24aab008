"""MRCR (Vodrahalli et al. 2024; OpenAI 2025): a chat with several identical asks; the answer to one comes again.

A prompt is prefix + padding + turns + last ask. The answers that follow identical asks differ, so that counting asks is
the only way to the right one.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from profiling.prompts.filler import sentences
from profiling.prompts.filling import flat, laid_out, room_for, whole_items
from profiling.prompts.prompt import Prompt
from profiling.prompts.tokens import Encoder
from profiling.prompts.words import nouns

_TASK = "mrcr"
_FORMS = ["poem", "story", "letter", "riddle", "speech", "song", "recipe", "review"]
_TURN = "User: Write a {} about a {}.\nAssistant: {}\n"
_LAST = (
    "User: Put {mark} before the {nth} {form} about a {topic} that you wrote, say the two together, and nothing else.\n"
    "Assistant:"
)
_NTH = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_MARK, _SENTENCES = 10, 3


def repeated_asks(
    encode: Encoder, file: Path | None, length: int, samples: int, seed: int, *, needles: int = 2
) -> list[Prompt]:
    """Chats in which one ask comes `needles` times among others; the answer is a random string and one of theirs."""

    def one(rng: random.Random) -> Prompt:
        asks = list(product(_FORMS, nouns()))
        form, topic = rng.choice(asks)
        said = _answers(rng)
        right = [next(said) for _ in range(needles)]
        needed = encode.each([_TURN.format(form, topic, answer) for answer in right])
        which, mark = rng.randrange(needles), "".join(rng.choices(string.ascii_letters + string.digits, k=_MARK))
        last = encode(_LAST.format(mark=mark, nth=_NTH[which], form=form, topic=topic))
        room = room_for(encode, _TASK, length, *needed, last)

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
            laid_out(encode, _TASK, length, flat(turns), last),
            mark + right[which],
            metric="marked",
            references=(mark + right[which],),
            choices=tuple(mark + answer for answer in right),
        )

    return [one(random.Random(f"{seed} {_TASK} {i}")) for i in range(samples)]


def _answers(rng: random.Random) -> Iterator[str]:
    """Texts without end, none twice."""
    source, taken = sentences(rng), set[str]()
    while True:
        text = " ".join(next(source).strip() for _ in range(_SENTENCES))
        if text not in taken:
            taken.add(text)
            yield text
