"""Prompts are put together from token ids, never tokenised again: their length is exact with any
tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

Ids = tuple[int, ...]
# The ids of long texts, for as long as their tokenizer lives.
_WHOLE: WeakKeyDictionary[Any, dict[Callable[[], str], Ids]] = WeakKeyDictionary()


class Encoder:
    """A tokenizer seen as two things: text to ids without special tokens, and what it puts before a
    sequence."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = _backend(tokenizer)

    def __call__(self, text: str) -> Ids:
        """The ids of a text, without special tokens; a text longer than the model's positions is no
        mistake."""
        return self.each([text])[0]

    def whole(self, text: Callable[[], str]) -> Ids:
        """The ids of a long text that is the same whenever it is made; encoded once for a
        tokenizer."""
        known = _WHOLE.setdefault(self._tokenizer, {})
        if text not in known:
            known[text] = self(text())
        return known[text]

    def each(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text."""
        if self._backend is not None:
            return [
                tuple(one.ids)
                for one in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
            ]
        found = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [tuple(ids) for ids in found]

    @functools.cached_property
    def prefix(self) -> Ids:
        """What the tokenizer starts a sequence with, such as a BOS token; empty where it adds
        nothing."""
        bare = self("a")
        whole = tuple(self._tokenizer("a", verbose=False)["input_ids"])
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start]
        return ()


def _backend(tokenizer: Any) -> Any:
    """The compiled tokenizer inside, which gives the same ids in half the time; None where there
    may be more to it."""
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


def flat(parts: Iterable[Ids]) -> Ids:
    """The ids of all parts in turn."""
    return tuple(token for part in parts for token in part)
