"""Words and names that generated prompts give to things: as many as a prompt needs, none twice."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator

_ADJECTIVES = (
    "amber ancient bitter bold brave bright calm clever cold coral crisp curly damp dark deep dusty eager early faint "
    "fancy fast fierce gentle giant golden grand happy heavy hollow humble icy ivory jolly keen kind large lazy light "
    "little lone loud lucky mellow mild misty modest narrow noble odd old pale plain proud quick quiet rapid rare ripe "
    "rough royal rusty sharp short shy silent silver simple slow small smooth soft solid sour spare steep stern still "
    "stout strict sunny sweet swift tall tame thin tidy tiny vast vivid warm weary wide wild wise witty young zesty"
)
_NOUNS = (
    "acorn anchor apple arrow badge basket beacon bell bird boat bottle bridge brook button candle canyon castle cat "
    "chair cloud coat comet copper crane crown dish dog door drum eagle engine falcon feather fence field flag flute "
    "forest fox garden gate glove goose hammer harbor hawk helmet hill horse island jacket jewel kettle kite ladder "
    "lake lamp lantern leaf lemon lion maple meadow mirror moon moth mountain needle oak ocean olive orchard otter owl "
    "paper pearl pencil piano pillow pine planet plum pond raven ribbon river road rocket rose saddle sail shell ship "
    "spoon star stone stove stream sword table tiger torch tower tree violin wagon wheel whistle window wolf"
)


def words(rng: random.Random) -> Iterator[str]:
    """Words such as `tame-pearl` without end; after some ten thousand they carry a number."""
    pairs = list(_pairs())
    rng.shuffle(pairs)
    yield from pairs
    for turn in itertools.count(2):
        yield from (f"{pair}-{turn}" for pair in pairs)


def compounds(rng: random.Random) -> Iterator[str]:
    """Words such as `pearlmisty` without end, none twice: short for a tokenizer, and as many as a list may need."""
    pairs = list(_compounds())
    rng.shuffle(pairs)
    yield from pairs
    for turn in itertools.count(2):
        yield from (f"{pair}{turn}" for pair in pairs)


@functools.cache
def _pairs() -> tuple[str, ...]:
    return tuple(f"{adjective}-{noun}" for adjective in _ADJECTIVES.split() for noun in _NOUNS.split())


@functools.cache
def _compounds() -> tuple[str, ...]:
    parts = plain_words()
    return tuple(dict.fromkeys(one + other for one in parts for other in parts if one != other))


def plain_words() -> list[str]:
    """The words that others are put together from."""
    return [*_ADJECTIVES.split(), *_NOUNS.split()]


def nouns() -> list[str]:
    """Those of them that are things."""
    return _NOUNS.split()


def five_digits(rng: random.Random) -> str:
    """A number of five digits, as values of words are."""
    return str(rng.randrange(10**4, 10**5))


def names(rng: random.Random, count: int, *, apart_from: str = "") -> list[str]:
    """Made-up names such as `Gikaz`, all different, none of which is in the text `apart_from` in any case."""
    taken, found = apart_from.lower(), dict[str, None]()
    while len(found) < count:
        name = "".join(rng.choice(letters) for letters in ("bdfgklmnprstvz", "aeiou") * 2) + rng.choice("kpxz")
        if name not in taken:
            found[name.capitalize()] = None
    return list(found)
