"""Masks that carry the context of a forward, and are not made unless read.

Shapes: B batch, Q query length, K key length (all slots of the cache).

transformers makes one mask a forward and passes it to every layer. For a long padded prefill sdpa's
is a (B, 1, Q, K) tensor, 10 GB a sequence at 100K tokens. `headwise_mask` returns a PrefillMask in
its place: a tensor of that shape and type without memory that holds the ranges of real tokens. Code
that reads it as a tensor gets the true mask (made once a forward).

A 2-D padding mask, as flash attention gets, does not suffice. Gemma 4 with shared keys and values
(E2B, E4B) cuts the queries of its last layers, and slices dimension 2 of the mask with them: such a
slice is another PrefillMask. A static cache has slots that no token fills yet.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from kernels.copies import on_device
from runtime.attention.applied import settings_of
from runtime.attention.context import MIN_QUERIES, Context, Rows
from runtime.attention.layer import Settings
from runtime.lazy import LazyTensor


class PrefillMask(LazyTensor):
    """Causal mask (B, 1, Q, K) over sequences of contiguous tokens, without memory until read."""

    context: Context
    _dense: Callable[..., Tensor | None]
    _arguments: dict[str, Any]
    _made: dict[bool, Tensor | None]

    @staticmethod
    def __new__(
        cls,
        context: Context,
        dense: Callable[..., Tensor | None],
        arguments: dict[str, Any],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PrefillMask:
        """Make the mask without its elements; see LazyTensor.empty."""
        mask = cls.empty((context.batch, 1, context.q_len, context.k_len), dtype, device)
        mask.context = context
        mask._dense = dense
        mask._arguments = arguments
        mask._made = {}
        return mask

    def for_dense(self) -> Tensor | None:
        """The mask for dense attention, None where sdpa needs none."""
        return self._once(True)

    def read(self) -> Tensor:
        """The mask as a plain tensor."""
        mask = self._once(False)
        assert mask is not None
        return mask

    def _once(self, may_skip: bool) -> Tensor | None:
        if may_skip not in self._made:
            skip = {} if may_skip else {"allow_is_causal_skip": False}
            self._made[may_skip] = self._dense(**self._arguments | skip)
        mask = self._made[may_skip]
        if mask is None:
            return None
        return mask.to(self.device)

    def _on(self, device: torch.device) -> PrefillMask:
        moved = PrefillMask(
            self.context, self._dense, self._arguments, dtype=self.dtype, device=device
        )
        moved._made = self._made
        return moved

    def _cut(self, begin: int, end: int) -> PrefillMask:
        """The mask of the queries begin .. end of these."""
        context = self.context.cut(begin, end)
        arguments = self._arguments | {
            "q_offset": self._arguments["q_offset"] + begin,
            "q_length": context.q_len,
        }
        # Without a mask sdpa lets a single query see all slots, those not filled yet, too.
        if context.q_start + context.q_len < context.k_len:
            arguments["allow_is_causal_skip"] = False
        return PrefillMask(context, self._dense, arguments, dtype=self.dtype, device=self.device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # torch.cat has a list of tensors here.
        if isinstance(mask := args[0], PrefillMask):
            result = mask._without_reading(func, args[1:], kwargs)
            if result is not None:
                return result
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _without_reading(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> PrefillMask | None:
        """Result of an operation that leaves a mask a PrefillMask, None for any other."""
        aten = torch.ops.aten
        # A model spread over devices moves the mask to each.
        if func is aten._to_copy.default and kwargs.get("dtype") in (None, self.dtype):
            return self._on(torch.device(kwargs.get("device") or self.device))
        if func in (aten.alias.default, aten.detach.default):
            return self._on(self.device)
        if func is aten.slice.Tensor:
            arguments = [*args, *(0, None, None, 1)[len(args) :]]
            dim, step = arguments[0], arguments[3]
            size = self.shape[dim]
            indices = range(size)[arguments[1] : arguments[2] : step]
            if len(indices) == size:
                return self._on(self.device)
            # A cache that drops tokens takes in every query's token: its mask is not cut.
            if dim % self.dim() == 2 and step == 1 and indices and self.context.fresh is None:
                return self._cut(indices.start, indices.stop)
        return None


def context_of(mask: Tensor | None) -> Context | None:
    """Context of a mask of ours; None for any other mask."""
    return mask.context if isinstance(mask, PrefillMask) else None


def starts_of(mask: Tensor | None) -> tuple[bool, Tensor | None]:
    """True and the first real key of each sequence, (B,) int32 or None where all are 0.

    The tensor must not be written to. False where the queries do not see every key from there to
    their own: the mask was made elsewhere, hides keys behind a window, or has sequences with holes
    or ones that end before the last key.
    """
    if mask is None:
        return True, None
    context = context_of(mask)
    if context is None or (context.window is not None and context.k_len > context.window):
        return False, None
    known, firsts = context.firsts
    if firsts is None:
        return known, None
    return known, on_device(firsts, mask.device, torch.int32)


def headwise_mask(batch_size: int, q_length: int, kv_length: int, **more: Any) -> Any:
    """Mask function registered with transformers.

    Returns a PrefillMask for a causal prefill, and the mask of dense attention otherwise.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

    if torch.compiler.is_compiling() and q_length >= MIN_QUERIES:
        from runtime.attention.compiled import between_graphs

        return between_graphs(headwise_mask, batch_size, q_length, kv_length, **more)
    arguments: dict[str, Any] = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
    }
    arguments |= {"q_offset": 0, "kv_offset": 0, "attention_mask": None} | more
    if arguments.get("mask_function") is None:
        arguments["mask_function"] = causal_mask_function
    # Traced code reads no table of applications: a change of it would recompile the graph.
    if torch.compiler.is_compiling():
        settings = None
    else:
        settings = settings_of(more.get("config"))
    if settings is None:
        return _plain(ALL_MASK_ATTENTION_FUNCTIONS["sdpa"], arguments)
    window = more.get("local_size")
    if not is_causal(arguments["mask_function"], window):
        return _plain(ALL_MASK_ATTENTION_FUNCTIONS[settings.model_attention], arguments)
    return _MaskRequest(window, settings, arguments).mask()


def _plain(dense: Callable[..., Tensor | None], arguments: dict[str, Any]) -> Tensor | None:
    """The mask of dense attention.

    None means that the queries are the last of the keys, never the first, as sdpa assumes.
    """
    if 1 != arguments["q_length"] != arguments["kv_length"]:
        arguments = arguments | {"allow_is_causal_skip": False}
    return dense(**arguments)


def is_causal(mask_function: Callable[..., Any], window: int | None) -> bool:
    """True if a mask function is transformers' own for causal attention over this window.

    With an overlay (packed prompts, images, chunks) it is another function.
    """
    from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

    if window is None:
        return mask_function is causal_mask_function
    return _same(mask_function, sliding_window_causal_mask_function(window))


def _same(mine: Any, other: Any) -> bool:
    """True for one function, and for closures of one function over equal values."""
    if mine is other:
        return True
    if isinstance(mine, tuple) and isinstance(other, tuple):
        return len(mine) == len(other) and all(map(_same, mine, other))
    if isinstance(mine, FunctionType) and isinstance(other, FunctionType):
        return mine.__code__ is other.__code__ and _same(_held(mine), _held(other))
    return isinstance(mine, int) and isinstance(other, int) and mine == other


def _held(function: FunctionType) -> tuple[Any, ...]:
    return tuple(cell.cell_contents for cell in function.__closure__ or ())


def real_slots(real: Tensor) -> Rows:
    """Runs of real slots in each row of (B, n) booleans."""
    edges = torch.nn.functional.pad(real, (1, 1)).diff(dim=1).nonzero().tolist()
    rows: list[list[tuple[int, int]]] = [[] for _ in range(real.shape[0])]
    # Each run has two edges.
    for (row, begin), (_, end) in zip(edges[::2], edges[1::2], strict=True):
        rows[row].append((begin, end))
    return tuple(map(tuple, rows))


class _MaskRequest:
    """A causal mask that transformers asks for, over a window or every token.

    Attributes:
        arguments: arguments of `dense`, the function that makes the mask.
        offset: slots that a sliding-window layer has dropped; the others are counted from there.
    """

    def __init__(self, window: int | None, settings: Settings, arguments: dict[str, Any]) -> None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        self.window = window
        self.settings = settings
        self.arguments = arguments
        self.padding = arguments["attention_mask"]
        self.dense: Callable[..., Tensor | None] = ALL_MASK_ATTENTION_FUNCTIONS[
            settings.model_attention
        ]
        self.batch = int(arguments["batch_size"])
        self.offset = int(arguments["kv_offset"])
        self.q_len = int(arguments["q_length"])
        self.k_len = int(arguments["kv_length"])

    @property
    def start(self) -> int:
        """The first query's slot. A static cache keeps it on its device: read only where needed."""
        return int(self.arguments["q_offset"])

    def mask(self) -> Tensor | None:
        """A PrefillMask, or the mask of dense attention."""
        if self.settings.evicts:
            context = self._evicting()
        elif self.q_len > 1:
            context = self._prefill()
        else:
            context = None
        if context is not None:
            return self._lazy(context)
        mask = _plain(self.dense, self.arguments)
        if mask is None or self.settings.evicts or self.q_len > 1:
            return mask
        return self._step(mask)

    def _prefill(self) -> Context | None:
        """Context of a prefill; None where slots are missing or sequences have holes."""
        end = self.start + self.q_len
        if self.offset and self.window is None:
            return None
        if end > self.offset + self.k_len:
            return None
        ranges = self._ranges(self.offset, end)
        if ranges is None:
            return None
        return Context(self.start - self.offset, self.q_len, self.k_len, ranges, window=self.window)

    def _step(self, mask: Tensor) -> Tensor:
        """The mask of dense attention, or a PrefillMask where the decode step reads its context."""
        settings = self.settings
        window = self.window
        # Of a static cache the step is compiled, with a plain mask.
        if not self.arguments.get("allow_is_causal_skip", True):
            return mask
        near = window is None or self.k_len <= window
        kernel = settings.dense_kernels and mask.device.type == "cpu" and near
        selects = settings.selects and window is None
        end = self.offset + self.k_len
        if not (kernel or selects) or self.start + 1 != end:
            return mask
        ranges = self._ranges(self.offset, end)
        if ranges is None:
            return mask
        return self._lazy(Context(self.k_len - 1, 1, self.k_len, ranges, window=window))

    def _evicting(self) -> Context | None:
        """Context for a cache that drops tokens; None where new tokens have holes."""
        start = self.start
        end = start + self.q_len
        fresh = self._ranges(start, end)
        if self.offset or fresh is None:
            return None
        ranges = None
        if self.window is None:
            ranges = self._ranges(0, end)
        held = None
        if self.padding is not None:
            held = real_slots(self.padding[:, :start].bool())
        return Context(start, self.q_len, self.k_len, ranges, fresh, held)

    def _ranges(self, begin: int, end: int) -> tuple[tuple[int, int], ...] | None:
        """Range of real tokens of each sequence among these slots, counted from `begin`.

        None where one has holes.
        """
        padding = self.padding
        if padding is None:
            return ((0, end - begin),) * self.batch
        if padding.dim() != 2 or padding.shape[0] != self.batch or padding.shape[1] < end:
            return None
        rows = real_slots(padding[:, begin:end].bool())
        if any(len(row) > 1 for row in rows):
            return None
        return tuple(row[0] if row else (0, 0) for row in rows)

    def _lazy(self, context: Context) -> PrefillMask:
        # A static cache has advanced its counter before the mask is read.
        arguments = self.arguments | {"q_offset": self.start}
        dtype = torch.bool
        if self.settings.model_attention == "eager":
            dtype = arguments.get("dtype", torch.float32)
        device = torch.device(arguments.get("device", "cpu"))
        return PrefillMask(context, self.dense, arguments, dtype=dtype, device=device)
