"""The cache layer that transformers sees: sequences of unlike lengths and KV heads of unlike policies, sorted out.

Importing this imports transformers.

Shapes: B batch, H query heads, G KV heads, Q new slots of a call, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from artifacts import HeadwiseError
from runtime.caches.policy import Policy
from runtime.caches.step import Terms
from runtime.standin import NewTokens

# Tokens that can be taken back while drafts are being verified: more than anybody drafts at a time.
_RECORDED = 64

Spans = Sequence[tuple[int, int]]
# Queries, keys and values of a call, and which of its slots hold tokens.
_Taken = tuple[Tensor, Tensor, Tensor, Spans, Terms]


@dataclass(frozen=True)
class KVHeads:
    """KV heads with one policy, None for all of the layer, what makes it, and its name."""

    heads: tuple[int, ...] | None
    make: Callable[[], Policy]
    name: str = ""


@dataclass(frozen=True)
class _Part:
    """Sequences that have seen equally many tokens, and their policies, one a group."""

    rows: tuple[int, ...]
    policies: tuple[Policy, ...]


@dataclass(frozen=True)
class _Mark:
    """A state to come back to: how many slots there were, what the policies held, and each token since.

    A state between two marks is the earlier one's with the tokens up to there taken in once more.
    """

    slots: int
    parts: tuple[_Part, ...]
    steps: list[_Taken]


class PolicyLayer(CacheLayerMixin):
    """Keys and values under policies. update() hands out stand-ins, by which Headwise's attention finds the layer.

    transformers counts slots, padding included; a policy counts the tokens of a sequence.
    """

    is_croppable = True

    def __init__(self, groups: Sequence[KVHeads], *, sliding: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # The mask of sliding layers is asked for by this.
        self.is_sliding = sliding
        self.groups = tuple(groups)
        self.record_past = False
        # Each group's KV heads where they are needed: made once, for no step may wait for a device.
        self._heads: dict[torch.device, list[Tensor]] = {}
        self._start()

    def _start(self) -> None:
        self._slots = 0
        self._new: tuple[Tensor, Tensor] | None = None
        self._parts: tuple[_Part, ...] = ()
        # The last two: at least _RECORDED tokens can be taken back once so many have come.
        self._marks: list[_Mark] = []
        # What the first call came with, until the next: drafts may be at its end.
        self._prompt: _Taken | None = None
        # The slots of each sequence that hold tokens, in runs [begin, end).
        self._runs: list[list[tuple[int, int]]] = []
        self.is_initialized = False

    @property
    def policies(self) -> list[Policy]:
        """All of them, for what they hold: group by group for each part of the batch."""
        return [policy for part in self._parts for policy in part.policies]

    @property
    def mean_kept(self) -> float:
        """Tokens kept, as a mean over sequences and KV heads."""
        kept = count = 0
        for part in self._parts:
            for group, policy in zip(self.groups, part.policies, strict=True):
                heads = len(part.rows) * (1 if group.heads is None else len(group.heads))
                kept, count = kept + heads * policy.kept, count + heads
        return kept / count if count else 0.0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._parts = (self._empty(key_states.shape[0]),)
        self._runs = [[] for _ in range(key_states.shape[0])]
        self.is_initialized = True

    def _empty(self, batch: int) -> _Part:
        return _Part(tuple(range(batch)), tuple(group.make() for group in self.groups))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take (B, G, Q, D) and (B, G, Q, E) to the attention that follows; stand-ins of all keys and values."""
        if self._new is not None:
            raise HeadwiseError("this cache holds tokens that no attention saw: a forward before was interrupted")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._slots += key_states.shape[2]
        self._new = key_states.detach(), value_states.detach()
        return NewTokens(self, key_states, self._slots), NewTokens(self, value_states, self._slots)

    def attend(self, q: Tensor, spans: Spans | None, terms: Terms) -> Tensor:
        """Attention of queries (B, H, Q, D) over what is kept and the new tokens: (B, H, Q, E), zeros for padding.

        spans: the new slots of each sequence that hold tokens; None for all.
        """
        if self._new is None:
            raise HeadwiseError(
                "two layers read one layer's keys and values: a cache that drops tokens serves one only"
            )
        (k, v), self._new = self._new, None
        q_len = q.shape[2]
        spans = [(0, q_len)] * q.shape[0] if spans is None else spans
        self._run_on(spans, q_len)
        self._prompt, recorded = None, replace(terms, prefill=None)
        if not self.record_past or self._slots == q_len or q_len > _RECORDED:
            self._marks = []
            if self.record_past and self._slots == q_len:
                self._prompt = q, k, v, spans, recorded
            return self._attend(q, k, v, spans, terms)
        outs = []
        for i in range(q_len):
            # Token by token, so that any number of them can be taken back.
            one = [(0, int(begin <= i < end)) for begin, end in spans]
            at = slice(i, i + 1)
            step = q[:, :, at], k[:, :, at], v[:, :, at], one
            if not self._marks or len(self._marks[-1].steps) == _RECORDED:
                self._marks = [*self._marks[-1:], _Mark(self._slots - q_len + i, _copies(self._parts), [])]
            self._marks[-1].steps.append((*step, recorded))
            outs.append(self._attend(*step, terms))
        return torch.cat(outs, dim=2)

    def holds(self, runs: Sequence[Spans]) -> bool:
        """Whether the tokens taken in before those of the last update are in these slots, [begin, end) by sequence."""
        return all(tuple(mine) == tuple(theirs) for mine, theirs in zip(self._runs, runs, strict=True))

    def _run_on(self, spans: Spans, q_len: int) -> None:
        """Note which of the last `q_len` slots hold tokens."""
        first = self._slots - q_len
        for runs, (begin, end) in zip(self._runs, spans, strict=True):
            if begin < end:
                joins = runs and runs[-1][1] == first + begin
                runs.append((runs.pop()[0] if joins else first + begin, first + end))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, terms: Terms) -> Tensor:
        self._part(spans)
        whole = len(self._parts) == 1 and spans[0] == (0, q.shape[2])
        if whole:
            return self._of(self._parts[0].policies, q, k, v, terms)
        out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        for part in self._parts:
            begin, end = spans[part.rows[0]]
            if begin < end:
                rows = torch.tensor(part.rows, device=q.device)
                some = [states.index_select(0, rows)[:, :, begin:end] for states in (q, k, v)]
                out[rows, :, begin:end] = self._of(part.policies, some[0], some[1], some[2], terms)
        return out

    def _of(self, policies: Sequence[Policy], q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
        """(n, H, Q, E) of n sequences alike, group by group."""
        if self.groups[0].heads is None:
            return policies[0].attend(terms.step(q, k, v, None))
        if q.device not in self._heads:
            self._heads[q.device] = [torch.tensor(group.heads, device=q.device) for group in self.groups]
        grouped, out = q.unflatten(1, (k.shape[1], -1)), None
        for group, heads, policy in zip(self.groups, self._heads[q.device], policies, strict=True):
            queries = grouped.index_select(1, heads).flatten(1, 2)
            some = policy.attend(terms.step(queries, k.index_select(1, heads), v.index_select(1, heads), group.heads))
            if out is None:
                out = some.new_empty(*grouped.shape[:4], some.shape[3])
            out[:, heads] = some.unflatten(1, (len(heads), -1))
        assert out is not None
        return out.flatten(1, 2)

    def _part(self, spans: Spans) -> None:
        """Sort sequences apart where they go on differently."""
        parts = []
        for part in self._parts:
            alike: dict[tuple[int, int], list[int]] = {}
            for place, row in enumerate(part.rows):
                begin, end = spans[row]
                alike.setdefault((begin, end) if begin < end else (0, 0), []).append(place)
            for places in alike.values():
                same = len(places) == len(part.rows)
                rows = tuple(part.rows[place] for place in places)
                parts.append(part if same else _Part(rows, _selected(part.policies, places)))
        self._parts = tuple(parts)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As if all was kept: every layer of a model gets the same mask, and that is never made."""
        return self._slots + query_length, 0

    def get_seq_length(self) -> int:
        return self._slots

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        """From now on crop() can take back what was added since, whatever was dropped for it."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -`tokens_to_remove` slots.

        Raises:
            HeadwiseError: tokens were dropped since, and no states were recorded (activate_past_recording).
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to remove, got {tokens_to_remove}")
        # transformers 5.16 counts drafts in a tensor, which would change with the slots that are added to it.
        left = max(self._slots + int(tokens_to_remove), 0)
        if left == self._slots:
            return
        marks = [mark for mark in self._marks if mark.slots <= left]
        if marks:
            self._go_back(marks, left)
        elif left == 0:
            self._start()
        elif self._prompt is not None:
            self._prefill_again(left)
        elif len(self._parts) > 1 or self.policies[0].seen != self._slots:
            raise HeadwiseError(f"cannot take {-tokens_to_remove} slots back from a batch with padding")
        else:
            # One policy does nothing where it cannot; of several some may have.
            former = _copies(self._parts) if len(self.policies) > 1 else self._parts
            if not all(policy.truncate(left) for policy in self.policies):
                self._parts = former
                raise HeadwiseError(
                    f"cannot take {-tokens_to_remove} tokens back: the cache has dropped others since; "
                    "call activate_past_recording before the tokens that may be taken back"
                )
        self._slots = left
        self._runs = [[(begin, min(end, left)) for begin, end in runs if begin < left] for runs in self._runs]

    def _go_back(self, marks: list[_Mark], left: int) -> None:
        """To the state of `left` slots: the last mark's, and the tokens that came after it and stay."""
        last = marks[-1]
        del last.steps[left - last.slots :]
        self._marks, self._parts = marks, _copies(last.parts)
        for step in last.steps:
            self._attend(*step)

    def _prefill_again(self, left: int) -> None:
        """Take in the first `left` slots of the first call, which may have ended in drafts, and no more."""
        assert self._prompt is not None
        q, k, v, spans, terms = self._prompt
        spans = [(min(begin, left), min(end, left)) for begin, end in spans]
        self._prompt = q[:, :, :left], k[:, :, :left], v[:, :, :left], spans, terms
        self._parts = (self._empty(q.shape[0]),)
        self._attend(*self._prompt)

    def reset(self) -> None:
        self._start()

    def state(self) -> list[Any]:
        """All that it holds, in plain containers that share its tensors: torch.save can write it."""
        parts = [[list(part.rows), [policy.state() for policy in part.policies]] for part in self._parts]
        return [self._slots, self._runs, parts]

    def load_state(self, state: list[Any]) -> None:
        """Go on from where a layer of the same groups was asked for its state(); the tensors are taken over."""
        self._start()
        slots, runs, parts = state
        if not parts:
            return
        made = []
        for rows, states in parts:
            policies = tuple(group.make() for group in self.groups)
            for policy, held in zip(policies, states, strict=True):
                policy.load_state(held)
            made.append(_Part(tuple(rows), policies))
        some = next(iter(made[0].policies[0].tensors().values()))
        self.dtype, self.device, self.is_initialized = some.dtype, some.device, True
        self._slots, self._runs, self._parts = slots, [list(of_row) for of_row in runs], tuple(made)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = sum(len(part.rows) for part in self._parts)
        self.batch_select_indices(torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences, each as often as it is named."""
        places = {row: (part, place) for part in self._parts for place, row in enumerate(part.rows)}
        wanted: dict[int, tuple[_Part, list[int], list[int]]] = {}
        for new, row in enumerate(indices.tolist()):
            part, place = places[row]
            _, taken, rows = wanted.setdefault(id(part), (part, [], []))
            taken.append(place)
            rows.append(new)
        self._parts = tuple(
            _Part(tuple(rows), _selected(part.policies, taken)) for part, taken, rows in wanted.values()
        )
        self._runs = [list(self._runs[row]) for row in indices.tolist()]
        self._marks, self._prompt = [], None

    @property
    def recorded(self) -> list[Tensor]:
        """What is held beside the policies' own, to take tokens back."""
        policies = [policy for mark in self._marks for part in mark.parts for policy in part.policies]
        steps = [step for mark in self._marks for step in mark.steps] + ([] if self._prompt is None else [self._prompt])
        held = [tensor for policy in policies for tensor in policy.tensors().values()]
        return held + [tensor for step in steps for tensor in step[:3]]


def _copies(parts: Sequence[_Part]) -> tuple[_Part, ...]:
    return tuple(replace(part, policies=tuple(policy.mark() for policy in part.policies)) for part in parts)


def _selected(policies: Sequence[Policy], rows: Sequence[int]) -> tuple[Policy, ...]:
    at = torch.tensor(list(rows), dtype=torch.long)
    return tuple(policy.select(at) for policy in policies)
