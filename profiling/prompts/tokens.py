"""Token ids of prompts, joined and never tokenised again: lengths are exact."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakKeyDictionary

Ids = tuple[int, ...]
# The ids of long texts, for as long as their tokenizer lives.
_WHOLE: WeakKeyDictionary[Any, dict[Callable[[], str], Ids]] = WeakKeyDictionary()


class Encoder:
    """A tokenizer as text to ids without special tokens, and the prefix of a sequence."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = _backend(tokenizer)

    def __call__(self, text: str) -> Ids:
        """Encode a text without special tokens, however long."""
        return self.each([text])[0]

    def whole(self, text: Callable[[], str]) -> Ids:
        """Encode a long text that is always the same, once for a tokenizer."""
        cached = _WHOLE.setdefault(self._tokenizer, {})
        if text not in cached:
            cached[text] = self(text())
        return cached[text]

    def parts(self, parts: Sequence[str]) -> list[Ids]:
        """Return the ids of a text, cut between its parts.

        A token that reaches into the next part belongs to the one that it starts in. Tokenizers
        that do not report where their tokens start encode each part separately.
        """
        if self._backend is None:
            return self.each(parts)
        encoding = self._backend.encode("".join(parts), add_special_tokens=False)
        ids = encoding.ids
        starts = [start for start, _ in encoding.offsets]
        cuts = [bisect_left(starts, end) for end in accumulate(map(len, parts), initial=0)]
        cuts[-1] = len(starts)
        return [tuple(ids[start:end]) for start, end in pairwise(cuts)]

    def each(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text."""
        if self._backend is not None:
            return [
                tuple(encoding.ids)
                for encoding in self._backend.encode_batch_fast(
                    list(texts), add_special_tokens=False
                )
            ]
        ids_of_texts = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        return [tuple(ids) for ids in ids_of_texts]

    @functools.cached_property
    def prefix(self) -> Ids:
        """Ids that the tokenizer starts a sequence with, such as a BOS token."""
        bare = self("a")
        whole = tuple(self._tokenizer("a", verbose=False)["input_ids"])
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start]
        return ()


def _backend(tokenizer: Any) -> Any:
    """The compiled tokenizer, which returns the same ids in half the time; None if unsure."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    of = type(tokenizer)
    plain = PreTrainedTokenizerFast
    if (of.__call__, getattr(of, "_encode_plus", None)) != (
        PreTrainedTokenizerBase.__call__,
        plain._encode_plus,
    ):
        return None
    # It keeps the truncation and padding of the last call: here none.
    tokenizer("a", verbose=False)
    return tokenizer.backend_tokenizer


def enough(source: Iterable[Ids], room: int) -> list[Ids]:
    """Take parts until they have `room` tokens, the last one whole."""
    parts = iter(source)
    taken: list[Ids] = []
    while room > 0 and (part := next(parts, None)) is not None:
        taken.append(part)
        room -= len(part)
    return taken


def flat(parts: Iterable[Ids]) -> Ids:
    """The ids of all parts, one after the other."""
    return tuple(token for part in parts for token in part)
