"""Prompts of whole items: as many as fit a length, and what they leave is padding at the start.

A prompt is prefix + padding + parts. Making it takes time in proportion to its length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from artifacts import HeadwiseError
from profiling.prompts.haystacks import padding
from profiling.prompts.tokens import Encoder, Ids

_BATCH = 32


def room_for(encode: Encoder, task: str, length: int, *parts: Ids, least: int = 0) -> int:
    """How many of `length` tokens are left beside the prefix and these parts.

    Raises:
        HeadwiseError: fewer than `least`.
    """
    room = length - len(encode.prefix) - sum(map(len, parts))
    if room < least:
        raise HeadwiseError(f"length {length} is too small for {task}: give at least {length - room + least}")
    return room


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


def laid_out(encode: Encoder, task: str, length: int, *parts: Ids) -> Ids:
    """Exactly `length` ids: prefix, padding, and the parts.

    Raises:
        HeadwiseError: the parts alone take more.
    """
    left = room_for(encode, task, length, *parts)
    return (*encode.prefix, *padding(encode, left), *flat(parts))


def behind_examples(encode: Encoder, task: str, length: int, head: Ids, solved: Iterator[str], question: Ids) -> Ids:
    """Exactly `length` ids: the head, as many solved examples as fit, at least one, and the question.

    Raises:
        HeadwiseError: one example and the question take more.
    """
    first = encode(next(solved))
    room = room_for(encode, task, length, head, first, question)
    examples = (first, *whole_items(encode, solved, room))
    return laid_out(encode, task, length, head, flat(examples), question)


def flat(parts: Iterable[Ids]) -> Ids:
    """The ids of all parts in turn."""
    return tuple(token for part in parts for token in part)
