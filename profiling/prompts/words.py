"""Words, names and sentences that generated prompts are made of: as many as a prompt needs."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator

_ADJECTIVES = (
    "amber ancient bitter bold brave bright calm clever cold coral crisp curly damp dark deep "
    "dusty eager early faint "
    "fancy fast fierce gentle giant golden grand happy heavy hollow humble icy ivory jolly keen "
    "kind large lazy light "
    "little lone loud lucky mellow mild misty modest narrow noble odd old pale plain proud quick "
    "quiet rapid rare ripe "
    "rough royal rusty sharp short shy silent silver simple slow small smooth soft solid sour "
    "spare steep stern still "
    "stout strict sunny sweet swift tall tame thin tidy tiny vast vivid warm weary wide wild wise "
    "witty young zesty"
)
_NOUNS = (
    "acorn anchor apple arrow badge basket beacon bell bird boat bottle bridge brook button candle "
    "canyon castle cat "
    "chair cloud coat comet copper crane crown dish dog door drum eagle engine falcon feather "
    "fence field flag flute "
    "forest fox garden gate glove goose hammer harbor hawk helmet hill horse island jacket jewel "
    "kettle kite ladder "
    "lake lamp lantern leaf lemon lion maple meadow mirror moon moth mountain needle oak ocean "
    "olive orchard otter owl "
    "paper pearl pencil piano pillow pine planet plum pond raven ribbon river road rocket rose "
    "saddle sail shell ship "
    "spoon star stone stove stream sword table tiger torch tower tree violin wagon wheel whistle "
    "window wolf"
)
_WHO = (
    "the farmer|a traveller|the old clerk|my neighbour|the captain|a "
    "young painter|the baker|her brother"
)
_DID = (
    "walked past|remembered|described|looked for|painted|wrote "
    "about|asked about|forgot|returned to|admired"
)
_WHAT = (
    "the harbour|a broken clock|the north road|an empty house|the "
    "market|a letter|the river|the stone bridge"
)
_WHEN = (
    "before sunrise|in the rain|that winter|after supper|on the way "
    "home|without a word|for the last time"
)
_THEN = (
    "and nobody minded|while the wind rose|as everyone did then|though it "
    "was late|because the road was long"
)


def sentences(rng: random.Random) -> Iterator[str]:
    """Sentences that say nothing, without end, each followed by a space."""
    who, did, object_, when, then = (
        words.split("|") for words in (_WHO, _DID, _WHAT, _WHEN, _THEN)
    )
    while True:
        parts = [rng.choice(who), rng.choice(did), rng.choice(object_), rng.choice(when)]
        if rng.random() < 0.5:
            parts.append(rng.choice(then))
        sentence = " ".join(parts)
        yield f"{sentence[0].upper()}{sentence[1:]}. "


def words(rng: random.Random) -> Iterator[str]:
    """Words such as `tame-pearl` without end; after some ten thousand they carry a number."""
    pairs = list(_pairs())
    rng.shuffle(pairs)
    yield from pairs
    for turn in itertools.count(2):
        yield from (f"{pair}-{turn}" for pair in pairs)


def compounds(rng: random.Random) -> Iterator[str]:
    """Yield words such as `pearlmisty` without end, none twice, each of few tokens."""
    pairs = list(_compounds())
    rng.shuffle(pairs)
    yield from pairs
    for turn in itertools.count(2):
        yield from (f"{pair}{turn}" for pair in pairs)


@functools.cache
def _pairs() -> tuple[str, ...]:
    return tuple(
        f"{adjective}-{noun}" for adjective in _ADJECTIVES.split() for noun in _NOUNS.split()
    )


@functools.cache
def _compounds() -> tuple[str, ...]:
    parts = [*_ADJECTIVES.split(), *_NOUNS.split()]
    return tuple(
        dict.fromkeys(first + second for first in parts for second in parts if first != second)
    )


def five_digits(rng: random.Random) -> str:
    """A number of five digits, as values of words are."""
    return str(rng.randrange(10**4, 10**5))


def names(rng: random.Random, count: int, *, apart_from: str = "") -> list[str]:
    """Make up different names such as `Gikaz`, none of them in the text `apart_from`."""
    taken = apart_from.lower()
    result = dict[str, None]()
    while len(result) < count:
        name = "".join(
            rng.choice(letters) for letters in ("bdfgklmnprstvz", "aeiou") * 2
        ) + rng.choice("kpxz")
        if name not in taken:
            result[name.capitalize()] = None
    return list(result)
