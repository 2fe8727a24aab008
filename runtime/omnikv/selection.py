"""What the filter layers selected, held by the cache of a forward.

Shapes: B batch, C selected tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from torch import Tensor

from runtime.omnikv.bank import Bank
from runtime.omnikv.chunks import ChunkSelection


class Selection:
    """Tokens that a filter layer selected in the forward under way.

    The filter layer is called before the layers that it serves, and clears it first: a call that
    fails leaves nothing that other tokens could use. A copy of it has nothing selected.

    Attributes:
        tokens: of a decode step, (B, C) int32, ascending and padded; None if there are none.
        past: of a decode step, the tokens before its new ones; None without `tokens`.
        chunk: for a chunk of a prompt; None if it sees all of its past.
        banks: keys and values of layers that it serves, where they are in CPU memory.
    """

    def __init__(self, banks: Iterable[Bank] = ()) -> None:
        self.banks = list(banks)
        self.clear()

    def clear(self) -> None:
        """Forget what was selected before."""
        self.tokens: Tensor | None = None
        self.past: int | None = None
        self.chunk: ChunkSelection | None = None

    def select(self, tokens: Tensor, past: int) -> None:
        """Set the tokens of a step; banks start to fetch those of them before `past`."""
        self.tokens = tokens
        self.past = past
        for bank in self.banks:
            bank.fetch(tokens, past)

    def __reduce__(self) -> tuple[type[Self], tuple[list[Bank]]]:
        return type(self), (self.banks,)
