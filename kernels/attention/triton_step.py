"""A softmax step over a few keys on the device, and reads of keys and values. Imports triton.

Shapes: M queries of a program, S keys of a step, D head dim, E value dim.

Tuples of arguments: `asked` is (q0, q1, scale, softcap), the queries in two
parts and what their logits are scaled by; `state` is (acc0, acc1, top, total), the unnormalised
output in two parts, maximum and sum; `kv` is (k, v, pages, k_page, k_row, v_page, v_row), a KV head
with its strides, of pages or of batch elements; H is a
kernels.attention.triton_launch.KernelConfig, the compile-time constants.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = tl.constexpr(64)
# Where the running maximum starts: finite, so that a query which has seen no key yet makes no NaN.
LOWEST = tl.constexpr(-3.4028234e38)
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(
    base,
    rows,
    present,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Elements FIRST ... FIRST + WIDTH of rows at these offsets; zero beyond DIM.

    With TAIL also zero where a row is not present.
    """
    at = FIRST + tl.arange(0, WIDTH)
    pointers = base + rows[:, None] + at[None, :]
    if TAIL and FIRST + WIDTH > DIM:
        loaded = tl.load(pointers, mask=present[:, None] & (at < DIM)[None, :], other=0.0)
    elif TAIL:
        loaded = tl.load(pointers, mask=present[:, None], other=0.0)
    elif FIRST + WIDTH > DIM:
        loaded = tl.load(pointers, mask=(at < DIM)[None, :], other=0.0)
    else:
        loaded = tl.load(pointers)
    return loaded


@triton.jit
def store_rows(
    base, rows, present, values, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr
):
    """Stores values as elements FIRST ... FIRST + WIDTH of rows at these offsets, where present."""
    at = FIRST + tl.arange(0, WIDTH)
    pointers = base + rows[:, None] + at[None, :]
    tl.store(
        pointers, values.to(base.dtype.element_ty), mask=present[:, None] & (at < DIM)[None, :]
    )


@triton.jit
def key_rows(keys, present, kv, H: tl.constexpr):
    """Element offsets of the K and V rows of these key positions, int64."""
    _, _, pages, k_page, k_row, v_page, v_row = kv
    if H.page == 0:
        row = keys.to(tl.int64)
        k_rows = row * k_row
        v_rows = row * v_row
    else:
        page = tl.load(pages + keys // H.page, mask=present, other=0).to(tl.int64)
        slot = (keys % H.page).to(tl.int64)
        k_rows = page * k_page + slot * k_row
        v_rows = page * v_page + slot * v_row
    return k_rows, v_rows


@triton.jit
def step_rows(kv, one, two, part, H: tl.constexpr, KEYS: tl.constexpr):
    """Bases of K and V, and the offsets from there of the KEYS rows of a step.

    The step holds the part-th KEYS keys of tile `one`, or all of `one` and of `two`. Only small
    pages need a look-up for each row; elsewhere it would cost registers. Select first, then
    multiply by the stride: the compiler does not see that a selection of products is aligned, and
    would copy it with loads that wait.
    """
    k, v, pages, k_page, k_row, v_page, v_row = kv
    lane = tl.arange(0, KEYS)
    within = lane
    first = one * TILE + part * KEYS
    slot = first
    if KEYS > 64:
        within = lane % TILE
        slot = tl.where(lane < TILE, one, two) * TILE
    if H.page > 0 and H.page % (64 if KEYS > 64 else KEYS) != 0:
        k_rows, v_rows = key_rows(slot + within, lane < KEYS, kv, H)
    else:
        k_rows = within * k_row
        v_rows = within * v_row
        if H.page > 0:
            page = tl.load(pages + first // H.page).to(tl.int64)
            if KEYS > 64:
                page = tl.where(
                    lane < TILE, page, tl.load(pages + two * TILE // H.page).to(tl.int64)
                )
                k_rows = page * k_page + k_rows
                v_rows = page * v_page + v_rows
            else:
                k += page * k_page
                v += page * v_page
            slot = slot % H.page
        if KEYS > 64:
            k_rows = slot.to(tl.int64) * k_row + k_rows
            v_rows = slot.to(tl.int64) * v_row + v_rows
        else:
            k += slot.to(tl.int64) * k_row
            v += slot.to(tl.int64) * v_row
    return k, v, k_rows, v_rows


@triton.jit
def widened(x, like):
    """Convert 8 bits to 16, which is exact, or to 32 if `like` is fp32."""
    if x.dtype.is_fp8():
        if like.dtype == tl.float32:
            x = x.to(tl.float32)
        else:
            x = x.to(tl.float16)
    return x


@triton.jit
def no_state(H: tl.constexpr):
    """The state of queries that have seen no key."""
    acc0 = tl.full([H.rows * TILE, H.e0], 0.0, tl.float32)
    acc1 = acc0
    if H.e1 > 0:
        acc1 = tl.full([H.rows * TILE, H.e1], 0.0, tl.float32)
    top = tl.full([H.rows * TILE], LOWEST, tl.float32)
    return acc0, acc1, top, tl.full([H.rows * TILE], 0.0, tl.float32)


@triton.jit
def scaled(top, scale, H: tl.constexpr):
    """Logits as powers of two; soft-capped ones are that already."""
    if not H.softcap:
        top = top * scale
    return top


@triton.jit
def logits_of(
    asked, k, k_rows, present, live, H: tl.constexpr, TAIL: tl.constexpr, MASK: tl.constexpr
):
    """(M, S) logits, which weigh scales, -inf where not live. Arguments as in attend."""
    q0, q1, scale, softcap = asked
    k0 = load_rows(k, k_rows, present, 0, H.d0, H.d, TAIL).to(q0.dtype)
    logits = tl.dot(q0, tl.trans(k0), input_precision=H.precision)
    if H.d1 > 0:
        k1 = load_rows(k, k_rows, present, H.d0, H.d1, H.d, TAIL).to(q0.dtype)
        logits = tl.dot(q1, tl.trans(k1), logits, input_precision=H.precision)
    if H.softcap:
        # tanh(x) = 1 - 2 / (e^2x + 1); the factors of both sides are in `scale` and `softcap`.
        logits = softcap * (1.0 - 2.0 / (tl.exp2(logits * scale) + 1.0))
    if MASK:
        logits = tl.where(live, logits, float("-inf"))
    return logits


@triton.jit
def weigh(asked, state, logits, v, v_rows, present, H: tl.constexpr, TAIL: tl.constexpr):
    """The state with what logits (M, S) and their values add to it. Arguments as in attend."""
    q0, _, scale, _ = asked
    acc0, acc1, top, total = state
    # Differences are scaled, not logits: in a fused multiply-add the product would be exact and the
    # maximum rounded, and above 2^31 the rounding alone overflows.
    highest = tl.maximum(top, tl.max(logits, 1))
    p = tl.exp2(scaled(logits - highest[:, None], scale, H))
    rescale = tl.exp2(scaled(top - highest, scale, H))
    total = total * rescale + tl.sum(p, 1)
    v0 = widened(load_rows(v, v_rows, present, 0, H.e0, H.e, TAIL), q0)
    p = p.to(v0.dtype)
    acc0 = tl.dot(p, v0, acc0 * rescale[:, None], input_precision=H.precision)
    if H.e1 > 0:
        v1 = widened(load_rows(v, v_rows, present, H.e0, H.e1, H.e, TAIL), q0)
        acc1 = tl.dot(p, v1, acc1 * rescale[:, None], input_precision=H.precision)
    return acc0, acc1, highest, total


@triton.jit
def attend(
    asked, state, k, v, k_rows, v_rows, present, live, H: tl.constexpr, TAIL: tl.constexpr,
    MASK: tl.constexpr
):  # fmt: skip
    """State after a step of online softmax over S keys (FlashAttention-2, Algorithm 1).

    In powers of two.

    `present` (S) marks the keys to read, used if TAIL; `live`, broadcast to (M, S), marks the
    logits that count, used if MASK.
    """
    logits = logits_of(asked, k, k_rows, present, live, H, TAIL, MASK)
    return weigh(asked, state, logits, v, v_rows, present, H, TAIL)


@triton.jit
def with_sink(log_sum, sink):
    """Log-sum-exp with a sink's logit in it, a power of two, and the attention that is left."""
    sink = sink * LOG2E
    highest = tl.maximum(tl.maximum(log_sum, sink), LOWEST)
    rest = tl.exp2(log_sum - highest)
    whole = rest + tl.exp2(sink - highest)
    return highest + tl.log2(whole), rest / whole


@triton.jit
def below(entries, bounds, count, steps):
    """Count of the first `count` ascending entries below each bound, by `steps` halvings."""
    low = tl.zeros_like(bounds)
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        open_ = low < high
        less = tl.load(entries + middle, mask=open_, other=0) < bounds
        low = tl.where(open_ & less, middle + 1, low)
        high = tl.where(open_ & less, high, tl.where(open_, middle, high))
    return low


@triton.jit
def is_listed(entries, wanted, count, steps):
    """Mask of those `wanted` that are among the first `count` ascending entries."""
    at = below(entries, wanted, count, steps)
    return tl.load(entries + at, mask=at < count, other=-1) == wanted
