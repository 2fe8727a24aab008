"""Haystacks of whole sentences, of exact length in tokens, and things hidden between them.

A haystack is a list of pieces, the token ids of a sentence each, so that nothing is hidden inside a
word. Its start may be cut.
"""

from __future__ import annotations

import bisect
import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from artifacts import HeadwiseError
from profiling.prompts.kind import Request, Span
from profiling.prompts.text_files import cells, read_text
from profiling.prompts.tokens import Encoder, Ids, enough, flat
from profiling.prompts.words import sentences

Haystack = Callable[[int, random.Random], list[Ids]]
# The same few sentences, repeated: nothing in it resembles the hidden pieces.
NOISE = "\nThe hill is steep. The lake is calm. The road is long. We go there. Then we come back."
_SENTENCE_END = re.compile("(?<=[.!?\n])(?=\\s)|(?<=[\u3002\uff01\uff1f])")
# A text without full stops is cut all the same.
_LONGEST = 500
_BATCH = 256


def noise(encode: Encoder) -> Haystack:
    """Repeat the same line."""
    line = encode(NOISE)
    return lambda room, rng: fill(itertools.repeat(line), room)


def written(encode: Encoder, make: Callable[[random.Random], Iterator[str]]) -> Haystack:
    """Texts that are made up as they are needed, each with the space or line break before it."""

    def pieces(rng: random.Random) -> Iterator[Ids]:
        source = make(rng)
        while True:
            yield from encode.each(list(itertools.islice(source, _BATCH)))

    return lambda room, rng: fill(pieces(rng), room)


def filler(encode: Encoder) -> Haystack:
    """Made-up sentences."""
    return written(encode, lambda rng: (" " + sentence.strip() for sentence in sentences(rng)))


@dataclass(frozen=True)
class FileText:
    """The user's text, as a haystack for each of its cells.

    Attributes:
        request: of the prompts.
        pieces: of the whole text. The tokens are those of windows that other tasks make of it.
        bounds: where each piece begins, and the end of the last one.
        cells: one for each prompt.
    """

    request: Request
    pieces: list[Ids]
    bounds: list[int]
    cells: list[Span]

    def within(self, cell: Span, room: int) -> list[Ids]:
        """Pieces of `room` tokens of a cell, up to the end of its last sentence that allows it.

        Raises:
            HeadwiseError: the text has fewer tokens.
        """
        first, end = cell
        if end - first < room:
            raise self.request.too_short(self.bounds[-1], room)
        sentence_end = self.bounds[bisect.bisect_right(self.bounds, end) - 1]
        if sentence_end - room >= first:
            end = sentence_end
        start = end - room
        inside = range(bisect.bisect_right(self.bounds, start) - 1, len(self.pieces))
        pieces = (
            self.pieces[at][max(start - self.bounds[at], 0) : end - self.bounds[at]]
            for at in itertools.takewhile(lambda at: self.bounds[at] < end, inside)
        )
        return [piece for piece in pieces if piece]


def read_file(request: Request) -> FileText:
    """Read the user's text."""
    file = request.file
    text = read_text(file)
    if not text.strip():
        raise HeadwiseError(f"{file.name} is empty")
    sentences_of_text = [
        part[at : at + _LONGEST]
        for part in _SENTENCE_END.split(text)
        for at in range(0, len(part), _LONGEST)
    ]
    pieces = [ids for ids in request.encode.parts(sentences_of_text) if ids]
    bounds = [0, *itertools.accumulate(map(len, pieces))]
    return FileText(request, pieces, bounds, cells(request, bounds[-1]))


def fill(source: Iterable[Ids], room: int) -> list[Ids]:
    """Return pieces of exactly `room` tokens in total; excess is cut from the start."""
    pieces = enough(source, room)
    extra = sum(map(len, pieces)) - room
    while extra > 0:
        cut = min(extra, len(pieces[0]))
        pieces[0] = pieces[0][cut:]
        if not pieces[0]:
            pieces = pieces[1:]
        extra -= cut
    return pieces


def hide(
    hidden: Sequence[Ids], depths: Sequence[float], pieces: Sequence[Ids]
) -> tuple[list[Ids], list[int]]:
    """Put each thing between the two pieces that are nearest to its depth.

    Args:
        hidden: pieces to hide.
        depths: of each, from 0 (after the first piece, which may be cut) to 1 (after the last one).
        pieces: the haystack.

    Returns:
        All pieces, and which of them each hidden one is.
    """
    bounds = [0, *itertools.accumulate(map(len, pieces))]
    places = [max(_nearest(bounds, depth * bounds[-1]), min(1, len(pieces))) for depth in depths]
    items: list[Ids] = []
    at: dict[int, int] = {}
    done = 0
    for which in sorted(range(len(hidden)), key=places.__getitem__):
        items += pieces[done : places[which]]
        done = places[which]
        at[which] = len(items)
        items.append(hidden[which])
    return [*items, *pieces[done:]], [at[which] for which in range(len(hidden))]


def padding(encode: Encoder, room: int) -> Ids:
    """Sentences of `room` tokens, always the same, for what is left of a length."""
    return flat(filler(encode)(room, random.Random("padding")))


def _nearest(bounds: Sequence[int], position: float) -> int:
    at = bisect.bisect_left(bounds, position)
    if at and (at == len(bounds) or position - bounds[at - 1] <= bounds[at] - position):
        return at - 1
    return at
