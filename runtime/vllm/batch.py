"""Batch of a step: its requests as vLLM has them, and groups that are served together.

Shapes: R requests of the step, T tokens of all of them, one after another; n requests of a group,
N pages of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.decode import MAX_QUERIES
from runtime.attention.chunk import Chunk
from runtime.attention.context import MIN_QUERIES

# Attribute of vLLM's metadata that holds the Batch of the layers served here: the metadata, of the
# parent's own class, is all that vLLM hands from a step's builder to its layers.
KEY = "headwise"


class Group(NamedTuple):
    """Requests with equally many new tokens, which are served in one launch.

    Attributes:
        rows: their rows of the T.
        table: (n, N) their pages.
        ends: (n,) int32, their numbers of keys.
        k_len: upper bound of `ends`; None in a step that is captured and replayed for others.
        rows_read: rows that layers under policies read, by their pagings.
    """

    chunks: tuple[Chunk, ...]
    q_len: int
    rows: slice | Tensor
    table: Tensor
    ends: Tensor
    k_len: int | None
    rows_read: dict[Any, Tensor]

    def pages(self, size: int) -> Tensor:
        """Block table up to the longest request, with pages of `size` tokens."""
        if self.k_len is None:
            return self.table
        return self.table[:, : -(-self.k_len // size)]

    def parts(self, limit: int) -> Iterator[tuple[slice, Group]]:
        """Split into groups of at most `limit` of the n requests, with their range."""
        for begin in range(0, len(self.ends), limit):
            part = slice(begin, min(begin + limit, len(self.ends)))
            first = part.start * self.q_len
            last = part.stop * self.q_len
            if isinstance(self.rows, slice):
                rows: slice | Tensor = slice(self.rows.start + first, self.rows.start + last)
            else:
                rows = self.rows[first:last]
            table = self.table[part]
            yield part, self._replace(rows=rows, table=table, ends=self.ends[part], rows_read={})


# Groups of requests with few new tokens, and longer chunks.
Rest = tuple[tuple[Group, ...], list[Chunk]]


@dataclass(eq=False, kw_only=True)
class Batch:
    """Step of the layers served here.

    Attributes:
        requests: all of them.
        sparse: chunks of prompts that patterns serve.
        decodes: groups that decode by selected tokens.
        lengths: (R,) int32 keys of each request, on the device; None where the chunks' own are
            exact.
        captured: the step will be replayed for other requests.
    """

    block_table: Tensor
    requests: tuple[Chunk, ...] = ()
    sparse: tuple[Chunk, ...] = ()
    decodes: tuple[Group, ...] = ()
    lengths: Tensor | None = None
    captured: bool = False
    _rests: dict[Any, Rest] = field(default_factory=dict)

    @cached_property
    def generated(self) -> tuple[Group, ...]:
        """Groups of tokens after prompts that are cached in part."""
        generated = (chunk for chunk in self.requests if chunk.generated)
        return self.groups([part for chunk in generated for part in chunk.cut(MAX_QUERIES)])

    def rest(self, served: Sequence[Chunk] = (), limit: int = MAX_QUERIES) -> Rest:
        """Requests neither served nor generated, made once for equal layers.

        Those of up to `limit` new tokens are grouped.
        """
        key = limit, *(chunk.q_start for chunk in served)
        if key not in self._rests:
            done = set(served)
            rest = [each for each in self.requests if each not in done and not each.generated]
            groups = self.groups([chunk for chunk in rest if chunk.q_len <= limit])
            self._rests[key] = groups, [chunk for chunk in rest if chunk.q_len > limit]
        return self._rests[key]

    def groups(self, chunks: Sequence[Chunk]) -> tuple[Group, ...]:
        """Group chunks by their number of new tokens.

        Of adjacent requests views of block table and lengths are taken: a step can be replayed.
        """
        by_length: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            by_length.setdefault(chunk.q_len, []).append(chunk)
        groups = []
        for q_len, alike in by_length.items():
            requests = self._moved(_joined(slice(c.row, c.row + 1) for c in alike))
            rows = self._moved(_joined(chunk.queries for chunk in alike))
            k_lens = [chunk.k_len for chunk in alike]
            if self.lengths is None:
                ends = self._moved(torch.tensor(k_lens, dtype=torch.int32, device="cpu"))
            else:
                ends = self.lengths[requests]
            if self.captured:
                k_len = None
            else:
                k_len = max(k_lens)
            table = self.block_table[requests]
            groups.append(Group(tuple(alike), q_len, rows, table, ends, k_len, {}))
        return tuple(groups)

    def pages(self, chunk: Chunk, size: int) -> Tensor:
        """Pages (N,) of a request, of `size` tokens each."""
        return self.block_table[chunk.row, : -(-chunk.k_len // size)]

    def _moved(self, x: Any) -> Any:
        """Move a tensor to the device of the block table; a slice stays."""
        if isinstance(x, slice):
            return x
        return x.to(self.block_table.device, non_blocking=True)


def requests_of(common: Any, *, exact: bool = False) -> tuple[Chunk, ...]:
    """Requests of a step from vLLM's CommonAttentionMetadata, without its padding.

    Lengths come from the host, which may have upper bounds alone; `exact` ones from the device.
    """
    spans = pairwise(common.query_start_loc_cpu.tolist()[: common.num_reqs + 1])
    k_lens = common.seq_lens_cpu_upper_bound
    if k_lens is None or exact:
        k_lens = common.seq_lens
    return tuple(
        Chunk(number, start, end - start, 0, k_len)
        for number, ((start, end), k_len) in enumerate(zip(spans, k_lens.tolist(), strict=False))
        if end > start
    )


def split_at_prompts(requests: Sequence[Chunk], prompts: Sequence[int]) -> tuple[Chunk, ...]:
    """Split requests at the ends of their prompts, whose lengths are `prompts` (R,)."""
    chunks = []
    for chunk in requests:
        prompt = prompts[chunk.row]
        behind = chunk.k_len - prompt
        if 0 < behind < chunk.q_len:
            q_len = chunk.q_len - behind
            chunks.append(chunk._replace(q_len=q_len, k_len=prompt, prompt=prompt))
            chunk = chunk._replace(q_start=chunk.q_start + q_len, q_len=behind)
        chunks.append(chunk._replace(prompt=prompt))
    return tuple(chunks)


def prefills_of(common: Any, requests: Sequence[Chunk]) -> list[Chunk]:
    """Prefills of a step: several tokens, unless they are few and drafts to verify."""
    several = [chunk for chunk in requests if chunk.q_len > 1 and not chunk.generated]
    if common.is_prefilling is None:
        return several
    prefills = common.is_prefilling.tolist()
    return [each for each in several if each.q_len >= MIN_QUERIES or prefills[each.row]]


def special(common: Any) -> bool:
    """True for a step that is not plainly causal attention of all its requests."""
    parts = (common.mm_req_doc_ranges, common.rswa_prefix_lens, common.logits_indices_padded)
    return common.causal is not True or any(part is not None for part in parts)


def _joined(ranges: Iterable[slice]) -> slice | Tensor:
    """Join ranges: a slice where they are adjacent, indices elsewhere."""
    ranges = list(ranges)
    if all(before.stop == after.start for before, after in pairwise(ranges)):
        return slice(ranges[0].start, ranges[-1].stop)
    return torch.cat([torch.arange(each.start, each.stop, device="cpu") for each in ranges])
