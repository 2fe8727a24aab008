"""A cache layer that grows in place. Importing this imports transformers.

Shapes: B batch, G KV heads, n tokens in the cache, Q new tokens, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from runtime.caches.room import room_for, with_room


class GrowingLayer(DynamicLayer):
    """Keys and values in memory with room at the end: a new token costs its own bytes, not a copy
    of all before it.

    `DynamicLayer` concatenates at every step, which at 32K tokens moves more memory than the
    model's weights."""

    keys: Tensor
    values: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._rooms: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys = key_states[:, :, :0]
        self.values = value_states[:, :, :0]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append (B, G, Q, D) and (B, G, Q, E); the views (B, G, n + Q, ...) of all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        old = self.get_seq_length()
        new = old + key_states.shape[-2]
        keys, values = (
            with_room(held, old, new, room_for(new))
            for held in self._rooms or (self.keys, self.values)
        )
        keys[:, :, old:new] = key_states
        values[:, :, old:new] = value_states
        self._rooms = keys, values
        self.keys = keys[:, :, :new]
        self.values = values[:, :, :new]
        return self.keys, self.values

    @property
    def batch(self) -> int:
        """Sequences, 0 before the first token."""
        return self.keys.shape[0] if self.get_seq_length() else 0

    def reset(self) -> None:
        # transformers before 5.17 keeps the length and zeroes the tokens.
        self._rooms = None
        self.is_initialized = False
        self.keys = self.values = None  # type: ignore[assignment]
        super().reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._rooms = None
        super().batch_select_indices(
            indices.to(self.keys.device) if self.is_initialized else indices
        )
