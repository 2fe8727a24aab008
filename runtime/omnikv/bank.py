"""Context bank: keys and values of sparse layers in CPU memory; selected tokens are fetched.

OmniKV, section 4.2. A token's row holds, for one layer, the key and the value of one KV head after
another: fetching a token is one copy. Rows are in pages, so that growing copies nothing.

Shapes: L layers, P tokens of a page, B batch, G KV heads, Q new tokens, K tokens in all, D head
dim, E value dim, R = G * (D + E) numbers in a row, n tokens, C selected tokens, S slots on the
device, N fetched rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels.index import PAD
from runtime.lazy import LazyTensor
from runtime.omnikv.copy_engine import CopyEngine

# A page holds a minimum of tokens, and a fraction of the total: few pages, little unused.
_MIN_TOKENS = 256
_FRACTION = 16
_EMPTY = -1


class Row(NamedTuple):
    """Layout of a token's row in one layer."""

    heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """R, the number of elements of a row."""
        return self.heads * (self.k_dim + self.v_dim)

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        """Rows (Q, B, R) of keys (B, G, Q, D) and values (B, G, Q, E)."""
        rows = k.new_empty(k.shape[2], k.shape[0], self.width)
        for part, states in zip(self.unpack(rows), (k, v), strict=True):
            part.copy_(states.detach())
        return rows

    def unpack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (B, G, n, D) and values (B, G, n, E) as views of rows (n, B, R)."""
        k, v = (
            rows.unflatten(-1, (self.heads, -1))
            .permute(1, 2, 0, 3)
            .split((self.k_dim, self.v_dim), dim=-1)
        )
        return k, v


class _Fetch(NamedTuple):
    """A fetch of selected rows, done or under way.

    Attributes:
        layers: those that were in the bank when it started.
        counts: how many rows of each sequence it fetches, (B,).
    """

    layers: frozenset[int]
    counts: Future[Tensor]


class Bank:
    """Rows of the layers that one filter layer serves on one device, and slots for selected ones.

    In a decode step the selected rows of all layers are fetched at once into slots on the device.
    Rows that the previous step also selected stay in place, so slots are in no order. The new
    tokens follow those of the longest sequence, in order, so that a few queries at once stay
    causal.

    Attributes:
        layers: number of layers.
        keep: a layer of up to `keep` tokens stays on the device.
    """

    row: Row
    copy_engine: CopyEngine

    def __init__(self, layers: int, keep: int) -> None:
        self.layers = layers
        self.keep = keep
        self._clear()

    def _clear(self) -> None:
        # 0 before the first layer.
        self.batch = 0
        # Most tokens of a layer so far.
        self._length = 0
        # Selections of sequences so far, the sequences of the latest one, how many there were
        # before it, and by layer in the bank the number of selections that it was asked for.
        self._selections = 0
        self._selected: Any = None
        self._batch_before = 0
        self._asked: dict[int, int] = {}
        # (L, P, B, R) each.
        self.pages: list[Tensor] = []
        # (L, S, B, R) on the device.
        self.slots: Tensor | None = None
        # (B, S) on the host: the token in each slot of each sequence. Outdated once a layer has
        # entered or left.
        self._held: Tensor | None = None
        self._outdated = False
        self._fetch: _Fetch | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self.settle()
        new = memo[id(self)] = copy.copy(self)
        new._asked = dict(self._asked)
        if self.batch:
            self.copy_engine.synchronize()
            new.copy_engine = copy.deepcopy(self.copy_engine, memo)
        with torch.inference_mode(False):
            new.pages = [
                torch.empty_like(page, pin_memory=page.is_pinned()).copy_(page)
                for page in self.pages
            ]
            new.slots, new._held = (
                None if x is None else x.clone() for x in (self.slots, self._held)
            )
        return new

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return vars(self)

    @property
    def nbytes(self) -> int:
        """Bytes of CPU memory allocated, headroom and staging memory included."""
        memories = [*self.pages, self.copy_engine.buffer] if self.batch else []
        return sum(memory.untyped_storage().nbytes() for memory in memories)

    def accepts(self, k: Tensor, v: Tensor) -> bool:
        """True if the bank holds layers like this one: the first layer decides."""
        row = Row(k.shape[1], k.shape[3], v.shape[3], k.dtype)
        if not self.batch:
            self.row, self.batch, self.copy_engine = row, k.shape[0], CopyEngine(k.device)
        return (row, k.device, k.shape[0]) == (self.row, self.copy_engine.device, self.batch)

    def enter(self, layer: int, k: Tensor, v: Tensor) -> bool:
        """Take in a layer with such keys and values, still without tokens; False if it cannot."""
        if not self.accepts(k, v):
            return False
        self._asked[layer] = self._selections
        self._outdated = True
        return True

    def leave(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Release a layer: the keys (B, G, n, D) and values of its first `length` tokens."""
        self.settle()
        self._check(layer)
        rows = torch.empty(
            (0, self.batch, self.row.width), dtype=self.row.dtype, device=self.copy_engine.device
        )
        keys, values = BankedKV(self, layer, length, rows).read()
        del self._asked[layer]
        self._outdated = True
        if not self._asked:
            self.copy_engine.synchronize()
            self._clear()
        return keys.contiguous(), values.contiguous()

    def batch_size(self, layer: int) -> int:
        """Sequences of a layer, which may still have to be asked for the latest selection."""
        if self._asked[layer] == self._selections:
            return self.batch
        return self._batch_before

    def _check(self, layer: int) -> None:
        """Raise HeadwiseError if a layer was not asked for all selections of sequences."""
        if self._asked.get(layer, self._selections) != self._selections:
            raise HeadwiseError(
                "sequences were selected or reordered in some layers of this cache only: call the "
                "cache's own batch_select_indices or reorder_cache"
            )

    def append(self, layer: int, past: int, k: Tensor, v: Tensor) -> BankedKV:
        """Append new keys (B, G, Q, D) and values to the `past` tokens of a layer.

        Raises:
            HeadwiseError: they are of another number of sequences than the bank's, or of other
                heads.
        """
        self._check(layer)
        sizes = k.shape[0], k.shape[1], k.shape[3], v.shape[3]
        held = self.batch, self.row.heads, self.row.k_dim, self.row.v_dim
        if sizes != held:
            raise HeadwiseError(
                f"new tokens must have the cache's sequences, KV heads and head sizes {held}, "
                f"got {sizes}"
            )
        rows = self.row.pack(k, v)
        self._length = max(self._length, past + rows.shape[0])
        self._reserve(past + rows.shape[0])
        for page, first, here in self._span(past, past + rows.shape[0]):
            self.copy_engine.write(
                page[layer, here], rows[first - past :][: here.stop - here.start]
            )
        return BankedKV(self, layer, past, rows)

    def read(self, call: BankedKV) -> Tensor:
        """Copy the rows (K, B, R) of all tokens of a layer in a call to the device."""
        self.copy_engine.wait_writes()
        whole = call.rows.new_empty(call.past + call.rows.shape[0], *call.rows.shape[1:])
        for page, first, here in self._span(0, call.past):
            whole[first:][: here.stop - here.start].copy_(page[call.layer, here], non_blocking=True)
        whole[call.past :] = call.rows
        return whole

    def fetch(self, tokens: Tensor, past: int) -> None:
        """Start fetching the selected tokens (B, C) int32, ascending and padded, before `past`.

        With a GPU this returns at once; `attended` waits. An empty bank fetches nothing.
        """
        self.settle()
        if not self._asked:
            return
        width = tokens.shape[-1]
        if self.slots is None or self.slots.shape[1] < width or self.slots.shape[2] != self.batch:
            # A budget that is a fraction of the context grows with it.
            if self.slots is None:
                size = width
            else:
                size = width + width // 8
            shape = (self.layers, size, self.batch, self.row.width)
            with torch.inference_mode(False):
                self.slots = torch.empty(
                    shape, dtype=self.row.dtype, device=self.copy_engine.device
                )
                self._held = torch.full((self.batch, size), _EMPTY, dtype=torch.long, device="cpu")
        if self._outdated and self._held is not None:
            self._held.fill_(_EMPTY)
        self._outdated = False
        counts = self.copy_engine.submit(self._replace, tokens, past)
        self._fetch = _Fetch(frozenset(self._asked), counts)

    def _replace(self, tokens: Tensor, past: int) -> Tensor:
        """Fetch what is missing of the tokens (B, C) before `past`; how many there are, (B,)."""
        slots = self.slots
        held = self._held
        assert slots is not None and held is not None
        selected = tokens.long()
        counts = (selected < past).sum(1)
        # If this fails, the content of the slots is unknown.
        after = held.clone()
        held.fill_(_EMPTY)
        sequences, wanted, places = replaced(after, selected, counts)
        if wanted.numel():
            every = torch.arange(self.layers, device="cpu")
            self._deliver(every, sequences, wanted, places, slots)
        held.copy_(after)
        return counts

    def attended(self, call: BankedKV) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Keys and values that a layer attends to in a call: its selected past, then its new rows.

        Returns:
            Keys (B, G, C, D), values (B, G, C, E) and, if sequences differ in length, the valid
            ones (B, C) int32, ascending and padded. None if the layer came into the bank after
            the tokens were selected.
        """
        fetch = self._fetch
        if fetch is None or call.layer not in fetch.layers:
            return None
        counts: Tensor = self.copy_engine.wait(fetch.counts)
        new = call.rows.shape[0]
        assert self.slots is not None
        longest = int(counts.max())
        slots = self.slots[call.layer]
        slots[longest : longest + new] = call.rows
        k, v = self.row.unpack(slots[: longest + new].to(call.rows.dtype))
        if int(counts.min()) == longest:
            return k, v, None
        place = torch.arange(longest + new, dtype=torch.int32, device="cpu")
        valid = (place < counts[:, None]) | (place >= longest)
        read = torch.where(valid, place, PAD).sort(-1).values
        return k, v, read.to(slots.device, non_blocking=True)

    def selected(self, call: BankedKV, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (B, G, n + Q, D) and values of past tokens (B, n) of a layer, then of new ones."""
        self.settle()
        batch, count = tokens.shape
        shape = (count, batch, self.row.width)
        rows = torch.empty(shape, dtype=self.row.dtype, device=self.copy_engine.device)
        layer = torch.tensor([call.layer], dtype=torch.long, device="cpu")
        sequences = torch.arange(batch, device="cpu").repeat_interleave(count)
        places = torch.arange(count, device="cpu").repeat(batch)
        copied = self.copy_engine.submit(self._gather, tokens, layer, sequences, places, rows[None])
        self.copy_engine.wait(copied)
        return self.row.unpack(torch.cat([rows.to(call.rows.dtype), call.rows]))

    def _gather(
        self, tokens: Tensor, layer: Tensor, sequences: Tensor, places: Tensor, rows: Tensor
    ) -> None:
        """Copy rows of tokens (B, n) of one layer to places (B * n,) of rows (1, n, B, R)."""
        self._deliver(layer, sequences, tokens.flatten(), places, rows)

    def crop(self, length: int) -> None:
        """Forget fetched rows of the tokens from `length` on."""
        self.settle()
        if self._held is not None:
            self._held.masked_fill_(self._held >= length, _EMPTY)

    def select(self, layer: int, sequences: Tensor) -> None:
        """Make sequence b what sequences[b] was: done once, for all layers are asked alike.

        Raises:
            HeadwiseError: a layer is asked for other sequences than the one before it.
        """
        first_asked = self._asked[layer] == self._selections
        self._asked[layer] += 1
        if not first_asked:
            latest = self._selected
            # All layers of a cache get the same tensor: comparing another one waits for its device.
            if latest is not sequences and not torch.equal(
                indices_on(latest, "cpu"), indices_on(sequences, "cpu")
            ):
                self._asked[layer] = -1
            self._check(layer)
            return
        self._selections += 1
        self._selected = sequences
        self._batch_before = self.batch
        self.settle()
        # Also negative ones, and a mask, as a tensor takes them.
        sequences = torch.arange(self.batch, device="cpu")[indices_on(sequences, "cpu")]
        length = self._length
        self.copy_engine.synchronize()
        old = self.pages
        first = 0
        with torch.inference_mode(False), torch.no_grad():
            if len(sequences) != self.batch:
                self.batch = len(sequences)
                self.pages = []
                self._reserve(length)
            for page in old:
                rows = page[:, : max(length - first, 0)].index_select(2, sequences)
                for target, at, here in self._span(first, first + rows.shape[1]):
                    target[:, here] = rows[:, at - first :][:, : here.stop - here.start]
                first += page.shape[1]
            if self.slots is not None and self._held is not None:
                self.slots = self.slots.index_select(2, sequences.to(self.slots.device))
                self._held = self._held.index_select(0, sequences)

    def settle(self) -> None:
        """Wait for a running fetch and drop its selection."""
        fetch = self._fetch
        self._fetch = None
        if fetch is not None:
            self.copy_engine.wait(fetch.counts)

    def _reserve(self, length: int) -> None:
        """Allocate pages for `length` tokens."""
        token = self.layers * self.batch * self.row.width * self.row.dtype.itemsize
        while (missing := length - sum(page.shape[1] for page in self.pages)) > 0:
            total = sum(page.nbytes for page in self.pages)
            minimum = max(_MIN_TOKENS * token, total // _FRACTION)
            # Pinned memory is allocated in powers of two: the missing part is made of several.
            nbytes = max(1 << ((missing * token).bit_length() - 1), 1 << (minimum - 1).bit_length())
            tokens = nbytes // token
            with torch.inference_mode(False):
                page = self.copy_engine.memory(nbytes)[: tokens * token].view(self.row.dtype)
            self.pages.append(page.view(self.layers, tokens, self.batch, self.row.width))

    def _span(self, start: int, stop: int) -> Iterator[tuple[Tensor, int, slice]]:
        """Tokens start to stop by page: the page, its first such token, and their range in it."""
        before = 0
        for page in self.pages:
            lo = max(start, before)
            hi = min(stop, before + page.shape[1])
            if lo < hi:
                yield page, lo, slice(lo - before, hi - before)
            before += page.shape[1]

    def _deliver(
        self, layers: Tensor, sequences: Tensor, tokens: Tensor, places: Tensor, slots: Tensor
    ) -> None:
        """Copy rows of tokens (N,) of `layers` to places (N,) of slots (L, S, B, R) at once."""
        by_token = tokens.argsort(stable=True)
        sequences = sequences[by_token]
        tokens = tokens[by_token]
        places = places[by_token]
        # The slots hold one layer, or all layers of the bank.
        if slots.shape[0] > 1:
            to = layers
        else:
            to = torch.zeros_like(layers)
        targets = (to[:, None] * slots.shape[1] + places) * self.batch + sequences
        bounds = [0, *accumulate(page.shape[1] for page in self.pages)]
        cuts = torch.searchsorted(
            tokens, torch.tensor(bounds, dtype=torch.long, device="cpu")
        ).tolist()
        self.copy_engine.synchronize()
        staged = self.copy_engine.staging(
            layers.numel() * tokens.numel(), self.row.width, self.row.dtype
        )
        order = []
        for page, first, lo, hi in zip(self.pages, bounds, cuts, cuts[1:], strict=False):
            if hi > lo:
                lines = layers[:, None] * page.shape[1] + tokens[lo:hi] - first
                lines = lines * self.batch + sequences[lo:hi]
                out = staged[layers.numel() * lo : layers.numel() * hi]
                torch.index_select(page.view(-1, self.row.width), 0, lines.flatten(), out=out)
                order.append(targets[:, lo:hi].flatten())
        self.copy_engine.deliver(staged, slots.view(-1, self.row.width), torch.cat(order))


def indices_on(indices: Any, device: torch.device | str) -> Tensor:
    """Indices of sequences, or a mask as a tensor, on a device."""
    if isinstance(indices, Tensor):
        return indices.to(device)
    return torch.tensor(indices, device=device, dtype=torch.long)


def replaced(held: Tensor, selected: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Assign a slot to each selected token; a token that has one keeps it.

    Slots 0 to counts[i] - 1 are then taken.

    Args:
        held: (B, S) the token in each slot, -1 for none; on return the one after the fetch.
        selected: (B, C) tokens, ascending, of which the first counts[i] are wanted.
        counts: (B,).

    Returns:
        Sequence, token and slot of each row that must be fetched, (N,) each.
    """
    slot = torch.arange(held.shape[1], device="cpu")
    entry = torch.arange(selected.shape[1], device="cpu")
    used = slot < counts[:, None]
    wanted = entry < counts[:, None]
    at = torch.searchsorted(selected, held).clamp_(max=selected.shape[1] - 1)
    stays = used & (selected.gather(1, at) == held)
    # One extra column takes the slots that do not stay.
    missing = torch.nn.functional.pad(wanted, (0, 1))
    missing.scatter_(1, torch.where(stays, at, selected.shape[1]), False)
    missing = missing[:, :-1]
    free = used & ~stays
    sequences, places = free.nonzero(as_tuple=True)
    tokens = selected[missing]
    held.masked_fill_(~stays, _EMPTY)
    held[sequences, places] = tokens
    return sequences, tokens, places


class BankedKV:
    """Keys and values of a layer in a call: past in the bank, new rows (Q, B, R) on the device."""

    def __init__(self, bank: Bank, layer: int, past: int, rows: Tensor) -> None:
        self.bank = bank
        self.layer = layer
        self.past = past
        self.rows = rows
        self._whole: tuple[Tensor, Tensor] | None = None

    def read(self) -> tuple[Tensor, Tensor]:
        """Fetch all keys (B, G, K, D) and values (B, G, K, E), once; freed with this object."""
        if self._whole is None:
            self._whole = self.bank.row.unpack(self.bank.read(self))
        return self._whole


class OffloadedTensor(LazyTensor):
    """Keys (B, G, K, D) or values (B, G, K, E) on the device, without memory until they are read.

    Code that reads one as a tensor gets all of it, fetched once a call; Headwise's attention
    fetches only selected tokens.
    """

    banked: BankedKV
    _which: int

    @staticmethod
    def __new__(cls, banked: BankedKV, which: int) -> OffloadedTensor:
        """Make the tensor without its elements; see LazyTensor.empty."""
        row = banked.bank.row
        new, batch, _ = banked.rows.shape
        shape = (batch, row.heads, banked.past + new, (row.k_dim, row.v_dim)[which])
        tensor = cls.empty(shape, banked.rows.dtype, banked.rows.device)
        tensor.banked = banked
        tensor._which = which
        return tensor

    def read(self) -> Tensor:
        """Fetch all of it as a plain tensor."""
        return self.banked.read()[self._which]


def fetched(tensor: Tensor) -> Tensor:
    """Keys or values as a plain tensor, fetched where they are offloaded."""
    if isinstance(tensor, OffloadedTensor):
        return tensor.read()
    return tensor
