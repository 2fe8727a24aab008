"""The layers that one filter layer serves: their context bank, and one packed copy of what was chosen (OmniKV, 4.2).

Shapes: L layers of a group, B batch, G KV heads, Q new tokens, D head dim, E value dim, C chosen tokens,
R = G * (D + E) numbers in a row, S slots on the device, N rows that are fetched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from kernels.index import PAD
from runtime.omnikv.bank import Bank, Row
from runtime.omnikv.lane import lane_to
from runtime.omnikv.offload import Offload

_EMPTY = -1


class Group:
    """The layers that one filter layer serves on one device: one bank, and one packed copy of what was chosen.

    In a decode step the chosen rows of all layers are fetched at once into slots on the device. Rows that the step
    before chose, too, stay where they are, so slots are in no order; the new tokens stand behind those of the longest
    sequence, in order, so that few queries at once stay causal.

    layers: how many there are. keep: a layer of so many tokens stays on the device.
    """

    def __init__(self, layers: int, keep: int) -> None:
        self.layers, self.keep = layers, keep
        self.bank: Bank | None = None
        # The first layer that came to the bank speaks for all where a call concerns the whole group.
        self.leader: int | None = None
        # (L, S, B, R) on the device, and on the host the token in each slot of each sequence, (B, S).
        self.slots: Tensor | None = None
        self._held: Tensor | None = None
        # How many keys there were when a step chose, and what waits for the rows and says how many a sequence has, (B).
        self._chosen: tuple[int, Callable[[], Tensor]] | None = None
        # Which slots are read, by number of new tokens.
        self._read: dict[int, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self._settle()
        new = copy.copy(self)
        memo[id(self)] = new
        new._read = {}
        with torch.inference_mode(False):
            new.bank = copy.deepcopy(self.bank, memo)
            new.slots, new._held = (None if x is None else x.clone() for x in (self.slots, self._held))
        return new

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return vars(self)

    def takes(self, k: Tensor, v: Tensor) -> bool:
        """Whether the bank is for layers like this one: the first decides, others stay on the device."""
        row = Row(k.shape[1], k.shape[3], v.shape[3])
        if self.bank is None:
            self.bank = Bank(self.layers, k.shape[0], row, k.dtype, lane_to(k.device))
        bank = self.bank
        return (row, k.dtype, k.device, k.shape[0]) == (bank.row, bank.dtype, bank.lane.device, bank.batch)

    def append(self, layer: int, past: int, k: Tensor, v: Tensor) -> Offload:
        """Put new keys (B, G, Q, D) and values behind the `past` tokens of a layer."""
        assert self.bank is not None
        self.leader = layer if self.leader is None else self.leader
        rows = self.bank.row.pack(k, v)
        self.bank.reserve(past + rows.shape[0])
        self.bank.write(layer, past, rows)
        return Offload(self, layer, past, rows)

    def fetch(self, tokens: Tensor, past: int) -> None:
        """Begin to fetch the tokens (B, C) int32 before `past` that a filter layer chose: ascending, padded.

        Returns at once where there is a GPU; `attended` waits.
        """
        self._settle()
        bank, width = self.bank, tokens.shape[-1]
        assert bank is not None
        if self.slots is None or self.slots.shape[1] < width or self.slots.shape[2] != bank.batch:
            # A budget that is a share of the context grows with it.
            room = width if self.slots is None else width + width // 8
            with torch.inference_mode(False):
                self.slots = torch.empty(
                    bank.layers, room, bank.batch, bank.width, dtype=bank.dtype, device=bank.lane.device
                )
                self._held = torch.full((bank.batch, room), _EMPTY)
        slots, held = self.slots, self._held
        assert held is not None
        listed = bank.lane.to_host(tokens)

        def work() -> Tensor:
            chosen = listed().long()
            counts = (chosen < past).sum(1)
            # If this fails, the slots hold nothing that is known.
            after = held.clone()
            held.fill_(_EMPTY)
            sequences, wanted, places = replaced(after, chosen, counts)
            if wanted.numel():
                _deliver(bank, torch.arange(bank.layers), sequences, wanted, places, slots)
            held.copy_(after)
            return counts

        self._read.clear()
        self._chosen = past, bank.lane.start(work)

    def attended(self, layer: int, past: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """What a layer attends to: what was chosen of its `past` tokens, then its new rows (Q, B, R).

        Keys (B, G, C, D), values (B, G, C, E) and, where sequences differ in length, which of them count: (B, C)
        int32, ascending and padded. None where nothing was chosen for this length.
        """
        if self._chosen is None or self._chosen[0] != past:
            return None
        counts, new = self._chosen[1](), rows.shape[0]
        assert self.bank is not None and self.slots is not None
        most, slots = int(counts.max()), self.slots[layer]
        slots[most : most + new] = rows
        k, v = self.bank.row.unpack(slots[: most + new])
        if int(counts.min()) == most:
            return k, v, None
        if new not in self._read:
            place = torch.arange(most + new, dtype=torch.int32)
            read = torch.where((place < counts[:, None]) | (place >= most), place, PAD).sort(-1).values
            self._read[new] = read.to(slots.device, non_blocking=True)
        return k, v, self._read[new]

    def chosen(self, layer: int, tokens: Tensor) -> Tensor:
        """Rows (n, B, R) of a layer's tokens (B, n), brought to the device."""
        self._settle()
        bank = self.bank
        assert bank is not None
        batch, count = tokens.shape
        rows = torch.empty(count, batch, bank.width, dtype=bank.dtype, device=bank.lane.device)
        listed = bank.lane.to_host(tokens)

        def work() -> None:
            sequences = torch.arange(batch).repeat_interleave(count)
            places = torch.arange(count).repeat(batch)
            _deliver(bank, torch.tensor([layer]), sequences, listed().flatten(), places, rows[None])

        bank.lane.start(work)()
        return rows

    def crop(self, length: int) -> None:
        """Forget what was fetched of the tokens from `length` on."""
        self._settle()
        if self._held is not None:
            self._held.masked_fill_(self._held >= length, _EMPTY)

    def select(self, sequences: Tensor, length: int) -> None:
        """Let sequence b be what sequence sequences[b] was, with `length` tokens of each layer in the bank."""
        self._settle()
        if self.bank is None:
            return
        sequences = sequences.cpu().long()
        with torch.inference_mode(False), torch.no_grad():
            self.bank.select(sequences, length)
            if self.slots is not None and self._held is not None:
                self.slots = self.slots.index_select(2, sequences.to(self.slots.device))
                self._held = self._held.index_select(0, sequences)

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self._settle()
        if self.bank is not None:
            self.bank.lane.arrived()
        self.bank = self.leader = self.slots = self._held = None

    def _settle(self) -> None:
        """Let a fetch under way end; its choice holds no longer."""
        chosen, self._chosen = self._chosen, None
        if chosen is not None:
            chosen[1]()


def _deliver(bank: Bank, layers: Tensor, sequences: Tensor, tokens: Tensor, places: Tensor, slots: Tensor) -> None:
    """Rows of tokens (N,) into places (N,) of slots (L, S, B, R) on the device, in one copy; see Bank.gather."""
    by_token = tokens.argsort(stable=True)
    sequences, tokens, places = sequences[by_token], tokens[by_token], places[by_token]
    bank.lane.arrived()
    staged = bank.lane.staging(layers.numel() * tokens.numel(), bank.width, bank.dtype)
    order = bank.gather(layers, sequences, tokens, staged)
    # What is fetched of one layer alone has slots of its own.
    layers = layers if slots.shape[0] > 1 else torch.zeros_like(layers)
    target = ((layers[:, None] * slots.shape[1] + places) * bank.batch + sequences).flatten()[order]
    bank.lane.deliver(staged, slots.view(-1, bank.width), target)


def replaced(held: Tensor, chosen: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give each chosen token a slot, those that have one already the same; slots 0 to counts[i] - 1 are then taken.

    Args:
        held: (B, S) the token in each slot, -1 for none; on return what is in it after the fetch.
        chosen: (B, C) tokens, ascending, of which the first counts[i] are wanted.

    Returns:
        Sequence, token and slot of each row that must be fetched, (N,) each.
    """
    slot, entry = torch.arange(held.shape[1]), torch.arange(chosen.shape[1])
    used = slot < counts[:, None]
    wanted = entry < counts[:, None]
    at = torch.searchsorted(chosen, held).clamp_(max=chosen.shape[1] - 1)
    stays = used & (chosen.gather(1, at) == held)
    # One column more takes the slots that do not stay.
    missing = torch.nn.functional.pad(wanted, (0, 1))
    missing.scatter_(1, torch.where(stays, at, chosen.shape[1]), False)
    missing = missing[:, :-1]
    free = used & ~stays
    sequences, places = free.nonzero(as_tuple=True)
    tokens = chosen[missing]
    held.masked_fill_(~stays, _EMPTY)
    held[sequences, places] = tokens
    return sequences, tokens, places
