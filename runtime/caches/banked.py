"""Cache layers of models that decode as OmniKV does: of filter layers, and of those in a context
bank.

Importing this imports transformers.

Shapes: B batch, G KV heads, n tokens in the cache, Q new tokens, D head dim, C chosen tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.caches.growing import GrowingLayer
from runtime.omnikv.bank import Bank, OffloadedTensor

# Rows of scores beyond the selector's window: as many tokens as are drafted at a time.
_SPARE = 16


class FilterLayer(GrowingLayer):
    """The cache of a filter layer: beside keys and values the scores of its last queries (OmniKV's
    context selector).

    `history` (B, rows, n) fp32: row by row what a query gave each token, the latest last; None
    before any. It has more rows than the window, so that the window is whole again after drafts
    were rejected.

    served: the layers that attend to what it chooses and are in banks, bank by bank.
    """

    def __init__(
        self, window: int, served: Sequence[Sequence[BankedLayer]] = (), **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.window = window
        self.served = served
        self.history: Tensor | None = None
        # Length of the cache when each row of history was written.
        self._written: list[int] = []

    def __getstate__(self) -> dict[str, Any]:
        # A pickle or a copy finds its own way from keys to their layer, at the next update.
        state = dict(vars(self))
        return state if state.get("keys") is None else state | {"keys": state["keys"].detach()}

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See GrowingLayer.update."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        # The attention function gets these very tensors, and finds by them what is kept beside
        # them.
        keys.headwise_cache = weakref.ref(self)  # type: ignore[attr-defined]
        return keys, values

    def remember(self, scores: Tensor) -> Tensor:
        """Take in scores (B, n) of the newest query; the window's rows (B, at most W, n), the
        latest last."""
        rows = scores[:, None]
        if self.history is not None:
            past = self.history[:, 1 - self.window - _SPARE :]
            longer = torch.nn.functional.pad(past, (0, scores.shape[-1] - past.shape[-1]))
            rows = torch.cat([longer, rows], dim=1)
        self.history = rows
        self._written = [*self._written, scores.shape[-1]][-rows.shape[1] :]
        return rows[:, -self.window :]

    def chose(self, tokens: Tensor, past: int) -> None:
        """Begin to fetch tokens (B, C), ascending and padded, of those before `past`, for the
        layers served."""
        for layers in self.served:
            if any(layer.get_seq_length() != past for layer in layers):
                continue
            if any([layer.to_bank(layer.keys, layer.values) for layer in layers]):
                layers[0].bank.fetch(tokens, past)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.history is not None and tokens_to_remove:
            left = self.get_seq_length()
            kept = sum(written <= left for written in self._written)
            self._written = self._written[:kept]
            self.history = self.history[:, :kept, :left] if kept else None

    def reset(self) -> None:
        self.history = None
        self._written = []
        super().reset()

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.history is not None:
            self.history = self.history[indices.to(self.history.device)]


class BankedLayer(GrowingLayer):
    """Keys and values in a context bank; what attention needs of them comes to the device when it
    needs it.

    A layer no longer than what is chosen of it stays on the device, and so does one whose heads are
    unlike those of the bank's first layer."""

    def __init__(self, bank: Bank, place: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.bank = bank
        self.place = place
        # Tokens in the bank; None while the layer is on the device.
        self._banked: int | None = None

    def get_seq_length(self) -> int:
        return super().get_seq_length() if self._banked is None else self._banked

    @property
    def batch(self) -> int:
        return super().batch if self._banked is None else self.bank.batch

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append (B, G, Q, D) and (B, G, Q, E); all keys and values, or stand-ins where the past is
        in the bank."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past = self.get_seq_length()
        if past + key_states.shape[-2] > self.bank.keep:
            self.to_bank(key_states, value_states)
        if self._banked is None:
            return super().update(key_states, value_states, *args, **kwargs)
        offload = self.bank.append(self.place, past, key_states, value_states)
        self._banked = past + key_states.shape[-2]
        return (
            (OffloadedTensor(offload, 0), OffloadedTensor(offload, 1))
            if past
            else (key_states, value_states)
        )

    def to_bank(self, key_states: Tensor, value_states: Tensor) -> bool:
        """Leave the device for the bank, if it takes keys and values like these; whether the layer
        is in it now."""
        if self._banked is None and self.bank.takes(key_states, value_states):
            past = self.get_seq_length()
            if past:
                self.bank.append(self.place, 0, self.keys, self.values)
            self._banked = past
            self._rooms = None
            self.keys = self.values = None  # type: ignore[assignment]
        return self._banked is not None

    def crop(self, tokens_to_remove: int) -> None:
        if self._banked is None or tokens_to_remove > 0:
            super().crop(tokens_to_remove)
        else:
            self._banked = max(self._banked + tokens_to_remove, 0)
            self.bank.crop(self._banked)

    def reset(self) -> None:
        self._banked = None
        self.bank.clear()
        super().reset()

    def batch_select_indices(self, indices: Tensor) -> None:
        if self._banked is None:
            super().batch_select_indices(indices)
        elif self.place == self.bank.leader:
            # All layers of a filter layer are in one bank, and each is told.
            self.bank.select(indices, self._banked)
