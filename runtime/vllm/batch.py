"""A step's batch as vLLM makes it, parted into what is served sparsely and what densely.

Shapes: R requests of the step, T tokens of all of them, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.attention.state import MIN_QUERIES, enough_queries

# The attribute of a parent's metadata that holds the Batch of the layers that are served here.
KEY = "headwise"


class Piece(NamedTuple):
    """A prompt, or a chunk of one: the `q_len` tokens from row `q_start` on are the last of `k_len` of a request.

    prompt: tokens of the request's prompt, 0 where no layer asks for that; a piece is all prompt or all behind it then.
    """

    request: int
    q_start: int
    q_len: int
    k_len: int
    prompt: int = 0

    @property
    def generated(self) -> bool:
        """Whether its tokens come after the prompt, known only where the prompt's length is."""
        return 0 < self.prompt < self.k_len

    @property
    def rows(self) -> slice:
        return slice(self.q_start, self.q_start + self.q_len)


class Few(NamedTuple):
    """Requests with the same few new tokens, which are served together.

    rows: which of the T are theirs. table (n, N) and ends (n,) int32: their pages, and how many keys they have. k_len:
    at most so many keys; None where it may be any number, since the step is captured to be replayed with others.
    kept: see kept_by.
    """

    pieces: tuple[Piece, ...]
    q_len: int
    rows: slice | Tensor
    table: Tensor
    ends: Tensor
    k_len: int | None
    kept: dict[Any, Tensor]

    def pages(self, size: int) -> Tensor:
        """Of the block table, with pages of `size` tokens, what is in use."""
        return self.table if self.k_len is None else self.table[:, : -(-self.k_len // size)]

    def parts(self, most: int) -> Iterator[tuple[slice, Few]]:
        """At most so many of the n requests at a time, and which ones they are."""
        for begin in range(0, len(self.ends), most):
            some = slice(begin, min(begin + most, len(self.ends)))
            at = slice(some.start * self.q_len, some.stop * self.q_len)
            if isinstance(self.rows, slice):
                rows: slice | Tensor = slice(self.rows.start + at.start, self.rows.start + at.stop)
            else:
                rows = self.rows[at]
            yield some, self._replace(rows=rows, table=self.table[some], ends=self.ends[some], kept={})

    def kept_by(self, policy: Any, find: Callable[[], Tensor]) -> Tensor:
        """The tokens that a layer with this policy has of them, found by the first such layer of the step."""
        if policy not in self.kept:
            self.kept[policy] = find()
        return self.kept[policy]


def few_of(
    pieces: Sequence[Piece], table: Tensor, lengths: Tensor | None = None, *, captured: bool = False
) -> tuple[Few, ...]:
    """These requests, one group for each number of new tokens.

    table, lengths: of all requests of the step, on the device. Where requests lie together, parts of both are taken as
    they are, so that a step can be replayed; without lengths these are the pieces'.
    """
    groups: dict[int, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(piece.q_len, []).append(piece)
    found = []
    for q_len, some in groups.items():
        numbers = [piece.request for piece in some]
        requests: slice | Tensor = slice(numbers[0], numbers[-1] + 1)
        if numbers != list(range(numbers[0], numbers[-1] + 1)):
            requests = moved(torch.tensor(numbers), table)
        k_lens = [piece.k_len for piece in some]
        ends = moved(torch.tensor(k_lens, dtype=torch.int32), table) if lengths is None else lengths[requests]
        k_len = None if captured else max(k_lens)
        found.append(Few(tuple(some), q_len, moved(rows_of(some), table), table[requests], ends, k_len, {}))
    return tuple(found)


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """A step of the layers that are served here.

    every: all requests of the step. pieces: prompts, or chunks of some, by patterns. chosen: decode by chosen tokens.
    lengths: (R,) int32, the keys of each request, on the device; None where the pieces' own are right. captured: the
    step is to be replayed for other requests.
    """

    every: tuple[Piece, ...] = ()
    pieces: tuple[Piece, ...] = ()
    chosen: tuple[Few, ...] = ()
    block_table: Tensor
    lengths: Tensor | None = None
    captured: bool = False
    _left: dict[tuple[int, ...], tuple[Piece, ...]] = field(default_factory=dict)
    _few: dict[tuple[Piece, ...], tuple[Few, ...]] = field(default_factory=dict)

    def left(self, served: Sequence[Piece]) -> tuple[Piece, ...]:
        """The requests beside those that are served and those known to be generated, once for all layers alike."""
        key = tuple(piece.q_start for piece in served)
        if key not in self._left:
            done = set(served)
            self._left[key] = tuple(piece for piece in self.every if piece not in done and not piece.generated)
        return self._left[key]

    def few(self, pieces: tuple[Piece, ...]) -> tuple[Few, ...]:
        """These requests, made once for all layers."""
        if pieces not in self._few:
            self._few[pieces] = few_of(pieces, self.block_table, self.lengths, captured=self.captured)
        return self._few[pieces]

    def pages(self, piece: Piece, size: int) -> Tensor:
        """The pages (N,) of a request, of `size` tokens each."""
        return self.block_table[piece.request, : -(-piece.k_len // size)]


def requests_of(common: Any, exact: Callable[[int], bool] = lambda _: False) -> tuple[Piece, ...]:
    """The requests of a step, by vLLM's CommonAttentionMetadata; none where it is not plainly causal.

    Lengths come from the host, but where it has none, or only bounds and they have to be exact: then from the device.
    exact: whether that is so where a request has this many new tokens.
    """
    if special(common):
        return ()
    spans = list(pairwise(common.query_start_loc_cpu.tolist()[: common.num_reqs + 1]))
    host = common.seq_lens_cpu_upper_bound
    k_lens = common.seq_lens if host is None or any(exact(end - start) for start, end in spans) else host
    found = zip(spans, k_lens.tolist(), strict=False)
    return tuple(Piece(i, start, end - start, k_len) for i, ((start, end), k_len) in enumerate(found) if end > start)


def prefills_of(common: Any, every: Sequence[Piece]) -> list[Piece]:
    """Those of a step's requests that are prefills: several tokens, unless they are few and drafts to verify."""
    told = common.is_prefilling
    known = told is not None and told.device.type == "cpu"
    drafts = {request for request, prefills in enumerate(told.tolist()) if not prefills} if known else set()
    several = (p for p in every if p.q_len > 1 and not p.generated)
    return [p for p in several if p.q_len >= MIN_QUERIES or p.request not in drafts]


def parted_at_prompts(every: Sequence[Piece], prompts: Sequence[int]) -> tuple[Piece, ...]:
    """The requests of a step with the lengths of their prompts: one that computes more than its prompt is two pieces.

    prompts: by request.
    """
    found = []
    for piece in every:
        prompt = prompts[piece.request]
        behind = piece.k_len - prompt
        if 0 < behind < piece.q_len:
            found.append(piece._replace(q_len=piece.q_len - behind, k_len=prompt, prompt=prompt))
            piece = Piece(piece.request, piece.q_start + piece.q_len - behind, behind, piece.k_len)
        found.append(piece._replace(prompt=prompt))
    return tuple(found)


def special(common: Any) -> bool:
    """Whether a step is another than plainly causal attention of all its requests."""
    parts = (common.mm_req_doc_ranges, common.rswa_prefix_lens, common.logits_indices_padded)
    return common.causal is not True or any(part is not None for part in parts)


def is_long(piece: Piece, dense_below: int, dense_tail: int) -> bool:
    """Whether a piece may be served sparsely: as in transformers, by the keys so far, and not where all is the tail."""
    return piece.k_len >= dense_below and enough_queries(piece.q_len, piece.k_len, dense_tail)


def rows_of(pieces: Sequence[Piece]) -> slice | Tensor:
    """Which of the T rows are those of some requests."""
    if all(one.rows.stop == other.q_start for one, other in pairwise(pieces)):
        return slice(pieces[0].q_start, pieces[-1].rows.stop)
    return torch.cat([torch.arange(piece.rows.start, piece.rows.stop) for piece in pieces])


def moved(x: Any, to: Tensor) -> Any:
    """A tensor where another is, or a slice."""
    return x if isinstance(x, slice) else x.to(to.device, non_blocking=True)
