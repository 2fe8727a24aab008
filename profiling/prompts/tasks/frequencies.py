"""RULER's aggregation tasks (Hsieh et al. 2024, section 3.3): the most frequent words.

A prompt is prefix + padding + worked example + head + words + question. What whole words leave is
padding.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice

from artifacts import HeadwiseError
from profiling.prompts.haystacks import padding
from profiling.prompts.kind import RULER, SHARE, Parameter, Prompt, Request, task
from profiling.prompts.tokens import Encoder, Ids, flat
from profiling.prompts.words import compounds

_LIST_HEAD = (
    "\nBelow is a numbered list of words. Some of them come up more often than the others.\n\n"
)
_LIST_QUESTION = (
    "\n\nWhich {count} words come up most often in the list above? The "
    "{count} words that come up most often are:"
)
_CODE_HEAD = (
    "\nThe text below is written in code words. Count how often each comes "
    "up; the dots stand for nothing.\n\n"
)
_CODE_QUESTION = (
    "\n\nWhich three code words come up most often in the text above, the dots "
    "apart? The three most frequent words are"
)
_DOTS = "..."
_LETTERS = 6
# RULER has a smaller list and example below this length.
_SHORT = 4096
_BATCH = 256
_TOKENS_A_WORD = 50
# What RULER lets a model answer with.
_LIST_NEW_TOKENS = 120
_CODE_NEW_TOKENS = 50


@task(
    "cwe",
    parameters=(
        Parameter("words", int, "number of common words (default 10)", 1, 1000),
        Parameter(
            "common", int, "occurrences of a common word (default 30; 6 below 4096 tokens)", 2
        ),
        Parameter(
            "uncommon", int, "occurrences of any other word (default 3; 1 below 4096 tokens)", 1
        ),
    ),
    asks="the most common words of a list, ten by default",
    metric="all",
    scored=SHARE,
    source=RULER,
)
def common_words(
    request: Request, *, words: int = 10, common: int | None = None, uncommon: int | None = None
) -> list[Prompt]:
    """List `words` words `common` times each among others, `uncommon` times each.

    By default 30 and 3 times, or 6 and 1 in short prompts.
    """
    encode = request.encode
    length = request.length
    short = length < _SHORT
    often, seldom = (6, 1) if short else (30, 3)
    often = common or often
    seldom = uncommon or seldom
    if often <= seldom:
        raise HeadwiseError(
            f"cwe needs common above uncommon, got common={often} and uncommon={seldom}"
        )
    size, example_often, example_seldom = (20, 3, 1) if short else (40, 10, 3)
    numbers = _Numbers(encode)
    head = encode(_LIST_HEAD)
    question = encode(_LIST_QUESTION.format(count=words))

    def make_prompt(rng: random.Random) -> Prompt:
        source = compounds(rng)
        example = _encoded(encode, islice(source, max(size, words + 1)))
        answered = encode(f" {_numbered(list(example)[:words])}\n")
        listed = _shuffled(numbers, example, words, example_often, example_seldom, rng)
        before = (*head, *listed, *question, *answered, *head)
        room = length - len(encode.prefix) - len(before) - len(question)
        encoded, left = _fitting(encode, source, numbers, words, often, seldom, room)
        if left < 0:
            raise request.too_small(f"give at least {length - left}")
        body = _shuffled(numbers, encoded, words, often, seldom, rng)
        right = tuple(encoded)[:words]
        rest = padding(encode, room - len(body))
        ids, _ = request.assemble((), [rest, before, body], question)
        return Prompt(
            ids,
            _numbered(right),
            references=right,
            new_tokens=_LIST_NEW_TOKENS,
        )

    return request.prompts(make_prompt)


@task(
    "fwe",
    parameters=(Parameter("alpha", float, "counts fall as 1 / rank^alpha (default 2)", 1.01, 4),),
    asks="the three most frequent code words of a text",
    metric="all",
    scored=SHARE,
    source=RULER,
)
def frequent_words(request: Request, *, alpha: float = 2.0) -> list[Prompt]:
    """Repeat code words by Zeta: counts fall with rank to the power `alpha`; rank one is dots."""
    encode = request.encode
    length = request.length
    head = encode(_CODE_HEAD)
    question = encode(_CODE_QUESTION)
    room = length - len(encode.prefix) - len(head) - len(question)

    def make_prompt(rng: random.Random) -> Prompt:
        words = [_DOTS, *_coded(max(4, length // _TOKENS_A_WORD), rng)]
        ids = list(_encoded(encode, words).values())

        def counts(top: int) -> list[int]:
            return [int(top / rank**alpha) for rank in range(1, len(words) + 1)]

        def taken(top: int) -> int:
            return sum(times * len(word) for times, word in zip(counts(top), ids, strict=True))

        def distinct(top: int) -> bool:
            return counts(top)[3] > counts(top)[4]

        # From here on the fifth rank comes up at all.
        minimum = next(top for top in count(math.ceil(5**alpha)) if distinct(top))
        if taken(minimum) > room:
            raise request.too_small(f"give at least {length - room + taken(minimum)}")
        low = minimum
        high = max(minimum, room) + 1
        while high - low > 1:
            middle = (low + high) // 2
            if taken(middle) <= room:
                low = middle
            else:
                high = middle
        while not distinct(low):
            low -= 1
        text = [word for word, times in zip(ids, counts(low), strict=True) for _ in range(times)]
        rng.shuffle(text)
        right = tuple(words[1:4])
        rest = padding(encode, room - sum(map(len, text)))
        whole, _ = request.assemble((), [rest, head, *text], question)
        return Prompt(
            whole,
            ", ".join(right),
            references=right,
            new_tokens=_CODE_NEW_TOKENS,
        )

    return request.prompts(make_prompt)


class _Numbers:
    """The ids of ` 1.`, ` 2.` and so on, made when they are asked for."""

    def __init__(self, encode: Encoder) -> None:
        self._encode = encode
        self._made: list[Ids] = []

    def __getitem__(self, number: int) -> Ids:
        while len(self._made) < number:
            first = len(self._made) + 1
            self._made += self._encode.each([f" {n}." for n in range(first, first + _BATCH)])
        return self._made[number - 1]

    def tokens(self, first: int, last: int) -> int:
        return sum(len(self[number]) for number in range(first, last + 1))


def _fitting(
    encode: Encoder,
    source: Iterator[str],
    numbers: _Numbers,
    words: int,
    often: int,
    seldom: int,
    room: int,
) -> tuple[dict[str, Ids], int]:
    """Take the words that fit, common ones first, and return the tokens left (< 0: none fits)."""
    encoded = _encoded(encode, islice(source, words))
    listed = often * words
    left = room - often * sum(map(len, encoded.values())) - numbers.tokens(1, listed)
    while True:
        for word, ids in _encoded(encode, islice(source, _BATCH)).items():
            taken = seldom * len(ids) + numbers.tokens(listed + 1, listed + seldom)
            if taken > left:
                if len(encoded) <= words:
                    left -= taken
                return encoded, left
            encoded[word] = ids
            left = left - taken
            listed = listed + seldom


def _shuffled(
    numbers: _Numbers,
    encoded: dict[str, Ids],
    words: int,
    often: int,
    seldom: int,
    rng: random.Random,
) -> Ids:
    """Number the shuffled list: `words` words `often` times each, the others `seldom`."""
    items = [
        ids
        for at, ids in enumerate(encoded.values())
        for _ in range(often if at < words else seldom)
    ]
    rng.shuffle(items)
    return flat([part for at, ids in enumerate(items, start=1) for part in (numbers[at], ids)])


def _encoded(encode: Encoder, words: Iterable[str]) -> dict[str, Ids]:
    listed = list(words)
    return dict(zip(listed, encode.each([f" {word}" for word in listed]), strict=True))


def _coded(number: int, rng: random.Random) -> list[str]:
    coded = dict[str, None]()
    while len(coded) < number:
        coded["".join(rng.choices(string.ascii_lowercase, k=_LETTERS))] = None
    return list(coded)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{at}. {word}" for at, word in enumerate(words, start=1))
