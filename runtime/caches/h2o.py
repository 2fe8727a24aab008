"""H2O: the tokens that got most attention so far, for each KV head, and the latest ones (H2O, section 4, Algorithm 1).

Kept tokens lie in any order, for the order of keys is nothing to a query that sees them all, and keep the rotations
that the model gave them. A dropped token's row is taken by the last one: memory is what is kept.

Shapes: B batch, H query heads, G KV heads, Q new tokens, n tokens kept, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import artifacts
from kernels.scored import drop_lowest, ranks, scored_attention
from runtime.caches.policy import Policy, tokens
from runtime.caches.room import writable
from runtime.caches.step import Step

# Rows beyond those needed: at least so many, and a share of the whole. A cache under shares grows slowly.
_ROOM = 8
_SHARE = 32
# Up to so many tokens are dropped one by one, in place.
_FEW = 16


class H2O(Policy):
    """Heavy hitters and the latest tokens, `heavy` and `recent` of them.

    A call sees all that was kept before it and, causally, itself, and adds to the scores. Then those are dropped that
    scored lowest of the tokens before the latest. "greedy" does so after each query (Algorithm 1), whatever calls the
    tokens come in; "top_k" once a call, so that a prompt is attended to in full.

    keys (B, G, room, D), values (B, G, room, E), scores (B, G, room) fp32: the sum of a token's probabilities in all
    queries since, its own included, and positions (B, G, room) int32: its place in the text. The first n rows count.
    """

    def __init__(self, record: artifacts.H2O) -> None:
        super().__init__()
        self.record = record
        self._held = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.scores: Tensor | None = None
        self.positions: Tensor | None = None

    @property
    def kept(self) -> int:
        return self._held

    def attend(self, call: Step) -> Tensor:
        """See Policy.attend."""
        outs = [self._attend(call, begin, end) for begin, end in self._pieces(call.length)]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)

    def truncate(self, length: int) -> bool:
        """See Policy.truncate: what a query has added to the scores cannot be taken out again."""
        return length == self.seen

    def _pieces(self, length: int) -> Iterator[tuple[int, int]]:
        """What of a call's tokens goes together: all, or as many as come before the next is dropped."""
        if self.record.eviction == "top_k":
            yield 0, length
            return
        begin = 0
        while begin < length:
            # The state moves on with every piece.
            size = 1
            while begin + size < length and self._fits(size) and self._fits(size + 1):
                size += 1
            yield begin, begin + size
            begin += size

    def _fits(self, more: int) -> bool:
        """Whether so many more tokens can be kept beside all that are."""
        return self._held + more <= self._budget(self.seen + more)

    def _budget(self, seen: int) -> int:
        return tokens(self.record.heavy, seen) + tokens(self.record.recent, seen)

    def _attend(self, call: Step, begin: int, end: int) -> Tensor:
        """(B, H, end - begin, E) of some of the call's tokens, which are taken in and others dropped for them."""
        rows = self._held + end - begin
        keys, values, scores, positions = self._rows(call, rows)
        k, v = call.k[:, :, begin:end], call.v[:, :, begin:end]
        new = slice(self._held, rows)
        keys[:, :, new], values[:, :, new] = k, v
        scores[:, :, new] = 0
        self.seen += end - begin
        if end - begin == 1:
            positions[:, :, new] = self.seen - 1
        else:
            positions[:, :, new] = torch.arange(
                self.seen - (end - begin), self.seen, dtype=torch.int32, device=k.device
            )
        done = scored_attention(
            call.q[:, :, begin:end],
            keys[:, :, :rows],
            values[:, :, :rows],
            scale=call.scale,
            softcap=call.softcap,
            backend=call.backend,
        )
        assert done.scores is not None
        scores[:, :, :rows] += done.scores
        self._held = rows
        self._evict(self._budget(self.seen), call.backend)
        return done.out

    def _rows(self, call: Step, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Memory for so many tokens: what there is where it suffices."""
        keys, values, scores, positions = self.keys, self.values, self.scores, self.positions
        if keys is None or values is None or scores is None or positions is None:
            batch, heads = call.k.shape[:2]
            keys, values = call.k[:, :, :0], call.v[:, :, :0]
            scores = torch.empty(batch, heads, 0, dtype=torch.float32, device=call.k.device)
            positions = torch.empty(batch, heads, 0, dtype=torch.int32, device=call.k.device)
        if keys.shape[2] < rows or not writable(keys):
            room, held = self._room(rows), self._held
            keys, values, scores, positions = (
                _moved(tensor[:, :, :held], room) for tensor in (keys, values, scores, positions)
            )
            self.keys, self.values, self.scores, self.positions = keys, values, scores, positions
        return keys, values, scores, positions

    def _room(self, rows: int) -> int:
        """Rows to have memory for where `rows` are needed; under counts that is known for ever."""
        heavy, recent = self.record.heavy, self.record.recent
        if isinstance(heavy, int) and isinstance(recent, int) and rows <= heavy + recent + 1:
            return min(heavy + recent + 1, rows + max(256, rows))
        return rows + max(_ROOM, rows // _SHARE)

    def _evict(self, keep: int, backend: str) -> None:
        """Drop the lowest of those before the latest until `keep` are left."""
        over = self._held - keep
        if over <= 0:
            return
        keys, values, scores, positions = self.keys, self.values, self.scores, self.positions
        assert keys is not None and values is not None and scores is not None and positions is not None
        latest = self.seen - tokens(self.record.recent, self.seen)
        queries = self.seen if self.record.normalised else None
        if over <= _FEW:
            for rows in range(self._held, keep, -1):
                drop_lowest(keys, values, scores, positions, rows=rows, latest=latest, queries=queries, backend=backend)
        else:
            held = slice(0, self._held)
            ranked = ranks(scores[:, :, held], positions[:, :, held], latest=latest, queries=queries)
            kept = ranked.topk(keep, dim=2).indices.sort(dim=2).values
            room = self._room(keep + 1)
            for name, tensor in self.tensors().items():
                at = kept if tensor.dim() == 3 else kept[..., None].expand(-1, -1, -1, tensor.shape[3])
                setattr(self, name, _moved(tensor.gather(2, at), room))
        self._held = keep


def _moved(tensor: Tensor, room: int) -> Tensor:
    """The rows of a tensor (B, G, n, ...) at the beginning of new memory for `room`."""
    made = tensor.new_empty(*tensor.shape[:2], room, *tensor.shape[3:])
    made[:, :, : tensor.shape[2]] = tensor
    return made
