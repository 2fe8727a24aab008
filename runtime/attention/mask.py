"""Masks that carry the context of a forward, and are not made unless read.

Shapes: B batch, Q query length, K key length (all slots of the cache).

transformers makes one mask a forward and hands it to every layer. For a long padded prefill sdpa's
is a (B, 1, Q, K) tensor, 10 GB a sequence at 100K tokens. `headwise_mask` returns a PrefillMask in
its place: a tensor of that shape and type without memory that holds the ranges of real tokens. Code
that reads it as a tensor gets the true mask (made once a forward), so all between mask and
attention goes on working."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from kernels.copies import on_device
from kernels.decode import MAX_QUERIES
from runtime.attention.layout import Context, Rows
from runtime.attention.state import MIN_QUERIES, Settings, settings_of
from runtime.standin import StandIn


class PrefillMask(StandIn):
    """Causal mask (B, 1, Q, K) over sequences of contiguous tokens, without memory until read."""

    context: Context
    _make: Callable[..., Tensor | None]
    _made: dict[bool, Tensor | None]

    @staticmethod
    def __new__(
        cls,
        context: Context,
        make: Callable[..., Tensor | None],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PrefillMask:
        mask = cls.of((context.batch, 1, context.q_len, context.k_len), dtype, device)
        mask.context = context
        mask._make = make
        mask._made = {}
        return mask

    def for_dense(self) -> Tensor | None:
        """The mask that dense attention would have got, None where it needs none."""
        return self._once(True)

    def read(self) -> Tensor:
        """The mask as a plain tensor."""
        mask = self._once(False)
        assert mask is not None
        return mask

    def _once(self, may_skip: bool) -> Tensor | None:
        if may_skip not in self._made:
            self._made[may_skip] = self._make(may_skip)
        mask = self._made[may_skip]
        if mask is None:
            return None
        return mask.to(self.device)

    def _moved(self, device: torch.device) -> PrefillMask:
        moved = PrefillMask(self.context, self._make, dtype=self.dtype, device=device)
        moved._made = self._made
        return moved

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # A model spread over devices moves the mask to each: that must not make it.
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype):
            return args[0]._moved(torch.device(kwargs.get("device") or args[0].device))
        return super().__torch_dispatch__(func, types, args, kwargs)


# Attribute of a decode step's mask, a plain tensor, that holds its context.
_CONTEXT = "headwise_context"


def context_of(mask: Tensor | None) -> Context | None:
    """Context of a prefill's mask; None for any other mask."""
    return mask.context if isinstance(mask, PrefillMask) else None


def starts_of(mask: Tensor | None) -> tuple[bool, Tensor | None]:
    """True and the first real key of each sequence, (B,) int32 or None where all are 0.

    The tensor is not to be written to. False where the mask does not tell: it was made elsewhere,
    or sequences have holes or end before the last key."""
    if mask is None:
        return True, None
    context = context_of(mask) or getattr(mask, _CONTEXT, None)
    if context is None:
        return False, None
    known, firsts = context.firsts
    if firsts is None:
        return known, None
    return known, on_device(firsts, mask.device, torch.int32)


def headwise_mask(batch_size: int, q_length: int, kv_length: int, **more: Any) -> Any:
    """Mask function registered with transformers.

    A long causal prefill gets a PrefillMask, any other call the mask of dense attention."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

    if torch.compiler.is_compiling() and q_length >= MIN_QUERIES:
        from runtime.attention.compiled import prefill_mask

        return prefill_mask(batch_size, q_length, kv_length, **more)
    given: dict[str, Any] = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    given |= {"q_offset": 0, "kv_offset": 0, "attention_mask": None} | more
    if given.get("mask_function") is None:
        given["mask_function"] = causal_mask_function
    # Traced code reads no table of applications: any change of it would have the graph made again.
    if torch.compiler.is_compiling():
        settings = None
    else:
        settings = settings_of(more.get("config"))
    if settings is None:
        return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**given)
    window = more.get("local_size")
    if not is_causal(given["mask_function"], window):
        return ALL_MASK_ATTENTION_FUNCTIONS[settings.model_attention](**given)
    return _MaskRequest(window, settings, given).mask()


def is_causal(mask_function: Callable[..., Any], window: int | None) -> bool:
    """True where a mask function is transformers' own for causal attention, over this window.

    An overlay (packed prompts, images, chunks) makes it another function."""
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
        given: the arguments of `dense`, the function that makes it.
        gone: slots that a sliding-window layer has dropped; all others are counted from there.
    """

    def __init__(self, window: int | None, settings: Settings, given: dict[str, Any]) -> None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        self.window = window
        self.settings = settings
        self.given = given
        self.padding = given["attention_mask"]
        self.dense: Callable[..., Tensor | None] = ALL_MASK_ATTENTION_FUNCTIONS[
            settings.model_attention
        ]
        self.batch = int(given["batch_size"])
        self.gone = int(given["kv_offset"])
        self.q_len = int(given["q_length"])
        self.k_len = int(given["kv_length"])

    @property
    def start(self) -> int:
        """The first query's slot. A static cache keeps it on its device: read only where needed."""
        return int(self.given["q_offset"])

    def mask(self) -> Tensor | None:
        """A PrefillMask, or the mask of dense attention."""
        if self.settings.evicts:
            context = self._evicting()
        else:
            context = self._prefill()
        if context is not None:
            return self._lazy(context)
        mask = self.dense(**self.given)
        if mask is None or self.settings.evicts:
            return mask
        return self._step(mask)

    def _prefill(self) -> Context | None:
        """Context of a prefill that a kernel of Headwise may serve, None for any other call.

        At least wherever function.choose() can take a kernel: without a context it never does."""
        settings = self.settings
        window = self.window
        q_len = self.q_len
        k_len = self.k_len
        if self.gone and window is None:
            return None
        least = settings.kernel_from
        every_key = least is not None and q_len > MAX_QUERIES and k_len >= least
        if window is not None and k_len > window:
            by_patterns_or_window = settings.dense_kernels
        else:
            by_patterns_or_window = k_len >= settings.dense_below
        if not every_key and not (by_patterns_or_window and q_len >= MIN_QUERIES):
            return None
        end = self.start + q_len
        if end > self.gone + k_len:
            return None
        ranges = self._ranges(self.gone, end)
        if ranges is None:
            return None
        return Context(self.start - self.gone, q_len, k_len, ranges, window=window)

    def _step(self, mask: Tensor) -> Tensor:
        """The mask of dense attention, with the context that decode reads on it."""
        settings = self.settings
        window = self.window
        q_len = self.q_len
        k_len = self.k_len
        near = window is None or k_len <= window
        on_cpu = mask.device.type == "cpu"
        kernel = settings.dense_kernels and q_len <= MAX_QUERIES and on_cpu and near
        chooses = settings.decode is not None and window is None
        if not kernel and not chooses:
            return mask
        end = self.gone + k_len
        if self.start + q_len != end:
            return mask
        ranges = self._ranges(self.gone, end)
        if ranges is None:
            return mask
        context = Context(k_len - q_len, q_len, k_len, ranges, window=window)
        if settings.spread:
            # An attribute of a tensor does not go along to another device.
            return self._lazy(context)
        setattr(mask, _CONTEXT, context)
        return mask

    def _evicting(self) -> Context | None:
        """Context for a cache that drops tokens; None where new tokens have holes."""
        start = self.start
        end = start + self.q_len
        fresh = self._ranges(start, end)
        if self.gone or fresh is None:
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

        None where one has holes."""
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
        # The counter of a static cache has moved on by the time the mask is read.
        given = self.given | {"q_offset": self.start}
        dense = self.dense

        def make(may_skip: bool) -> Tensor | None:
            if may_skip:
                return dense(**given)
            return dense(**given | {"allow_is_causal_skip": False})

        dtype = torch.bool
        if self.settings.model_attention == "eager":
            dtype = given.get("dtype", torch.float32)
        device = torch.device(given.get("device", "cpu"))
        return PrefillMask(context, make, dtype=dtype, device=device)
