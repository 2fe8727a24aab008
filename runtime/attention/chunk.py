"""Chunk: the new tokens of one sequence in a call, in transformers and in vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Chunk(NamedTuple):
    """New tokens of one sequence: `q_len` queries from q_start on, the last of its `k_len` keys.

    Attributes:
        row: of the batch; the number of the request in a step of vLLM.
        k_start: slot of its first key.
        prompt: tokens of the request's prompt, 0 where no layer asks for it. Where it is known, a
            chunk is all prompt or all generated.
    """

    row: int
    q_start: int
    q_len: int
    k_start: int
    k_len: int
    prompt: int = 0

    @property
    def generated(self) -> bool:
        """True if its tokens are known to come after the prompt."""
        return 0 < self.prompt < self.k_len

    @property
    def queries(self) -> slice:
        """Its queries in the call."""
        return slice(self.q_start, self.q_start + self.q_len)

    @property
    def slots(self) -> tuple[slice, slice, slice]:
        """Its row, its queries and its keys."""
        keys = slice(self.k_start, self.k_start + self.k_len)
        return slice(self.row, self.row + 1), self.queries, keys

    def cut(self, limit: int) -> Iterator[Chunk]:
        """Split into chunks of at most `limit` tokens."""
        past = self.k_len - self.q_len
        for begin in range(0, self.q_len, limit):
            end = min(begin + limit, self.q_len)
            start = self.q_start + begin
            yield self._replace(q_start=start, q_len=end - begin, k_len=past + end)
