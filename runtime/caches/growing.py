"""Cache layers that keep every token: in memory with headroom, with a selector's scores, in a bank.

Importing this imports transformers.

Shapes: B batch, G KV heads, n tokens in the cache, Q new tokens, D head dim, E value dim,
C selected tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from artifacts import HeadwiseError
from runtime.autocast import in_one_dtype
from runtime.caches.policy import grown, with_headroom
from runtime.omnikv.bank import Bank, OffloadedTensor
from runtime.omnikv.session import announce
from runtime.training import GRADIENTS, differentiated

# Rows of scores beyond the selector's window: as many tokens as are drafted at a time.
_DRAFTS = 16


class GrowingLayer(DynamicLayer):
    """Keys and values in memory with headroom: a new token costs its own bytes.

    `DynamicLayer` concatenates at every step, which at 32K tokens moves more memory than the
    model's weights.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # Keys and values with their headroom.
        self._memory: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See DynamicLayer.lazy_initialization."""
        super().lazy_initialization(key_states, value_states)
        self.keys = key_states[:, :, :0]
        self.values = value_states[:, :, :0]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append (B, G, Q, D) and (B, G, Q, E); returns views (B, G, n + Q, ...) of all.

        Under autocast they are kept in its dtype.
        """
        key_states, value_states = in_one_dtype(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past = self.get_seq_length()
        end = past + key_states.shape[-2]
        if torch.is_grad_enabled():
            # As DynamicLayer: the way back reads the keys and values of every call.
            self._memory = None
            self.keys = torch.cat([self.keys.to(key_states.dtype), key_states], dim=-2)
            self.values = torch.cat([self.values.to(value_states.dtype), value_states], dim=-2)
            return self.keys, self.values
        keys, values = self._memory or (self.keys, self.values)
        # The dtype changes where autocast is turned on or off between two calls.
        keys = grown(keys.to(key_states.dtype), past, end, with_headroom(end))
        values = grown(values.to(value_states.dtype), past, end, with_headroom(end))
        keys[:, :, past:end] = key_states
        values[:, :, past:end] = value_states
        self._memory = keys, values
        self.keys = keys[:, :, :end]
        self.values = values[:, :, :end]
        return self.keys, self.values

    @property
    def batch(self) -> int:
        """Sequences, 0 before the first token."""
        if self.get_seq_length():
            return self.keys.shape[0]
        return 0

    def reset(self) -> None:
        """See DynamicLayer.reset."""
        # transformers before 5.17 keeps the length and zeroes the tokens.
        self._memory = None
        self.is_initialized = False
        self.keys = self.values = None  # type: ignore[assignment]
        super().reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """See DynamicLayer.reorder_cache."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See DynamicLayer.batch_repeat_interleave."""
        self.batch_select_indices(torch.arange(self.batch, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """See DynamicLayer.batch_select_indices."""
        self._memory = None
        if self.is_initialized:
            indices = indices.to(self.keys.device)
        super().batch_select_indices(indices)


class FilterLayer(GrowingLayer):
    """Cache of a filter layer: keys, values, and scores of its last queries (OmniKV's selector).

    history (B, rows, n) fp32: the scores that each query gave to each token, the latest last; None
    before any. It has more rows than the window, so that the window is whole again after drafts
    were rejected.

    Attributes:
        number: the layer's number.
        window: W, the queries whose scores select.
        served: the layers in banks that attend to its selection, bank by bank.
    """

    def __init__(
        self,
        number: int,
        window: int,
        served: Sequence[Sequence[BankedLayer]] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.number = number
        self.window = window
        self.served = served
        self.history: Tensor | None = None
        # Length of the cache when each row of history was written.
        self._written: list[int] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See GrowingLayer.update; the attention that follows takes this layer (omnikv.session)."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        announce(self)
        return keys, values

    def remember(self, scores: Tensor) -> Tensor:
        """Add scores (B, n) of the newest query; returns the window's (B, at most W, n)."""
        rows = scores[:, None]
        if self.history is not None:
            past = self.history[:, 1 - self.window - _DRAFTS :]
            longer = torch.nn.functional.pad(past, (0, scores.shape[-1] - past.shape[-1]))
            rows = torch.cat([longer, rows], dim=1)
        self.history = rows
        self._written = [*self._written, scores.shape[-1]][-rows.shape[1] :]
        return rows[:, -self.window :]

    def fetch(self, tokens: Tensor, past: int) -> None:
        """Start fetching tokens (B, C), ascending and padded, of those before `past`."""
        for layers in self.served:
            if any(layer.get_seq_length() != past for layer in layers):
                continue
            if any([layer.to_bank(layer.keys, layer.values) for layer in layers]):
                layers[0].bank.fetch(tokens, past)

    def crop(self, tokens_to_remove: int) -> None:
        """See DynamicLayer.crop."""
        super().crop(tokens_to_remove)
        if self.history is not None and tokens_to_remove:
            left = self.get_seq_length()
            rows = sum(written <= left for written in self._written)
            self._written = self._written[:rows]
            if rows:
                self.history = self.history[:, :rows, :left]
            else:
                self.history = None

    def reset(self) -> None:
        """See DynamicLayer.reset."""
        self.history = None
        self._written = []
        super().reset()

    def batch_select_indices(self, indices: Tensor) -> None:
        """See DynamicLayer.batch_select_indices."""
        super().batch_select_indices(indices)
        if self.history is not None:
            self.history = self.history[indices.to(self.history.device)]


class BankedLayer(GrowingLayer):
    """Keys and values in a context bank, from which attention fetches the selected tokens.

    A layer stays on the device while it is no longer than the selection, or if its heads differ
    from those of the bank's first layer.
    """

    def __init__(self, bank: Bank, place: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.bank = bank
        self.place = place
        # Tokens in the bank; None while the layer is on the device.
        self._banked: int | None = None

    def get_seq_length(self) -> int:
        """See DynamicLayer.get_seq_length."""
        if self._banked is None:
            return super().get_seq_length()
        return self._banked

    @property
    def batch(self) -> int:
        """See GrowingLayer.batch."""
        if self._banked is None:
            return super().batch
        return self.bank.batch

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append (B, G, Q, D) and (B, G, Q, E).

        Returns all keys and values; lazy tensors if the past is in the bank.
        """
        key_states, value_states = in_one_dtype(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past = self.get_seq_length()
        trained = differentiated(key_states, value_states)
        if trained and self._banked is not None:
            raise HeadwiseError(
                f"this cache keeps keys and values in CPU memory, without gradients: {GRADIENTS}; "
                "new_cache(offload='never') keeps them on the device"
            )
        if past + key_states.shape[-2] > self.bank.keep and not trained:
            self.to_bank(key_states, value_states)
        if self._banked is None:
            return super().update(key_states, value_states, *args, **kwargs)
        banked = self.bank.append(self.place, past, key_states, value_states)
        self._banked = past + key_states.shape[-2]
        if not past:
            return key_states, value_states
        return OffloadedTensor(banked, 0), OffloadedTensor(banked, 1)

    def to_bank(self, key_states: Tensor, value_states: Tensor) -> bool:
        """Move to the bank if it takes such keys and values; True if the layer is now in it."""
        if self._banked is None and self.bank.takes(key_states, value_states):
            past = self.get_seq_length()
            if past:
                self.bank.append(self.place, 0, self.keys, self.values)
            self._banked = past
            self._memory = None
            self.keys = self.values = None  # type: ignore[assignment]
        return self._banked is not None

    def crop(self, tokens_to_remove: int) -> None:
        """See DynamicLayer.crop."""
        if self._banked is None or tokens_to_remove > 0:
            super().crop(tokens_to_remove)
        else:
            self._banked = max(self._banked + tokens_to_remove, 0)
            self.bank.crop(self._banked)

    def reset(self) -> None:
        """See DynamicLayer.reset."""
        self._banked = None
        self.bank.clear()
        super().reset()

    def batch_select_indices(self, indices: Tensor) -> None:
        """See DynamicLayer.batch_select_indices."""
        if self._banked is None:
            super().batch_select_indices(indices)
        elif self.place == self.bank.leader:
            # All layers of a filter layer share one bank: only the first selects in it.
            self.bank.select(indices, self._banked)
