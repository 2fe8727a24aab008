"""Masks that say what they are: causal over padded sequences, known by ranges, not made unless read.

Shapes: B batch, Q query length, K key length (all slots of the cache).

transformers makes one mask a forward and hands it to every layer. For a long padded prefill sdpa's is a
(B, 1, Q, K) tensor, 10 GB a sequence at 100K tokens. `headwise_mask` returns a PrefillMask in its place: a
tensor of that shape and type without memory that holds the ranges of real tokens. Code that reads it as a
tensor gets the true mask (made once a forward), so all between mask and attention goes on working.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.copies import on_device
from kernels.decode import MAX_QUERIES
from runtime.attention.layout import Layout
from runtime.attention.rules import Rows, Rule, rule_of
from runtime.attention.state import MIN_QUERIES, Settings, settings_of
from runtime.standin import StandIn

# Entries from which on a mask counts as memory.
LARGE = 1 << 24


class PrefillMask(StandIn):
    """A causal mask over sequences of contiguous tokens, (B, 1, Q, K), without memory until it is read.

    `tokens` says where the real ones are, and which of them see each other both ways. `for_dense()` is what the dense
    attention would have got: a mask, or None where it needs none. `of_queries(first, count)` is (B, 1, count, K).
    """

    tokens: Layout
    _make: Callable[..., Tensor | None]
    _made: dict[Any, Tensor | None]

    @staticmethod
    def __new__(
        cls,
        layout: Layout,
        make: Callable[..., Tensor | None],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PrefillMask:
        mask = cls.of((layout.batch, 1, layout.q_len, layout.k_len), dtype, device)
        mask.tokens, mask._make, mask._made = layout, make, {}
        return mask

    def for_dense(self) -> Tensor | None:
        return self._once(True)

    def read(self) -> Tensor:
        """The mask as a plain tensor."""
        mask = self._once(False)
        assert mask is not None
        return mask

    def of_queries(self, first: int, count: int) -> Tensor:
        """The rows of some queries, counted from the call's first, as a plain tensor."""
        rows = self._once(False, first, count)
        assert rows is not None
        return rows

    def empty(self) -> PrefillMask:
        """One over no tokens, to be told by who it is."""
        nothing = torch.empty(0, dtype=self.dtype)
        return PrefillMask(Layout(0, 0, 0, ()), lambda _: nothing, dtype=self.dtype, device=self.device)

    def _once(self, *which: Any) -> Tensor | None:
        if which not in self._made:
            self._made[which] = self._make(*which)
        mask = self._made[which]
        return mask if mask is None else mask.to(self.device)

    def _moved(self, device: torch.device) -> PrefillMask:
        moved = PrefillMask(self.tokens, self._make, dtype=self.dtype, device=device)
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


def starts_of(mask: Tensor | None) -> Tensor | str | None:
    """First real key of each sequence, (B,) int32, by the mask of a call, not to be written to; None where all are 0.

    A string says why the mask does not tell: it was made elsewhere, or sequences have holes or end before the last key.
    """
    if mask is None:
        return None
    if isinstance(mask, PrefillMask):
        layout, device = mask.tokens, mask.device
        if layout.ranges is None:
            return "a sequence has holes"
        if any(end != layout.k_len for _, end in layout.ranges):
            return "a sequence ends before the last key"
        if layout.spans:
            return "tokens see later ones"
        firsts = tuple(start for start, _ in layout.ranges)
        return on_device(firsts, device, torch.int32) if any(firsts) else None
    starts: Tensor | str | None = getattr(mask, _STARTS, "the mask was made elsewhere")
    return starts


_STARTS = "headwise_starts"


def _telling(mask: Tensor | None, padding: Tensor | None, batch: int, gone: int, length: int) -> Tensor | None:
    """The mask of a decode step over `length` slots after `gone`, with what starts_of wants to know kept on it."""
    if mask is None or (padding is not None and (padding.dim() != 2 or padding.shape != (batch, gone + length))):
        return mask
    starts = None
    if padding is not None:
        real = padding[:, gone:].bool()
        starts = real.to(torch.uint8).argmax(1).to(torch.int32)
        if not bool((real.sum(1) == length - starts).all()):
            return mask
    setattr(mask, _STARTS, starts)
    return mask


def headwise_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """What transformers calls for a mask: a PrefillMask for a long causal prefill, else what dense gets."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

    # What is traced reads no table of applications: any change of it would have the graph made again.
    settings = None if torch.compiler.is_compiling() else settings_of(kwargs.get("config"))
    name = "sdpa" if settings is None else settings.dense
    dense = ALL_MASK_ATTENTION_FUNCTIONS[name]
    mask_function = causal_mask_function if mask_function is None else mask_function
    given: dict[str, Any] = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        **kwargs,
    }
    rule = None if settings is None else rule_of(mask_function)
    if settings is None or rule is None or kwargs.get("local_size") not in (None, rule.window):
        return dense(**given)
    mask = _Asked(rule, settings, given, dense, name).mask()
    return dense(**given) if mask is None else mask


class _Asked(NamedTuple):
    """A mask that transformers asks for: its rule, and the arguments of the function `dense` that makes it.

    name: of the attention whose masks `dense` makes.
    """

    rule: Rule
    settings: Settings
    given: dict[str, Any]
    dense: Callable[..., Any]
    name: str

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many slots a layer which slides has dropped, how many queries there are, and how many keys."""
        gone, q_len, k_len = (int(self.given[name]) for name in ("kv_offset", "q_length", "kv_length"))
        return gone, q_len, k_len

    @property
    def start(self) -> int:
        """The first query's slot. A static cache keeps it on its device: no step asks that need not."""
        return int(self.given["q_offset"])

    def mask(self) -> Tensor | None:
        """The mask; None where dense attention's is to be made right away."""
        if self.settings.evicts:
            return self._fresh()
        if self.rule.packed is not None:
            return self._packed()
        return self._causal() if self.rule.blocks is None else self._with_spans()

    def _causal(self) -> Tensor | None:
        """Of a call whose rows are one sequence each."""
        settings, window, (gone, q_len, k_len) = self.settings, self.rule.window, self.sizes
        if gone and window is None:
            return None
        slides = window is not None and k_len > window
        large = settings.low_memory and q_len * k_len >= LARGE
        ours = settings.kernel_from is not None and q_len > MAX_QUERIES and k_len >= settings.kernel_from
        wanted = large or (settings.dense_kernels if slides else k_len >= settings.dense_below)
        if not (ours or (wanted and q_len >= MIN_QUERIES)):
            mask: Tensor | None = self.dense(**self.given)
            kernel = settings.dense_kernels and q_len <= MAX_QUERIES and mask is not None and mask.device.type == "cpu"
            tells = (kernel and not slides) or (settings.decode is not None and window is None)
            if not tells or self.start + q_len != gone + k_len:
                return mask
            ranges = self._ranges(gone + k_len) if settings.spread and mask is not None else None
            if ranges:
                # What is kept on a tensor does not go along to another device.
                return self._prefill(Layout(k_len - q_len, q_len, k_len, _counted_from(gone, ranges), window=window))
            return _telling(mask, self.given["attention_mask"], int(self.given["batch_size"]), gone, k_len)
        start = self.start
        ranges = self._ranges(start + q_len) if start + q_len <= gone + k_len else None
        if ranges is None:
            return None
        return self._prefill(Layout(start - gone, q_len, k_len, _counted_from(gone, ranges), window=window))

    def _with_spans(self) -> PrefillMask | None:
        """Of a whole prompt, some of whose tokens see later ones of their block, but not most of them."""
        settings, window, (gone, q_len, k_len) = self.settings, self.rule.window, self.sizes
        least = min(settings.dense_below, sys.maxsize if settings.kernel_from is None else settings.kernel_from)
        wanted = k_len >= least or (window is not None and settings.dense_kernels)
        whole = not self.start and not gone and q_len == k_len and q_len >= MIN_QUERIES
        ranges = self._ranges(q_len) if wanted and whole and self.name in ("sdpa", "eager") else None
        spans = None if ranges is None else self.rule.spans(ranges)
        if ranges is None or spans is None:
            return None
        tokens, within = (sum(end - begin for row in rows for begin, end in row) for rows in ((ranges,), spans))
        if 2 * within > tokens:
            return None
        return self._prefill(Layout(0, q_len, k_len, ranges, window=window, spans=spans if within else None))

    def _fresh(self) -> PrefillMask | None:
        """For a cache under policies, which wants to know the new tokens; None where it is no plain causal one."""
        rule, (gone, q_len, k_len), padding = self.rule, self.sizes, self.given["attention_mask"]
        start = self.start
        if gone or rule.packed is not None or rule.blocks is not None:
            return None
        plain = padding is not None and padding.dim() == 2
        fresh = _ranges(padding[:, start : start + q_len] if plain else padding, int(self.given["batch_size"]), q_len)
        if fresh is None:
            return None
        ranges = None if rule.window is not None else self._ranges(start + q_len)
        held = _runs(padding[:, :start].bool()) if plain else None
        return self._prefill(Layout(start, q_len, k_len, ranges, fresh, held))

    def _packed(self) -> PrefillMask | None:
        """Of sequences that lie end to end in the rows of a call without a cache; None for any other."""
        _, q_len, k_len = self.sizes
        if q_len != k_len or self.given["attention_mask"] is not None or self.start:
            return None
        packed = self.rule.rows(int(self.given["batch_size"]), q_len)
        if packed is None:
            return None
        return self._prefill(Layout(0, q_len, k_len, None, window=self.rule.window, packed=packed))

    def _ranges(self, length: int) -> tuple[tuple[int, int], ...] | None:
        return _ranges(self.given["attention_mask"], int(self.given["batch_size"]), length)

    def _prefill(self, layout: Layout) -> PrefillMask:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        # The counter of a static cache has moved on by the time the mask is read.
        given, dense, eager = self.given | {"q_offset": self.start}, self.dense, self.name == "eager"
        # Of what flash and flex attention get, a reader could make nothing.
        tensor = dense if eager else ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

        def make(may_skip: bool, first: int = 0, count: int = layout.q_len) -> Tensor | None:
            some = {"q_offset": given["q_offset"] + first, "q_length": count, "allow_is_causal_skip": False}
            mask: Tensor | None = dense(**given) if may_skip else tensor(**given | some)
            return mask

        return PrefillMask(
            layout,
            make,
            dtype=given.get("dtype", torch.float32) if eager else torch.bool,
            device=torch.device(given.get("device", "cpu")),
        )


def _runs(real: Tensor) -> Rows:
    """The runs [begin, end) of real slots in each row of (B, n) bool."""
    # +1 where a run begins, -1 behind its end.
    edges = torch.nn.functional.pad(real.to(torch.int8), (1, 1)).diff(dim=1)
    places: list[list[int]] = edges.nonzero().tolist()
    ends: list[list[int]] = [[] for _ in range(len(real))]
    for row, place in places:
        ends[row].append(place)
    return tuple(tuple(zip(row[::2], row[1::2], strict=True)) for row in ends)


def _counted_from(gone: int, ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Slots counted from the first token that a layer that slides still has."""
    return tuple((max(begin - gone, 0), max(end - gone, 0)) for begin, end in ranges)


def _ranges(padding: Tensor | None, batch: int, length: int) -> tuple[tuple[int, int], ...] | None:
    """The first `length` slots' range of real tokens for each sequence; None where a sequence has holes."""
    if padding is None:
        return ((0, length),) * batch
    if padding.dim() != 2 or padding.shape[0] != batch or padding.shape[1] < length:
        return None
    real = padding[:, :length].bool()
    count = real.sum(1)
    first = real.to(torch.uint8).argmax(1)
    last = length - real.flip(1).to(torch.uint8).argmax(1)
    rows: list[list[int]] = torch.stack([first, last, count], dim=1).tolist()
    if any(total and end - begin != total for begin, end, total in rows):
        return None
    return tuple((begin, end) if total else (0, 0) for begin, end, total in rows)
