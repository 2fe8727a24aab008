"""Cache layers that keep every token: in memory with headroom, with a selector's scores, in a bank.

Importing this imports transformers.

Shapes: B batch, G KV heads, n tokens in the cache, Q new tokens, D head dim, E value dim,
C selected tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from artifacts import HeadwiseError
from runtime.autocast import in_one_dtype
from runtime.caches.policy import grown, with_headroom
from runtime.omnikv.bank import Bank, OffloadedTensor, indices_on
from runtime.training import GRADIENTS, differentiated

_NAMES = ("keys", "values")
# Rows of scores beyond the selector's window: as many tokens as are drafted at a time.
_DRAFTS = 16


class GrowingLayer(DynamicLayer):
    """Keys and values in memory with headroom: a new token costs its own bytes.

    `DynamicLayer` concatenates at every step, which at 32K tokens moves more memory than the
    model's weights.

    `keys` and `values` are the only store, as in `DynamicLayer`: they can be replaced, and edited
    in place until the next token. Code that read one may hold it or edit it later. So the next
    token after a read goes to new memory.
    """

    def __init__(self, **kwargs: Any) -> None:
        # Keys and values. They may be views of memory with headroom that nobody else has.
        self._stored: list[Tensor | None] = [None, None]
        self._memory: list[Tensor] | None = None
        super().__init__(**kwargs)

    @property
    def keys(self) -> Tensor | None:
        """Keys (B, G, n, D), None before the first token."""
        return self._read(0)

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        self._replace(0, keys)

    @property
    def values(self) -> Tensor | None:
        """Values (B, G, n, E), None before the first token."""
        return self._read(1)

    @values.setter
    def values(self, values: Tensor | None) -> None:
        self._replace(1, values)

    def _read(self, which: int) -> Tensor | None:
        self._memory = None
        return self._stored[which]

    def _replace(self, which: int, tensor: Tensor | None) -> None:
        if tensor is None:
            fits = not vars(self).get("is_initialized", False)
        else:
            fits = isinstance(tensor, Tensor) and (tensor.dim() == 4 or not tensor.numel())
        if not fits:
            found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise HeadwiseError(
                f"layer.{_NAMES[which]} must be a tensor (batch, KV heads, tokens, size), got "
                f"{found}; layer.reset() drops all tokens"
            )
        self._memory = None
        self._stored[which] = tensor

    def tensors(self) -> list[Tensor]:
        """Tensors held, headroom included; reading them here has no effect on the next token."""
        return [tensor for tensor in self._stored if tensor is not None]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See DynamicLayer.lazy_initialization."""
        self.dtype = key_states.dtype
        self.device = key_states.device
        self._stored = [key_states[:, :, :0], value_states[:, :, :0]]
        self._memory = None
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """See DynamicLayer.get_seq_length."""
        keys = self._stored[0]
        if not self.is_initialized or keys is None or not keys.numel():
            return 0
        return keys.shape[2]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append (B, G, Q, D) and (B, G, Q, E); returns views (B, G, n + Q, ...) of all.

        Under autocast they are kept in its dtype.

        Raises:
            HeadwiseError: the keys and values in the cache do not go with the new ones.
        """
        new = in_one_dtype(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(*new)
        stored = self._checked(*new)
        if torch.is_grad_enabled():
            # As DynamicLayer: the way back reads the keys and values of every call.
            self._memory = None
            whole = [
                torch.cat([held.to(states.dtype), states], dim=-2)
                for held, states in zip(stored, new, strict=True)
            ]
            self._stored = [*whole]
            return whole[0], whole[1]
        memory = []
        whole = []
        for old, held, states in zip(self._memory or stored, stored, new, strict=True):
            past = held.shape[2]
            end = past + states.shape[2]
            # The dtype changes where autocast is turned on or off between two calls.
            rows = grown(old.to(states.dtype), past, end, with_headroom(end))
            rows[:, :, past:end] = states
            memory.append(rows)
            whole.append(rows[:, :, :end])
        self._memory = memory
        self._stored = [*whole]
        return whole[0], whole[1]

    def _checked(self, *new: Tensor) -> list[Tensor]:
        """Keys and values in the cache, which may have been assigned; see update."""
        stored: list[Tensor] = []
        for name, held, states in zip(_NAMES, self._stored, new, strict=True):
            if held is None or held.dim() != 4 or not held.shape[2]:
                held = states[:, :, :0]
            sizes = held.shape[:2], held.shape[3], held.device
            if sizes != (states.shape[:2], states.shape[3], states.device):
                raise HeadwiseError(
                    f"layer.{name} is {tuple(held.shape)} on {held.device}, and the new tokens' "
                    f"{tuple(states.shape)} on {states.device}: only the third size may differ"
                )
            stored.append(held)
        lengths = [held.shape[2] for held in stored]
        if lengths[0] != lengths[1]:
            raise HeadwiseError(
                f"layer.keys has {lengths[0]} tokens and layer.values {lengths[1]}: assign both"
            )
        return stored

    @property
    def batch(self) -> int:
        """Sequences, 0 before the first token."""
        keys = self._stored[0]
        if keys is None or not self.get_seq_length():
            return 0
        return keys.shape[0]

    def crop(self, tokens_to_remove: int) -> None:
        """See DynamicLayer.crop."""
        memory = self._memory
        super().crop(tokens_to_remove)
        # It read and replaced both by views: nobody else has them.
        self._memory = memory

    def reset(self) -> None:
        """See DynamicLayer.reset."""
        # transformers before 5.17 keeps the length and zeroes the tokens.
        self.is_initialized = False
        self.keys = self.values = None
        super().reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """See DynamicLayer.reorder_cache."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See DynamicLayer.batch_repeat_interleave."""
        self.batch_select_indices(torch.arange(self.batch, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """See DynamicLayer.batch_select_indices."""
        if self.is_initialized:
            indices = indices_on(indices, self.device)
        super().batch_select_indices(indices)


class FilterLayer(GrowingLayer):
    """Cache of a filter layer: keys, values, and scores of its last queries (OmniKV's selector).

    history (B, rows, n) fp32: the scores that each query gave to each token, the latest last; None
    before any. It has more rows than the window, so that the window is whole again after drafts
    were rejected. Scores of keys that were replaced or edited are dropped.

    Attributes:
        window: W, the queries whose scores select.
    """

    def __init__(self, window: int, **kwargs: Any) -> None:
        self._forget()
        super().__init__(**kwargs)
        self.window = window

    def _forget(self) -> None:
        self.history: Tensor | None = None
        # Length of the cache when each row of history was written.
        self._written: list[int] = []
        # Copy of the keys when they were read: the reader may edit them in place.
        self._copied: Tensor | None = None

    def _read(self, which: int) -> Tensor | None:
        tensor = super()._read(which)
        if which == 0 and tensor is not None and self.history is not None and self._copied is None:
            self._copied = tensor.clone()
        return tensor

    def _replace(self, which: int, tensor: Tensor | None) -> None:
        super()._replace(which, tensor)
        if which == 0:
            self._forget()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See GrowingLayer.update."""
        keys = self._stored[0]
        if self._copied is not None and keys is not None and not torch.equal(self._copied, keys):
            self._forget()
        self._copied = None
        return super().update(key_states, value_states, *args, **kwargs)

    def tensors(self) -> list[Tensor]:
        """See GrowingLayer.tensors."""
        scores = [] if self.history is None else [self.history]
        return super().tensors() + scores

    def check_holds(self, layer: int, k_shape: torch.Size) -> None:
        """Raise HeadwiseError if a call's keys (B, G, K, D) are not those of this cache."""
        held = self.batch, self.get_seq_length()
        if held != (k_shape[0], k_shape[2]):
            raise HeadwiseError(
                f"filter layer {layer} must attend to the keys of its own cache, got {k_shape[0]} "
                f"sequences of {k_shape[2]} keys, and the cache has {held[0]} of {held[1]}"
            )

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

    def crop(self, tokens_to_remove: int) -> None:
        """See DynamicLayer.crop."""
        history = self.history
        written = self._written
        super().crop(tokens_to_remove)
        left = self.get_seq_length()
        rows = sum(length <= left for length in written)
        if history is not None and rows:
            self.history = history[:, :rows, :left]
            self._written = written[:rows]

    def batch_select_indices(self, indices: Tensor) -> None:
        """See DynamicLayer.batch_select_indices."""
        history = self.history
        written = self._written
        super().batch_select_indices(indices)
        if history is not None:
            self.history = history[indices_on(indices, history.device)]
            self._written = written


class BankedLayer(GrowingLayer):
    """Keys and values in a context bank, from which attention fetches the selected tokens.

    A layer stays on the device while it is no longer than the selection, or if its heads differ
    from those of the bank's first layer. Keys or values that are read or replaced outside attention
    are fetched first, and return to the bank with the next token.
    """

    def __init__(self, bank: Bank, place: int, **kwargs: Any) -> None:
        # Tokens in the bank; None while the layer is on the device.
        self._banked: int | None = None
        self.bank = bank
        self.place = place
        super().__init__(**kwargs)

    def _read(self, which: int) -> Tensor | None:
        self._to_device()
        return super()._read(which)

    def _replace(self, which: int, tensor: Tensor | None) -> None:
        self._to_device()
        super()._replace(which, tensor)

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
        return self.bank.batch_size(self.place)

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
        is_long = past + key_states.shape[-2] > self.bank.keep
        if is_long and not trained and self._banked is None:
            stored = self._checked(key_states, value_states)
            self._stored = [held.to(key_states.dtype) for held in stored]
            self._to_bank()
        if self._banked is None:
            return super().update(key_states, value_states, *args, **kwargs)
        banked = self.bank.append(self.place, past, key_states, value_states)
        self._banked = past + key_states.shape[-2]
        if not past:
            return key_states, value_states
        return OffloadedTensor(banked, 0), OffloadedTensor(banked, 1)

    def _to_bank(self) -> None:
        """Move to the bank, if it takes such keys and values."""
        keys, values = self._stored
        assert keys is not None and values is not None
        if not self.bank.enter(self.place, keys, values):
            return
        self._banked = keys.shape[2]
        if self._banked:
            self.bank.append(self.place, 0, keys, values)
        self._memory = None
        self._stored = [None, None]

    def _to_device(self) -> None:
        """Return from the bank."""
        if self._banked is not None:
            keys, values = self.bank.leave(self.place, self._banked)
            self._banked = None
            self._stored = [keys, values]

    def crop(self, tokens_to_remove: int) -> None:
        """See DynamicLayer.crop."""
        if self._banked is None or tokens_to_remove > 0:
            super().crop(tokens_to_remove)
        else:
            self._banked = max(self._banked + tokens_to_remove, 0)
            self.bank.crop(self._banked)

    def reset(self) -> None:
        """See DynamicLayer.reset."""
        if self._banked is not None:
            self.bank.leave(self.place, 0)
        self._banked = None
        super().reset()

    def batch_select_indices(self, indices: Tensor) -> None:
        """See DynamicLayer.batch_select_indices."""
        if self._banked is None:
            super().batch_select_indices(indices)
        else:
            self.bank.select(self.place, indices)
