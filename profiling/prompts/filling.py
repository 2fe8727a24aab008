"""Prompts of whole items: as many as fit a length, and what they leave is padding at the start.

A prompt is prefix + padding + parts. Making it takes time in proportion to its length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from profiling.prompts.haystacks import padding
from profiling.prompts.kind import Wanted
from profiling.prompts.tokens import Encoder, Ids

_BATCH = 32


def whole_items(encode: Encoder, items: Iterable[str], room: int) -> list[Ids]:
    """The ids of the first items, all of each, that fit `room` tokens together."""
    source, taken = iter(items), list[Ids]()
    while batch := list(islice(source, _BATCH)):
        for ids in encode.each(batch):
            if len(ids) > room:
                return taken
            taken.append(ids)
            room -= len(ids)
    return taken


def laid_out(wanted: Wanted, *parts: Ids) -> Ids:
    """Exactly as many ids as wanted: prefix, padding, and the parts.

    Raises:
        HeadwiseError: the parts alone take more.
    """
    return wanted.ids(padding(wanted.encode, wanted.room(*parts)), *parts)


def behind_examples(wanted: Wanted, head: Ids, solved: Iterator[str], question: Ids) -> Ids:
    """Exactly as many ids as wanted: the head, as many solved examples as fit, at least one, and the question.

    Raises:
        HeadwiseError: one example and the question take more.
    """
    first = wanted.encode(next(solved))
    examples = whole_items(wanted.encode, solved, wanted.room(head, first, question))
    return laid_out(wanted, head, first, *examples, question)
