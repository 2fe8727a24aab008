"""A step's batch as vLLM makes it, parted into prefills that are served sparsely and the rest.

Shapes: R requests of the step, T tokens of all of them, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.attention.state import MIN_QUERIES

# The attribute of a parent's metadata that holds the Batch, where something of a step is served here.
KEY = "headwise"


class Piece(NamedTuple):
    """A prompt, or a chunk of one: the `q_len` tokens from row `q_start` on are the last of `k_len` of a request."""

    request: int
    q_start: int
    q_len: int
    k_len: int

    @property
    def rows(self) -> slice:
        return slice(self.q_start, self.q_start + self.q_len)


class Rest(NamedTuple):
    """The parent's metadata of some requests of a step, and which of the T rows are theirs."""

    metadata: Any
    rows: slice | Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """What of a step is served here, in those layers that serve it, and the parent's metadata of all others.

    pieces: prompts, or chunks of some, by patterns. steps: decode by chosen tokens.
    part: see Rest; called once for what a layer serves.
    """

    pieces: tuple[Piece, ...]
    steps: tuple[Piece, ...]
    block_table: Tensor
    part: Callable[[Sequence[Piece]], Rest | None]
    _rests: dict[tuple[int, ...], Rest | None] = field(default_factory=dict)

    def rest(self, served: Sequence[Piece]) -> Rest | None:
        """What is left of the step beside what is served; None where nothing is."""
        key = tuple(piece.request for piece in served)
        if key not in self._rests:
            self._rests[key] = self.part(served)
        return self._rests[key]


def pieces_of(common: Any) -> list[Piece]:
    """The prefills of a step, by vLLM's CommonAttentionMetadata; none where it is not causal.

    Several tokens are one, unless they are few and vLLM says that they are drafts to verify. Lengths come from the
    host: only a step that has several tokens of a request and no lengths there waits for the device.
    """
    if _special(common):
        return []
    starts = common.query_start_loc_cpu.tolist()[: common.num_reqs + 1]
    if max((b - a for a, b in pairwise(starts)), default=0) < 2:
        return []
    lengths = common.seq_lens if common.seq_lens_cpu_upper_bound is None else common.seq_lens_cpu_upper_bound
    k_lens = lengths.tolist()
    told = common.is_prefilling
    prefills = [True] * len(k_lens) if told is None or told.device.type != "cpu" else told.tolist()
    return [
        Piece(request, start, end - start, k_lens[request])
        for request, (start, end) in enumerate(pairwise(starts))
        if end - start > 1 and (end - start >= MIN_QUERIES or prefills[request])
    ]


def steps_of(common: Any, serves: Callable[[int, int], bool]) -> list[Piece]:
    """The requests of a step that have a few tokens, drafts to verify among them, and are served by chosen tokens.

    serves: of how many tokens and how many keys that holds. Lengths are read from the device: they choose.
    """
    if _special(common):
        return []
    spans = list(pairwise(common.query_start_loc_cpu.tolist()[: common.num_reqs + 1]))
    k_lens = common.seq_lens.tolist()
    return [
        Piece(request, start, end - start, k_lens[request])
        for request, (start, end) in enumerate(spans)
        if end > start and serves(end - start, k_lens[request])
    ]


def _special(common: Any) -> bool:
    parts = (common.mm_req_doc_ranges, common.rswa_prefix_lens, common.logits_indices_padded)
    return common.causal is not True or any(part is not None for part in parts)


def is_long(piece: Piece, dense_below: int) -> bool:
    """Whether a piece is served sparsely: as Headwise decides in transformers, by the keys that there are so far."""
    return piece.q_len >= MIN_QUERIES and piece.k_len >= dense_below


def rest_of(common: Any, pieces: Sequence[Piece]) -> tuple[Any, slice | Tensor] | None:
    """The CommonAttentionMetadata of all requests but those of `pieces`, and their rows; None where there are none."""
    served = {piece.request for piece in pieces}
    spans = list(pairwise(common.query_start_loc_cpu.tolist()[: common.num_reqs + 1]))
    requests = [i for i, (start, end) in enumerate(spans) if i not in served and end > start]
    if not requests:
        return None
    lengths = [spans[i][1] - spans[i][0] for i in requests]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    rows = _rows([spans[i] for i in requests])
    device = common.query_start_loc.device
    at = torch.tensor(requests)
    on_device = at.to(device, non_blocking=True)
    picked = rows if isinstance(rows, slice) else rows.to(device, non_blocking=True)
    host = common.seq_lens_cpu_upper_bound
    rest = replace(
        common,
        query_start_loc=starts.to(device, non_blocking=True),
        query_start_loc_cpu=starts,
        seq_lens=common.seq_lens[on_device],
        seq_lens_cpu_upper_bound=None if host is None else host[at],
        num_reqs=len(requests),
        num_actual_tokens=sum(lengths),
        max_query_len=max(lengths),
        max_seq_len=common.max_seq_len if host is None else int(host[at].max()),
        block_table_tensor=common.block_table_tensor[on_device],
        slot_mapping=common.slot_mapping[picked],
        positions=None if common.positions is None else common.positions[picked],
        is_prefilling=None
        if common.is_prefilling is None
        else common.is_prefilling[at.to(common.is_prefilling.device)],
        req_idx=None if common.req_idx is None else common.req_idx[at.numpy()],
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )
    return rest, picked


def _rows(spans: Sequence[tuple[int, int]]) -> slice | Tensor:
    if all(end == start for (_, end), (start, _) in pairwise(spans)):
        return slice(spans[0][0], spans[-1][1])
    return torch.cat([torch.arange(start, end) for start, end in spans])
