"""Calls of attention, decode and gradients: their arguments, and each check once.

A backend gets a call and trusts it.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, C chosen keys, D head dim,
E value dim.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kernels.checks import (
    EIGHT_BITS,
    check_devices,
    check_groups,
    check_last,
    check_out,
    check_pages,
    check_query_length,
    check_tensor,
    check_tensors,
    check_tokens,
    shapes_of,
    unfit,
    unlike_dtypes,
)
from kernels.index import SparseIndex
from kernels.logits import PLAIN, Logits

# More queries than this are a prefill: sparse_attention shares the reading of keys among them
# better. Only scores are summed over more.
MAX_QUERIES = 16


@dataclass(frozen=True, eq=False, slots=True)
class Operands:
    """Queries, keys and values: the tensors by which a backend decides whether it serves a call.

    Nothing is checked, so that a backend can be asked before there is an index.

    Attributes:
        q: (B, H, Q, D).
        k: (B, G, K, D), or in pages (pages, page size, G, D).
        v: (B, G, K, E), or in pages (pages, page size, G, E).
        logits: what their logits are made of.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    logits: Logits = field(default=PLAIN, kw_only=True)

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.q.device

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that the output can be differentiated by."""
        sinks = self.logits.sinks
        if sinks is None:
            return self.q, self.k, self.v
        return self.q, self.k, self.v, sinks


@dataclass(frozen=True, eq=False, slots=True)
class AttentionCall(Operands):
    """A call of kernels.attention.sparse_attention, whose arguments it has.

    Raises:
        ValueError: arguments that do not go together, in one line with the values. Of data only
            that of an index made by hand is read, once (SparseIndex.validate).
    """

    index: SparseIndex
    _: KW_ONLY
    block_table: Tensor | None = None
    out: Tensor | None = None
    skipped: Tensor | None = None

    def __post_init__(self) -> None:
        index = self.index
        if not isinstance(index, SparseIndex):
            raise ValueError(f"index must be a SparseIndex, got {type(index).__name__}")
        q_shape, k_shape = _check_states(self)
        index.validate()
        num_heads = q_shape[1]
        if index.num_heads != num_heads:
            raise ValueError(f"index is for {index.num_heads} heads, q has {num_heads}")
        check_devices(
            *(self.q, self.k, self.v, index.diagonals),
            *(self.block_table, self.logits.sinks, self.out, self.skipped),
        )
        _check_lengths(self, q_shape, k_shape)
        if self.block_table is not None:
            needed = 0
            if k_shape[1]:
                needed = -(-index.k_len // k_shape[1])
            check_pages(self.block_table, index.batch, needed, self.k, self.v)
        if self.skipped is not None:
            _check_skipped(self.skipped, index)
        if self.out is not None:
            check_out(self.out, self.q, (*q_shape[:3], self.v.shape[3]))
        if self.logits.window not in (None, index.window):
            raise ValueError(
                f"the index is for a window of {index.window}, the logits of {self.logits.window}"
            )


class Decoded(NamedTuple):
    """Results of kernels.decode.decode_attention.

    Attributes:
        out: (B, H, Q, E) in q's dtype, a transposed view of a contiguous (B, Q, H, E).
        lse: (B, H, Q) fp32, the natural log-sum-exp of each query's logits, its sink's included.
        scores: (B, G, C), or (B, G, K) without tokens, fp32; None if not asked for.
    """

    out: Tensor
    lse: Tensor
    scores: Tensor | None


@dataclass(frozen=True, eq=False, slots=True)
class DecodeCall(Operands):
    """A call of kernels.decode.decode_attention, whose arguments it has.

    A backend returns a Decoded.

    Raises:
        ValueError: arguments that do not go together, in one line with the values. No data is read.

    Attributes:
        checked: False for a call that is known to be right: a step of decode that takes 26 us
            would take 6 to 15 more.
    """

    _: KW_ONLY
    tokens: Tensor | None = None
    starts: Tensor | None = None
    ends: Tensor | None = None
    scores: str = "none"
    block_table: Tensor | None = None
    checked: InitVar[bool] = True

    def __post_init__(self, checked: bool) -> None:
        if checked:
            self._check()

    def _check(self) -> None:
        q_shape, k_shape = _check_states(self)
        block_table = self.block_table
        batch = q_shape[0]
        q_len = q_shape[2]
        if block_table is None and k_shape[0] != batch:
            raise unfit(q=self.q, k=self.k, v=self.v)
        if not 0 < q_len <= MAX_QUERIES and not (q_len and self._sums_alone):
            raise ValueError(
                f"decode takes 1 to {MAX_QUERIES} queries, got {q_len} (more are a prefill)"
            )
        if 0 in k_shape[:3]:
            raise ValueError(f"the cache is empty: k {tuple(k_shape)}")
        if q_len > MAX_QUERIES:
            check_last(q_len, k_shape[2])
        tokens = self.tokens
        if tokens is not None:
            check_tensor("tokens", tokens)
            check_tokens(tokens, batch, _num_kv_heads(k_shape, block_table))
        for name, bounds in (("starts", self.starts), ("ends", self.ends)):
            if bounds is not None:
                check_tensor(name, bounds)
                if bounds.dtype != torch.int32 or bounds.shape != (batch,):
                    raise ValueError(
                        f"{name} must be int32 ({batch},), got {bounds.dtype} {tuple(bounds.shape)}"
                    )
        if block_table is not None:
            check_pages(block_table, batch, 1, self.k, self.v)
        check_devices(
            *(self.q, self.k, self.v, tokens),
            *(self.starts, self.ends, block_table, self.logits.sinks),
        )
        if self.scores not in ("none", "sum", "max"):
            raise ValueError(f"scores must be 'none', 'sum' or 'max', got {self.scores!r}")

    @property
    def is_prompt(self) -> bool:
        """True for more queries than a step has: only summed scores are supported."""
        return self.q.shape[2] > MAX_QUERIES

    @property
    def _sums_alone(self) -> bool:
        optional = (self.tokens, self.starts, self.ends, self.block_table)
        logits = self.logits
        alone = logits.window is None and logits.sinks is None and all(x is None for x in optional)
        return self.scores == "sum" and alone


@dataclass(frozen=True, eq=False, slots=True)
class GradientCall(Operands):
    """A call of kernels.gradient.attention_gradients, whose arguments it has.

    Raises:
        ValueError: arguments that do not go together, in one line with the values.
    """

    out: Tensor
    lse: Tensor
    grad_out: Tensor

    def __post_init__(self) -> None:
        states = {"q": self.q, "k": self.k, "v": self.v, "out": self.out, "grad_out": self.grad_out}
        check_tensors(**states)
        check_tensor("lse", self.lse)
        q_shape = self.q.shape
        k_shape = self.k.shape
        v_shape = self.v.shape
        shape = (*q_shape[:3], v_shape[3])
        if (
            k_shape[:3] != v_shape[:3]
            or (k_shape[0], k_shape[3]) != (q_shape[0], q_shape[3])
            or not self.out.shape == self.grad_out.shape == shape
            or self.lse.shape != q_shape[:3]
        ):
            raise unfit(**states, lse=self.lse)
        if 0 in q_shape or 0 in v_shape:
            raise ValueError(f"every size must be positive, got {shapes_of(**states)}")
        check_groups(q_shape[1], k_shape[1])
        check_last(q_shape[2], k_shape[2])
        if len({x.dtype for x in states.values()}) > 1 or not self.q.is_floating_point():
            raise unlike_dtypes(**states)
        wide = torch.promote_types(self.q.dtype, torch.float32)
        if self.lse.dtype not in (torch.float32, wide):
            raise ValueError(f"lse must be {wide}, got {self.lse.dtype}")
        self.logits.check(q_shape[1])
        check_devices(*states.values(), self.lse)


def derivative_wanted(call: Operands) -> str | None:
    """The reason why native code and Triton cannot serve: a derivative; None if none is wanted."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in call.inputs):
        return "it has no backward pass (use torch.no_grad or torch.inference_mode)"
    # Only where a level is open can a tensor have a tangent.
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None for x in call.inputs
    ):
        return "it has no forward-mode derivative"
    return None


def _check_states(call: AttentionCall | DecodeCall) -> tuple[torch.Size, torch.Size]:
    """Check q, k, v, the block table and the logits; returns the shapes of q and k."""
    q = call.q
    k = call.k
    v = call.v
    check_tensors(q=q, k=k, v=v)
    if call.block_table is not None:
        check_tensor("block_table", call.block_table)
    # Every access to a shape creates it again.
    q_shape = q.shape
    k_shape = k.shape
    v_shape = v.shape
    if k_shape[:3] != v_shape[:3] or k_shape[3] != q_shape[3]:
        raise unfit(q=q, k=k, v=v)
    if not q_shape[3] or not v_shape[3]:
        raise ValueError(f"head dims must be positive, got {q_shape[3]} and {v_shape[3]}")
    dtype = k.dtype
    if dtype != v.dtype or dtype not in (q.dtype, *EIGHT_BITS) or not q.is_floating_point():
        raise unlike_dtypes(q=q, k=k, v=v)
    num_heads = q_shape[1]
    check_groups(num_heads, _num_kv_heads(k_shape, call.block_table))
    call.logits.check(num_heads)
    return q_shape, k_shape


def _num_kv_heads(k_shape: torch.Size, block_table: Tensor | None) -> int:
    """KV heads of keys (B, G, K, D), or in pages (pages, page size, G, D)."""
    if block_table is None:
        return k_shape[1]
    return k_shape[2]


def _check_lengths(call: AttentionCall, q_shape: torch.Size, k_shape: torch.Size) -> None:
    """Check that the index is of the lengths of q and k."""
    index = call.index
    paged = call.block_table is not None
    if index.ragged is not None:
        if fault := index.ragged.fault(q_shape, None if paged else k_shape):
            raise ValueError(fault)
        return
    if not paged and k_shape[0] != q_shape[0]:
        raise unfit(q=call.q, k=call.k)
    if paged:
        k_len = index.k_len
    else:
        k_len = k_shape[2]
    check_query_length(q_shape[2], k_len)
    expected = (q_shape[0], q_shape[2], k_len)
    sizes = (index.batch, index.q_len, index.k_len)
    if sizes != expected:
        raise ValueError(f"index is for (B, Q, K) = {sizes}, the call has {expected}")


def _check_skipped(skipped: Tensor, index: SparseIndex) -> None:
    expected = index.diagonals.shape[:2]
    if skipped.dtype != torch.int32 or skipped.shape != expected or not skipped.is_contiguous():
        raise ValueError(
            f"skipped must be contiguous int32 {tuple(expected)}, got {skipped.dtype} "
            f"{tuple(skipped.shape)}"
        )
