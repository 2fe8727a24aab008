"""Masks that say what they are: causal over padded sequences, known by ranges, not made unless
read.

Shapes: B batch, Q query length, K key length (all slots of the cache).

transformers makes one mask a forward and hands it to every layer. For a long padded prefill sdpa's
is a (B, 1, Q, K) tensor, 10 GB a sequence at 100K tokens. `headwise_mask` returns a PrefillMask in
its place: a tensor of that shape and type without memory that holds the ranges of real tokens. Code
that reads it as a tensor gets the true mask (made once a forward), so all between mask and
attention goes on working."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.copies import on_device
from kernels.decode import MAX_QUERIES
from runtime.attention.layout import Layout
from runtime.attention.rules import Rule, real_slots, rule_of
from runtime.attention.state import MIN_QUERIES, Settings, settings_of
from runtime.standin import StandIn


class PrefillMask(StandIn):
    """A causal mask over sequences of contiguous tokens, (B, 1, Q, K), without memory until it is
    read.

    `tokens` says where the real ones are. `for_dense()` is what the dense attention would have got:
    a mask, or None where it needs none."""

    tokens: Layout
    _make: Callable[..., Tensor | None]
    _made: dict[bool, Tensor | None]

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
        mask.tokens = layout
        mask._make = make
        mask._made = {}
        return mask

    def for_dense(self) -> Tensor | None:
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


# Where the mask of a decode step, a plain tensor, has its Layout.
_TOKENS = "headwise_tokens"


def starts_of(mask: Tensor | None) -> Tensor | str | None:
    """First real key of each sequence, (B,) int32, by the mask of a call, not to be written to;
    None where all are 0.

    A string says why the mask does not tell: it was made elsewhere, or sequences have holes or end
    before the last key."""
    if mask is None:
        return None
    tokens: Layout | None = (
        mask.tokens if isinstance(mask, PrefillMask) else getattr(mask, _TOKENS, None)
    )
    if tokens is None:
        return "the mask was made elsewhere"
    firsts = tokens.firsts
    return on_device(firsts, mask.device, torch.int32) if isinstance(firsts, tuple) else firsts


def headwise_mask(batch_size: int, q_length: int, kv_length: int, **more: Any) -> Any:
    """What transformers calls for a mask: a PrefillMask for a long causal prefill, else what dense
    gets."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

    # What is traced reads no table of applications: any change of it would have the graph made
    # again.
    settings = None if torch.compiler.is_compiling() else settings_of(more.get("config"))
    given: dict[str, Any] = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    given |= {"q_offset": 0, "kv_offset": 0, "attention_mask": None} | more
    if given.get("mask_function") is None:
        given["mask_function"] = causal_mask_function
    rule = None if settings is None else rule_of(given["mask_function"])
    if settings is None or rule is None or more.get("local_size") not in (None, rule.window):
        return ALL_MASK_ATTENTION_FUNCTIONS["sdpa" if settings is None else settings.dense](**given)
    return _Asked(rule, settings, given).mask()


class _Asked:
    """A mask that transformers asks for, which is this rule: the arguments of the function `dense`
    that makes it.

    gone: slots that a layer which slides has dropped; all others are counted from there.
    """

    def __init__(self, rule: Rule, settings: Settings, given: dict[str, Any]) -> None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        self.rule = rule
        self.settings = settings
        self.given = given
        self.padding = given["attention_mask"]
        self.dense: Callable[..., Tensor | None] = ALL_MASK_ATTENTION_FUNCTIONS[settings.dense]
        self.batch, self.gone = int(given["batch_size"]), int(given["kv_offset"])
        self.q_len, self.k_len = int(given["q_length"]), int(given["kv_length"])

    @property
    def start(self) -> int:
        """The first query's slot. A static cache keeps it on its device: no step asks that need
        not."""
        return int(self.given["q_offset"])

    def mask(self) -> Tensor | None:
        """One that says what it is, or what dense attention gets."""
        evicts = self.settings.evicts
        layout = self._fresh() if evicts else self._causal()
        if layout is not None:
            return self._prefill(layout)
        mask = self.dense(**self.given)
        return mask if evicts or mask is None else self._told(mask)

    def _causal(self) -> Layout | None:
        """The layout of a prefill that a kernel of ours may serve, None for any other call."""
        settings = self.settings
        window = self.rule.window
        q_len = self.q_len
        k_len = self.k_len
        if self.gone and window is None:
            return None
        slides = window is not None and k_len > window
        ours = (
            settings.kernel_from is not None
            and q_len > MAX_QUERIES
            and k_len >= settings.kernel_from
        )
        wanted = settings.dense_kernels if slides else k_len >= settings.dense_below
        if not (ours or (wanted and q_len >= MIN_QUERIES)):
            return None
        start = self.start - self.gone
        last = self.start + q_len
        ranges = self._ranges(self.gone, last) if last <= self.gone + k_len else None
        if ranges is None:
            return None
        return Layout(start, q_len, k_len, ranges, window=window)

    def _told(self, mask: Tensor) -> Tensor:
        """What dense attention gets of a causal mask, with the Layout on it that decode wants to
        know."""
        settings = self.settings
        window = self.rule.window
        q_len = self.q_len
        k_len = self.k_len
        near = window is None or k_len <= window
        last = self.gone + k_len
        kernel = (
            settings.dense_kernels and q_len <= MAX_QUERIES and mask.device.type == "cpu" and near
        )
        if (
            not (kernel or (settings.decode is not None and window is None))
            or self.start + q_len != last
        ):
            return mask
        if (ranges := self._ranges(self.gone, last)) is None:
            return mask
        layout = Layout(k_len - q_len, q_len, k_len, ranges, window=window)
        if settings.spread:
            # What is kept on a tensor does not go along to another device.
            return self._prefill(layout)
        setattr(mask, _TOKENS, layout)
        return mask

    def _fresh(self) -> Layout | None:
        """For a cache under policies, which wants to know the new tokens; None where it is no plain
        causal one."""
        rule = self.rule
        start = self.start
        fresh = self._ranges(start, start + self.q_len)
        if self.gone or fresh is None:
            return None
        ranges = None if rule.window is not None else self._ranges(0, start + self.q_len)
        held = None if self.padding is None else real_slots(self.padding[:, :start].bool())
        return Layout(start, self.q_len, self.k_len, ranges, fresh, held)

    def _ranges(self, begin: int, end: int) -> tuple[tuple[int, int], ...] | None:
        """Each sequence's range of real tokens among these slots, counted from `begin`; None where
        one has holes."""
        padding = self.padding
        if padding is None:
            return ((0, end - begin),) * self.batch
        if padding.dim() != 2 or padding.shape[0] != self.batch or padding.shape[1] < end:
            return None
        rows = real_slots(padding[:, begin:end].bool())
        return (
            None
            if any(len(row) > 1 for row in rows)
            else tuple(row[0] if row else (0, 0) for row in rows)
        )

    def _prefill(self, layout: Layout) -> PrefillMask:
        # The counter of a static cache has moved on by the time the mask is read.
        given = self.given | {"q_offset": self.start}
        dense = self.dense
        eager = self.settings.dense == "eager"

        def make(may_skip: bool) -> Tensor | None:
            mask: Tensor | None = dense(
                **given if may_skip else given | {"allow_is_causal_skip": False}
            )
            return mask

        return PrefillMask(
            layout,
            make,
            dtype=given.get("dtype", torch.float32) if eager else torch.bool,
            device=torch.device(given.get("device", "cpu")),
        )
