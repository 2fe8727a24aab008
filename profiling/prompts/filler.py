"""Generated text that says nothing, to hide a pass key in where the user gives no text."""

from __future__ import annotations

import random
from collections.abc import Iterator

_WHO = "the farmer|a traveller|the old clerk|my neighbour|the captain|a young painter|the baker|her brother"
_DID = "walked past|remembered|described|looked for|painted|wrote about|asked about|forgot|returned to|admired"
_WHAT = "the harbour|a broken clock|the north road|an empty house|the market|a letter|the river|the stone bridge"
_WHEN = "before sunrise|in the rain|that winter|after supper|on the way home|without a word|for the last time"
_THEN = "and nobody minded|while the wind rose|as everyone did then|though it was late|because the road was long"


def sentences(rng: random.Random) -> Iterator[str]:
    """Sentences without end, each followed by a space."""
    who, did, what, when, then = (words.split("|") for words in (_WHO, _DID, _WHAT, _WHEN, _THEN))
    while True:
        parts = [rng.choice(who), rng.choice(did), rng.choice(what), rng.choice(when)]
        if rng.random() < 0.5:
            parts.append(rng.choice(then))
        sentence = " ".join(parts)
        yield f"{sentence[0].upper()}{sentence[1:]}. "
