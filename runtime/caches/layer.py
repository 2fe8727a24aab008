"""Cache layer of transformers under policies: padding, unlike KV heads, drafts.

Importing this imports transformers.

Shapes: B batch, H query heads, G KV heads, Q new slots of a call, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from artifacts import HeadwiseError
from runtime.autocast import in_one_dtype
from runtime.caches.policy import Policy
from runtime.caches.step import Step
from runtime.lazy import MisfitError, NewTokens
from runtime.training import GRADIENTS, differentiated

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class KVHeads:
    """KV heads with one policy, None for all of the layer, and the function that makes it."""

    heads: tuple[int, ...] | None
    make: Callable[[], Policy]


@dataclass(frozen=True)
class _SubBatch:
    """Sequences of a batch that are served together, and their policies, one a group."""

    rows: tuple[int, ...]
    policies: tuple[Policy, ...]

    def select(self, places: Sequence[int]) -> _SubBatch:
        """Copy with the sequences at these places."""
        rows = tuple(self.rows[place] for place in places)
        return _SubBatch(rows, tuple(policy.select(places) for policy in self.policies))


class Part(NamedTuple):
    """Tokens of a call under one policy.

    Attributes:
        heads: the policy's KV heads, None for all of the layer.
        head_index: the same as a tensor.
        rows: sequences of the batch, None for all.
        begin, end: slots of the call that hold the tokens.
    """

    policy: Policy
    step: Step
    heads: tuple[int, ...] | None
    head_index: Tensor | None
    rows: Tensor | None
    begin: int
    end: int

    def write(self, out: Tensor, own: Tensor) -> None:
        """Write the part's attention (n, h, q, E) into that of the call, (B, H, Q, E)."""
        span = slice(self.begin, self.end)
        rows: Any = slice(None) if self.rows is None else self.rows
        if self.head_index is None:
            out[rows, :, span] = own
            return
        if self.rows is not None:
            rows = rows[:, None]
        sizes = -1, self.step.q.shape[1] // self.step.k.shape[1]
        out.unflatten(1, sizes)[rows, self.head_index, :, span] = own.unflatten(1, sizes)


@dataclass(frozen=True)
class _Draft:
    """The last call while drafts are verified, and the layer's state before it."""

    call: Step
    spans: Spans
    batches: tuple[_SubBatch, ...]
    runs: list[list[tuple[int, int]]]


class PolicyLayer(CacheLayerMixin):
    """Keys and values under policies.

    update() returns lazy tensors, by which Headwise's attention finds the layer, takes the call's
    tokens, part by part, and attends to what their policies let them see. transformers counts
    slots, padding included; a policy counts the tokens of a sequence.

    Sequences of a batch are served together where each has one new token, whatever their lengths
    (a decode step), or if all are alike (a prompt): `_batches`.

    Assisted decoding announces that tokens will be taken back (activate_past_recording). From then
    on the state before the last call is held until crop() says how many of its tokens stay.
    """

    def __init__(self, groups: Sequence[KVHeads], *, sliding: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # transformers makes the mask of sliding layers by this.
        self.is_sliding = sliding
        self.groups = tuple(groups)
        # Each group's KV heads where they are needed: made once, for no step may wait for a device.
        self._heads: dict[torch.device, list[Tensor]] = {}
        # The name is transformers': Cache.is_recording_past reads it, generate() resets it.
        self.record_past = False
        self._start()

    def _no_tensor(self, assigned: Tensor | None = None) -> None:
        """Raise HeadwiseError for assigned keys or values, and for any access once there are some.

        The policies hold them, each those of its KV heads: an edit of one tensor would be lost.
        """
        if assigned is not None or vars(self).get("is_initialized", False):
            raise HeadwiseError(
                "this cache layer drops tokens by a policy, and has no layer.keys and layer.values "
                "to read or replace: use a DynamicCache, or an artifact without a kv_cache section"
            )

    @property
    def keys(self) -> None:
        """None before the first token, then HeadwiseError."""
        self._no_tensor()

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        self._no_tensor(keys)

    @property
    def values(self) -> None:
        """None before the first token, then HeadwiseError."""
        self._no_tensor()

    @values.setter
    def values(self, values: Tensor | None) -> None:
        self._no_tensor(values)

    def _start(self) -> None:
        self._slots = 0
        self._new: tuple[Tensor, Tensor] | None = None
        self._draft: _Draft | None = None
        self._batches: tuple[_SubBatch, ...] = ()
        # The slots of each sequence that hold tokens, in runs [begin, end).
        self._runs: list[list[tuple[int, int]]] = []
        self.is_initialized = False

    @property
    def policies(self) -> list[Policy]:
        """All policies: group by group for each sub-batch."""
        return [policy for batch in self._batches for policy in batch.policies]

    @property
    def mean_cached(self) -> float:
        """Cached tokens, as a mean over sequences and KV heads."""
        total = 0
        count = 0
        for batch in self._batches:
            for group, policy in zip(self.groups, batch.policies, strict=True):
                heads = 1 if group.heads is None else len(group.heads)
                total += heads * sum(policy.cached)
                count += heads * len(batch.rows)
        if count:
            return total / count
        return 0.0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See CacheLayerMixin.lazy_initialization."""
        self.dtype = key_states.dtype
        self.device = key_states.device
        rows = range(key_states.shape[0])
        policies = tuple(group.make().start(len(rows)) for group in self.groups)
        self._batches = (_SubBatch(tuple(rows), policies),)
        self._runs = [[] for _ in rows]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hold (B, G, Q, D) and (B, G, Q, E) for the attention that follows.

        Returns lazy tensors in place of all keys and values.
        """
        if self._new is not None:
            raise HeadwiseError(
                "this cache holds tokens that no attention saw: a forward before was interrupted"
            )
        # Attention sees the queries alone, and lazy tensors for these.
        if differentiated(key_states, value_states):
            raise HeadwiseError(f"a cache that drops tokens cannot serve this call: {GRADIENTS}")
        key_states, value_states = in_one_dtype(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        # A call that was not cropped stays whole.
        self._draft = None
        self._slots += key_states.shape[2]
        self._new = key_states.detach(), value_states.detach()
        return NewTokens(self, key_states, self._slots), NewTokens(self, value_states, self._slots)

    def begin(self, q: Tensor, spans: Spans | None, **options: Any) -> Iterable[Part]:
        """Take the tokens of the last update: their parts, each to be served before the next.

        Then comes finish(): a call that was interrupted leaves a cache that takes no more tokens.

        Args:
            q: (B, H, Q, D).
            spans: the new slots of each sequence that hold tokens; None for all.
            options: the other fields of a Step.
        """
        if self._new is None:
            raise MisfitError(
                "two layers read one layer's keys and values: a cache that drops tokens serves one "
                "only"
            )
        k, v = self._new
        # The cache keeps the dtype of the first tokens, also if autocast was turned on or off.
        call = Step(q=q.to(self.dtype), k=k.to(self.dtype), v=v.to(self.dtype), **options)
        if spans is None:
            spans = [(0, call.length)] * q.shape[0]
        if self.record_past:
            before = tuple(
                replace(batch, policies=tuple(policy.snapshot() for policy in batch.policies))
                for batch in self._batches
            )
            self._draft = _Draft(call, spans, before, [list(runs) for runs in self._runs])
        return self._append(call, spans)

    def finish(self) -> None:
        """End a call: all parts were served."""
        self._new = None

    def _append(self, call: Step, spans: Spans) -> Iterable[Part]:
        """Append a call, whose tokens are in the last slots; returns its parts."""
        first = self._slots - call.length
        for runs, (begin, end) in zip(self._runs, spans, strict=True):
            if begin < end:
                start = first + begin
                if runs and runs[-1][1] == start:
                    start = runs.pop()[0]
                runs.append((start, first + end))
        if call.length == 1:
            self._join(spans)
        else:
            self._split(spans)
        return self._parts(call, spans)

    def holds(self, runs: Sequence[Spans]) -> bool:
        """True if all earlier tokens are in these slots, [begin, end) by sequence."""
        return [tuple(mine) for mine in self._runs] == [tuple(theirs) for theirs in runs]

    def _parts(self, call: Step, spans: Spans) -> Iterable[Part]:
        length = call.length
        if len(self._batches) > 1 or spans[0] != (0, length):
            return self._by_batches(call, spans)
        policies = self._batches[0].policies
        if self.groups[0].heads is None:
            return (Part(policies[0], call, None, None, None, 0, length),)
        return self._by_heads(policies, call, None, 0, length)

    def _by_batches(self, call: Step, spans: Spans) -> Iterator[Part]:
        """Parts of the sub-batches with tokens."""
        for batch in self._batches:
            begin, end = spans[batch.rows[0]]
            if begin < end:
                rows = torch.tensor(batch.rows, device=call.q.device, dtype=torch.long)
                step = call.slots(begin, end, rows)
                yield from self._by_heads(batch.policies, step, rows, begin, end)

    def _by_heads(
        self, policies: Sequence[Policy], step: Step, rows: Tensor | None, begin: int, end: int
    ) -> Iterator[Part]:
        """Parts of the sequences of a sub-batch, group by group."""
        if self.groups[0].heads is None:
            yield Part(policies[0], step, None, None, rows, begin, end)
            return
        grouped = step.q.unflatten(1, (step.k.shape[1], -1))
        if grouped.device not in self._heads:
            self._heads[grouped.device] = [
                torch.tensor(group.heads, device=grouped.device, dtype=torch.long)
                for group in self.groups
            ]
        indices = self._heads[grouped.device]
        for group, index, policy in zip(self.groups, indices, policies, strict=True):
            own = step.with_states(
                grouped.index_select(1, index).flatten(1, 2),
                step.k.index_select(1, index),
                step.v.index_select(1, index),
            )
            yield Part(policy, own, group.heads, index, rows, begin, end)

    def _join(self, spans: Spans) -> None:
        """Join the sequences that have a new token into one sub-batch: each has one."""
        new = {row for row, (begin, end) in enumerate(spans) if begin < end}
        if len(self._batches) == 1 and len(new) == len(spans):
            return
        joined: list[_SubBatch] = []
        apart: list[_SubBatch] = []
        for batch in self._batches:
            for batches, wanted in ((joined, True), (apart, False)):
                places = [place for place, row in enumerate(batch.rows) if (row in new) == wanted]
                if len(places) == len(batch.rows):
                    batches.append(batch)
                elif places:
                    batches.append(batch.select(places))
        self._batches = (*_joined(joined), *apart)

    def _split(self, spans: Spans) -> None:
        """Split sub-batches whose sequences differ in new tokens, or in lengths before them."""
        if len(spans) == 1:
            return
        batches = []
        for batch in self._batches:
            alike: dict[Any, list[int]] = {}
            for place, row in enumerate(batch.rows):
                begin, end = spans[row]
                span = (begin, end) if begin < end else (0, 0)
                lengths = [(policy.seen[place], policy.cached[place]) for policy in batch.policies]
                alike.setdefault((span, *lengths), []).append(place)
            if len(alike) == 1:
                batches.append(batch)
            else:
                batches.extend(batch.select(places) for places in alike.values())
        self._batches = tuple(batches)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Sizes as if nothing was dropped: all layers share a mask, which is never made."""
        return self._slots + query_length, 0

    def get_seq_length(self) -> int:
        """See CacheLayerMixin.get_seq_length."""
        return self._slots

    def get_max_length(self) -> int:
        """See CacheLayerMixin.get_max_length."""
        return -1

    def activate_past_recording(self) -> None:
        """Hold the state before each call from now on, so that crop() can take back its tokens."""
        self.record_past = True

    @property
    def is_croppable(self) -> bool:
        """True if crop() can take back the last slot."""
        if self._draft is not None or self._slots == 0:
            return True
        return _croppable(self._batches, self._slots, self._slots - 1)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -`tokens_to_remove` slots.

        While past states are recorded, the last call is served again without them where others were
        dropped since.

        Raises:
            HeadwiseError: other tokens were dropped since, or sequences are padded, and the slots
                are more than the last call's, or past states are not recorded.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes minus the number of tokens to remove, got {tokens_to_remove}"
            )
        # transformers 5.16 counts drafts in a tensor, which would change with the slots that are
        # added to it.
        left = max(self._slots + int(tokens_to_remove), 0)
        removed = self._slots - left
        if left == 0 and removed:
            self._start()
            return
        if removed and not _croppable(self._batches, self._slots, left):
            draft = self._draft
            before = self._slots - (draft.call.length if draft else 0)
            if draft is None or (left < before and not _croppable(draft.batches, before, left)):
                raise HeadwiseError(self._why_not_crop(removed))
            self._repeat(draft, max(left - before, 0))
        self._draft = None
        if left == self._slots:
            return
        for policy in self.policies:
            policy.truncate(left)
        self._slots = left
        self._runs = [
            [(begin, min(end, left)) for begin, end in runs if begin < left] for runs in self._runs
        ]

    def _repeat(self, draft: _Draft, length: int) -> None:
        """Return to the state before the last call, and serve its first `length` slots."""
        self._slots += length - draft.call.length
        self._batches = draft.batches
        self._runs = draft.runs
        if length:
            spans = [(min(begin, length), min(end, length)) for begin, end in draft.spans]
            for part in self._append(draft.call.slots(0, length), spans):
                policy = part.policy
                for step in policy.steps(part.step):
                    view = policy.view(step)
                    # Its tokens are needed, not its output.
                    policy.update(step, view.attend(step)[1] if view.scored else None)

    def _why_not_crop(self, count: int) -> str:
        if len(self._batches) > 1 or self.policies[0].seen != (self._slots,) * len(self._runs):
            return f"cannot take {count} slots back from a batch with padding"
        return (
            f"cannot take {count} tokens back: the cache has dropped others since; call "
            f"cache.activate_past_recording() before the tokens come, or keep every token (policy "
            f"full)"
        )

    def reset(self) -> None:
        """See CacheLayerMixin.reset."""
        self._start()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """See CacheLayerMixin.reorder_cache."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See DynamicLayer.batch_repeat_interleave."""
        rows = sum(len(batch.rows) for batch in self._batches)
        self.batch_select_indices(torch.arange(rows, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences, each as often as it is named."""
        self._draft = None
        places = {
            row: (batch, place) for batch in self._batches for place, row in enumerate(batch.rows)
        }
        wanted: dict[int, tuple[_SubBatch, list[int], list[int]]] = {}
        # Also negative ones, and a mask, as a tensor takes them.
        if isinstance(indices, Tensor):
            indices = indices.cpu()
        selected = torch.arange(len(self._runs), device="cpu")[indices]
        rows_of_new = selected.tolist()
        for new, row in enumerate(rows_of_new):
            batch, place = places[row]
            _, taken, rows = wanted.setdefault(id(batch), (batch, [], []))
            taken.append(place)
            rows.append(new)
        self._batches = tuple(
            replace(batch.select(taken), rows=tuple(rows)) for batch, taken, rows in wanted.values()
        )
        self._runs = [list(self._runs[row]) for row in rows_of_new]


def _joined(batches: Sequence[_SubBatch]) -> tuple[_SubBatch, ...]:
    """One sub-batch with the sequences of all, in the order of the batch; none of none."""
    if len(batches) < 2:
        return tuple(batches)
    rows = sorted(row for batch in batches for row in batch.rows)
    places = [[rows.index(row) for row in batch.rows] for batch in batches]
    groups = zip(*(batch.policies for batch in batches), strict=True)
    return (_SubBatch(tuple(rows), tuple(Policy.join(policies, places) for policies in groups)),)


def _croppable(batches: Sequence[_SubBatch], slots: int, left: int) -> bool:
    """True if no policy has dropped tokens since the first `left` slots, which have no padding."""
    return len(batches) == 1 and all(
        seen == slots and settled <= left
        for policy in batches[0].policies
        for seen, settled in zip(policy.seen, policy.settled, strict=True)
    )
