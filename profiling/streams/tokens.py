"""Streams: tokens of a long text, or lines with questions about earlier ones (StreamEval)."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from artifacts import HeadwiseError
from profiling.prompts.texts import read_ids
from profiling.prompts.tokens import Encoder, Ids
from profiling.prompts.words import words

# StreamingLLM, section 4.3: after so many lines a question about the line so far before.
EVERY = 10
BACK = 20
_BATCH = 50
_HEAD = "Below is a list of facts, one a line. Now and then one of them is asked for again.\n\n"
_FACT = "The value of {} is {}.\n"
_ASKED = "\nThe value of {} is"
_END = ".\n\n"


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenStream:
    """Tokens 0 to N, of which all but the last are fed, each to predict the next.

    Attributes:
        probes: half-open spans of tokens that every method is asked to predict: what methods are
            compared on.
        repeats: how often the text had to be begun again.
    """

    ids: tuple[int, ...]
    probes: tuple[tuple[int, int], ...]
    name: str
    repeats: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens that are fed."""
        return len(self.ids) - 1

    @property
    def sha256(self) -> str:
        """Over the ids, in hexadecimal."""
        return hashlib.sha256(array("q", self.ids).tobytes()).hexdigest()


def text_stream(encode: Encoder, file: Path, tokens: int, stride: int) -> TokenStream:
    """The first tokens of a text, begun again where it ends; every `stride`-th token is a probe.

    Raises:
        HeadwiseError: the file is empty, or not UTF-8 text.
    """
    text = read_ids(encode, file)
    ids = list(encode.prefix)
    times = -(-max(tokens + 1 - len(ids), 0) // len(text))
    ids += text * times
    probes = tuple((at, at + 1) for at in range(stride, tokens + 1, stride))
    return TokenStream(
        ids=tuple(ids[: tokens + 1]),
        probes=probes,
        name=f"text:{file.name}",
        repeats=max(times - 1, 0),
    )


def stream_eval(encode: Encoder, tokens: int, seed: int) -> TokenStream:
    """Stream facts, one a line; every 10 lines ask for one 20 lines before the newest.

    The stream goes on with the right answer, so that later ones do not suffer from a wrong one. A
    probe is an answer.
    """
    rng = random.Random(f"{seed} stream_eval")
    ids = [*encode.prefix, *encode(_HEAD)]
    probes = list[tuple[int, int]]()
    for piece, span in _pieces(encode, rng):
        if span is not None:
            probes.append((len(ids) + span[0], len(ids) + span[1]))
        ids += piece
        if len(ids) > tokens:
            break
    whole = tuple(span for span in probes if span[1] <= tokens + 1)
    if not whole:
        raise HeadwiseError(
            f"--tokens {tokens} is too small for stream_eval: its first question comes later"
        )
    return TokenStream(ids=tuple(ids[: tokens + 1]), probes=whole, name="stream_eval")


def _pieces(encode: Encoder, rng: random.Random) -> Iterator[tuple[Ids, tuple[int, int] | None]]:
    """Lines and questions as tokens; of a question also where in it the answer lies."""
    word = words(rng)
    facts = list[tuple[str, str]]()
    while True:
        new = [(name, str(rng.randrange(10**4, 10**5))) for name in islice(word, _BATCH)]
        lines = encode.each([_FACT.format(*fact) for fact in new])
        for fact, line in zip(new, lines, strict=True):
            facts.append(fact)
            yield line, None
            if len(facts) % EVERY == 0 and len(facts) > BACK:
                name, number = facts[-1 - BACK]
                question = _ASKED.format(name)
                whole, asked, answered = encode.each(
                    [f"{question} {number}{_END}", question, f"{question} {number}"]
                )
                yield whole, (_common(whole, asked), _common(whole, answered))


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common start; a piece may have other tokens where a text goes on."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))
