"""The device code of the Triton backend; kernels.attention.triton launches it. Importing this imports triton.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim, R query tiles, N key
tiles; M queries of a program, S keys of a step.

A program serves ROWS adjacent query tiles of one query head. With ROWS = 2 a key tile that both want is read once,
which halves the traffic from the L2 cache. Tiles that every query of the program sees come in a loop without mask code
(inner tiles); those that one of the two query tiles wants, or that the window cuts, in a loop with it (edges). A
softmax step takes KEYS keys; 128 are two tiles, wherever they lie.

A loop looks its tiles up itself, in the step that copies them, so that Triton copies ahead: an address that comes from
the step before makes every copy wait. What is looked up for an address may not be looked at for anything else.

A head dim is two powers of two side by side, D0 + D1 >= D (80 = 64 + 16, 96 = 64 + 32), so that little is padded; the
value dim likewise.

What a call does not need (DENSE_TAIL, WINDOW, RAGGED, PAGE, SOFTCAP, each sort of entries) is not compiled in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton_tables_kernel import is_listed

TILE = tl.constexpr(64)
# Where the running maximum starts: finite, so that a query which has seen no key yet makes no NaN.
LOWEST = tl.constexpr(-3.4028234e38)
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(base, rows, present, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, TAIL: tl.constexpr):
    """Elements FIRST ... FIRST + WIDTH of rows at these offsets; zero beyond DIM and, if TAIL, where not present."""
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
def with_sink(log_sum, sink):
    """The log-sum-exp, as a power of two, with a sink's logit in it, and the share of attention that is left."""
    sink = sink * LOG2E
    highest = tl.maximum(tl.maximum(log_sum, sink), LOWEST)
    rest = tl.exp2(log_sum - highest)
    whole = rest + tl.exp2(sink - highest)
    return highest + tl.log2(whole), rest / whole


@triton.jit
def _store(base, rows, present, values, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    at = FIRST + tl.arange(0, WIDTH)
    pointers = base + rows[:, None] + at[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=present[:, None] & (at < DIM)[None, :])


@triton.jit
def _key_rows(keys, present, pages, k_page, k_row, v_page, v_row, PAGE: tl.constexpr):
    """Element offsets of the K and V rows of these key positions, int64."""
    if PAGE == 0:
        row = keys.to(tl.int64)
        k_rows = row * k_row
        v_rows = row * v_row
    else:
        page = tl.load(pages + keys // PAGE, mask=present, other=0).to(tl.int64)
        slot = (keys % PAGE).to(tl.int64)
        k_rows = page * k_page + slot * k_row
        v_rows = page * v_page + slot * v_row
    return k_rows, v_rows


@triton.jit
def _step_rows(
    k, v, one, two, part, pages, k_page, k_row, v_page, v_row, PAGE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Where the keys of a step lie: bases, and the offsets of their rows from there, for K and for V.

    The step holds KEYS keys of tile `one`, the part-th so many, or all of `one` and of `two`. Only small pages need a
    look-up for each row; elsewhere it would cost registers. What is selected is multiplied by a stride afterwards: of
    a selection of products the compiler would not know that it is aligned, and would copy it with loads that wait.
    """
    lane = tl.arange(0, KEYS)
    within = lane
    first = one * TILE + part * KEYS
    slot = first
    if KEYS > 64:
        within = lane % TILE
        slot = tl.where(lane < TILE, one, two) * TILE
    if PAGE > 0 and PAGE % (64 if KEYS > 64 else KEYS) != 0:
        k_rows, v_rows = _key_rows(slot + within, lane < KEYS, pages, k_page, k_row, v_page, v_row, PAGE)
    else:
        k_rows = within * k_row
        v_rows = within * v_row
        if PAGE > 0:
            page = tl.load(pages + first // PAGE).to(tl.int64)
            if KEYS > 64:
                page = tl.where(lane < TILE, page, tl.load(pages + two * TILE // PAGE).to(tl.int64))
                k_rows = page * k_page + k_rows
                v_rows = page * v_page + v_rows
            else:
                k += page * k_page
                v += page * v_page
            slot = slot % PAGE
        if KEYS > 64:
            k_rows = slot.to(tl.int64) * k_row + k_rows
            v_rows = slot.to(tl.int64) * v_row + v_rows
        else:
            k += slot.to(tl.int64) * k_row
            v += slot.to(tl.int64) * v_row
    return k, v, k_rows, v_rows


@triton.jit
def load_some(base, rows, present, first, WIDTH: tl.constexpr, DIM: tl.constexpr, TAIL: tl.constexpr):
    """Elements first ... first + WIDTH of rows at these offsets; zero beyond DIM and, if TAIL, where not present."""
    at = first + tl.arange(0, WIDTH)
    there = (at < DIM)[None, :]
    if TAIL:
        there = there & present[:, None]
    return tl.load(base + rows[:, None] + at[None, :], mask=there, other=0.0)


@triton.jit
def widened(x):
    """In 16 bits what is stored in 8, which hold it exactly."""
    if x.dtype.is_fp8():
        x = x.to(tl.float16)
    return x


@triton.jit
def finite_values(v):
    """Zeros in place of what is not finite."""
    return tl.where((v == v) & (tl.abs(v) != float("inf")), v, 0.0)


@triton.jit
def bad_values(p, v, live, PRECISION: tl.constexpr, MASK: tl.constexpr):
    """NaN or infinity for each query of p (M, S) and column of v (S, E) that sees such a value, else 0."""
    seen = tl.full(p.shape, 1.0, p.dtype)
    if MASK:
        seen = tl.where(live, seen, 0.0)
    positive = (v == float("inf")).to(tl.float32)
    negative = (v == float("-inf")).to(tl.float32)
    # One infinity, or several alike, are that infinity; with its opposite or a NaN they are NaN.
    count = tl.dot(seen, ((v != v).to(tl.float32) + positive + negative).to(p.dtype), input_precision=PRECISION)
    balance = tl.dot(seen, (positive - negative).to(p.dtype), input_precision=PRECISION)
    infinite = tl.where(balance == count, float("inf"), tl.where(balance == -count, float("-inf"), float("nan")))
    return tl.where(count == 0, 0.0, infinite)


@triton.jit
def _logits(
    q0, q1, k, k_rows, present, live, scale, softcap,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, TAIL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """(M, S) logits, which _weigh scales, -inf where not live. Arguments as in _attend."""
    k0 = load_rows(k, k_rows, present, 0, D0, D, TAIL).to(q0.dtype)
    logits = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
    if D1 > 0:
        k1 = load_rows(k, k_rows, present, D0, D1, D, TAIL).to(q0.dtype)
        logits = tl.dot(q1, tl.trans(k1), logits, input_precision=PRECISION)
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (e^2x + 1); the factors of both sides are in `scale` and `softcap`.
        logits = softcap * (1.0 - 2.0 / (tl.exp2(logits * scale) + 1.0))
    if MASK:
        logits = tl.where(live, logits, float("-inf"))
    return logits


@triton.jit
def _weigh(
    logits, v, v_rows, present, live, acc0, acc1, top, total, scale, e_first,
    E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, TAIL: tl.constexpr, MASK: tl.constexpr, SAFE: tl.constexpr,
):  # fmt: skip
    """What logits (M, S) and their values add to output, maximum and sum. Arguments as in _attend."""
    factor = scale
    if SOFTCAP:
        factor = 1.0
    # Differences are scaled, not logits: in a fused multiply-add the product would be exact and the maximum rounded,
    # and above 2^31 the rounding alone overflows.
    highest = tl.maximum(top, tl.max(logits, 1))
    p = tl.exp2((logits - highest[:, None]) * factor)
    rescale = tl.exp2((top - highest) * factor)
    total = total * rescale + tl.sum(p, 1)
    if SAFE:
        v0 = widened(load_some(v, v_rows, present, e_first, E0, E, TAIL))
        p = p.to(v0.dtype)
        acc0 = acc0 * rescale[:, None] + bad_values(p, v0, live, PRECISION, MASK)
        acc0 = tl.dot(p, finite_values(v0), acc0, input_precision=PRECISION)
    else:
        v0 = widened(load_rows(v, v_rows, present, 0, E0, E, TAIL))
        p = p.to(v0.dtype)
        acc0 = tl.dot(p, v0, acc0 * rescale[:, None], input_precision=PRECISION)
        if E1 > 0:
            v1 = widened(load_rows(v, v_rows, present, E0, E1, E, TAIL))
            acc1 = tl.dot(p, v1, acc1 * rescale[:, None], input_precision=PRECISION)
    return acc0, acc1, highest, total


@triton.jit
def _attend(
    q0, q1, k, v, k_rows, v_rows, present, live, acc0, acc1, top, total, scale, softcap, e_first,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, TAIL: tl.constexpr, MASK: tl.constexpr, SAFE: tl.constexpr,
):  # fmt: skip
    """One step of online softmax over S keys, in powers of two (FlashAttention-2, Algorithm 1).

    `present` (S) says which keys exist and is looked at if TAIL; `live`, (M, S) or what broadcasts to it, which logits
    count, and is looked at if MASK. If SAFE, values that are not finite stay away from queries that do not see them,
    and acc0 is of the E0 columns from `e_first` on.
    """
    logits = _logits(
        q0, q1, k, k_rows, present, live, scale, softcap, D, D0, D1, SOFTCAP, PRECISION, TAIL, MASK
    )  # fmt: skip
    return _weigh(
        logits, v, v_rows, present, live, acc0, acc1, top, total, scale, e_first,
        E, E0, E1, SOFTCAP, PRECISION, TAIL, MASK, SAFE,
    )  # fmt: skip


@triton.jit
def _spread(flags, KEYS: tl.constexpr):
    """The same flags by way of one 64-bit word: else each thread of a product would look up all of them itself."""
    lane = tl.arange(0, KEYS).to(tl.int64)
    word = tl.sum(flags.to(tl.int64) << lane)
    return ((word >> lane) & 1) == 1


@triton.jit
def _attend_columns(
    q0, q1, k, v, acc0, acc1, top, total, scale, softcap, e_first,
    columns, first, count, dense_last, held, at, half, floor, tiles, listed, search_steps,
    pages, k_page, k_row, v_page, v_row,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, PAGE: tl.constexpr, SEARCH: tl.constexpr,
    SAFE: tl.constexpr,
):  # fmt: skip
    """Gathers the columns first ... count, KEYS a step (PIT's gather); SEARCH seeks them in the row's listed tiles.

    `dense_last` is 1 where the second query tile has all keys without them.
    """
    lane = tl.arange(0, KEYS)
    # As for tiles (_attend_tiles): the column is looked up, and the page of its key.
    LEVELS: tl.constexpr = (0 if WINDOW else 1) + (1 if PAGE > 0 else 0)
    for start in tl.range(first, count, KEYS, num_stages=1 + (STAGES - 1) * (1 + LEVELS)):
        present = start + lane < count
        column = tl.load(columns + start + lane, mask=present, other=0)
        tile = column // TILE
        # Every head holds diagonal 0, so a column at or beyond the own tile counts as held.
        free = present & (tl.load(held + tl.maximum(at - tile, 0)) == 0)
        if SEARCH:
            free = free & (is_listed(tiles, tile, listed, search_steps) == 0)
        live = _spread(free, KEYS)[None, :]
        if ROWS == 2:
            free = present & (dense_last == 0) & (tl.load(held + tl.maximum(at + 1 - tile, 0)) == 0)
            live = ((half == 0)[:, None] & live) | ((half == 1)[:, None] & _spread(free, KEYS)[None, :])
        if WINDOW:
            live = live & (column[None, :] > floor[:, None])
        # Places without a column read key 0, not page 0: that may be anybody's, and NaN times a zero weight is NaN.
        k_rows, v_rows = _key_rows(column, lane < KEYS, pages, k_page, k_row, v_page, v_row, PAGE)
        acc0, acc1, top, total = _attend(
            q0, q1, k, v, k_rows, v_rows, present, live, acc0, acc1, top, total, scale, softcap, e_first,
            D, D0, D1, E, E0, E1, SOFTCAP, PRECISION, False, True, SAFE,
        )  # fmt: skip
    return acc0, acc1, top, total


@triton.jit
def _entry(
    i, left, entries,
    ROWS: tl.constexpr, HAS_WALK: tl.constexpr, HAS_TILES: tl.constexpr, DENSE_TAIL: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Key tile of entry i of the inner tiles or of the edges, and a bit for each query tile that wants it.

    left: the inner tile that is an edge, too, for want of another beside it; -1 for none. `wants` depends on no load
    that the tile depends on: Triton copies ahead only what is looked up for one purpose.
    """
    walk, walk_width, inner, firsts, seconds, edges, cut, tiles, listed, held, at, dense, dense_last = entries
    wants = 3
    if EDGE:
        i -= (left >= 0).to(tl.int32)
        there = (i >= 0) & (i < edges)
        wants = tl.where(there, 3, 0)
        # What is none of them is the tile before, wanted by nobody.
        far = 1
        if HAS_WALK:
            place = walk_width + i
            if ROWS == 2:
                wants = tl.where(i < firsts, 1, tl.where(i < firsts + seconds, 2, wants))
                place += tl.where(i >= firsts, walk_width - firsts, 0)
                place += tl.where(i >= firsts + seconds, walk_width - seconds, 0)
            else:
                place += 2 * walk_width
            far = tl.load(walk + place, mask=there & (dense_last == 0), other=1)
        if DENSE_TAIL:
            # All that the second query tile sees; the first goes by its diagonals unless it is dense, too.
            far = tl.where(there & (dense_last != 0), inner + 1 + i, far)
            if ROWS == 2:
                half = (dense == 0) & (dense_last != 0) & there
                wants = tl.where(half & (tl.load(held + inner + 1 + i, mask=half, other=0) == 0), 2, wants)
        tile = at - far
        if HAS_TILES:
            there = (i >= edges) & (i < edges + cut)
            named = tl.load(tiles + i - edges, mask=there, other=at - 1)
            # A tile on a diagonal has been attended to.
            free = there & (tl.load(held + at - named, mask=there, other=1) == 0)
            tile = tl.where(i < edges, tile, named)
            wants = tl.where(i < edges, wants, free.to(tl.int32))
        tile = tl.where(i < 0, left, tl.maximum(tile, 0))
        wants = tl.where(i < 0, 3, wants)
    else:
        far = i + 1
        if HAS_WALK:
            far = tl.load(walk + i, mask=(i < inner) & (dense == 0), other=i + 1)
        tile = tl.maximum(at - far, 0)
        if HAS_TILES:
            named = tl.load(tiles + cut + i - inner, mask=(i >= inner) & (i < inner + listed - cut), other=0)
            tile = tl.where(i < inner, tile, named)
    return tile, wants


@triton.jit
def _attend_tiles(
    q0, q1, k, v, acc0, acc1, top, total, scale, softcap, e_first,
    left, entries, half, floor, pages, k_page, k_row, v_page, v_row,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, HAS_WALK: tl.constexpr, HAS_TILES: tl.constexpr,
    DENSE_TAIL: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, EDGE: tl.constexpr, SAFE: tl.constexpr,
):  # fmt: skip
    """The inner tiles, without any mask, or the edges: wanted by one query tile of two, or cut by the window."""
    _, _, inner, _, _, edges, cut, _, listed, _, _, _, _ = entries
    # Tiles of a step, or steps of a tile.
    PAIR: tl.constexpr = 2 if KEYS > 64 else 1
    PARTS: tl.constexpr = 1 if KEYS > 64 else 64 // KEYS
    lane = tl.arange(0, KEYS)
    count = (inner + listed - cut) // PAIR
    if EDGE:
        count = ((left >= 0).to(tl.int32) + edges + cut + PAIR - 1) // PAIR
    # Each look-up that an address waits for takes as many stages as a copy to be as far ahead. What the window is
    # compared with is not copied ahead.
    NAMED: tl.constexpr = 1 if (HAS_WALK or HAS_TILES) and not (WINDOW and EDGE) else 0
    LEVELS: tl.constexpr = NAMED + (1 if PAGE > 0 else 0)
    for step in tl.range(0, count * PARTS, num_stages=1 + (STAGES - 1) * (1 + LEVELS)):
        part = step % PARTS
        one, wants = _entry(step // PARTS * PAIR, left, entries, ROWS, HAS_WALK, HAS_TILES, DENSE_TAIL, EDGE)
        two, others = one, wants
        if PAIR == 2:
            two, others = _entry(2 * step + 1, left, entries, ROWS, HAS_WALK, HAS_TILES, DENSE_TAIL, EDGE)
        live = ((wants >> half) & 1) == 1
        seen = live[:, None]
        if PAIR == 2:
            seen = tl.where((lane < TILE)[None, :], seen, (((others >> half) & 1) == 1)[:, None])
        if WINDOW and EDGE:
            key = one * TILE + part * KEYS + lane
            if PAIR == 2:
                key = tl.where(lane < TILE, one, two) * TILE + lane % TILE
            seen = seen & (key[None, :] > floor[:, None])
        k_run, v_run, k_rows, v_rows = _step_rows(k, v, one, two, part, pages, k_page, k_row, v_page, v_row, PAGE, KEYS)
        acc0, acc1, top, total = _attend(
            q0, q1, k_run, v_run, k_rows, v_rows, lane < KEYS, seen, acc0, acc1, top, total, scale, softcap, e_first,
            D, D0, D1, E, E0, E1, SOFTCAP, PRECISION, False, EDGE, SAFE,
        )  # fmt: skip
    return acc0, acc1, top, total


@triton.jit
def _attend_own(
    q0, q1, k, v, acc0, acc1, top, total, scale, softcap, e_first,
    held, at, half, floor, position, k_len, dense_last, pages, k_batch, k_row, v_batch, v_row,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SAFE: tl.constexpr,
):  # fmt: skip
    """The own tiles: the only ones that need the causal triangle and the only ones that the keys may end in."""
    for part in tl.range(0, ROWS * 64 // KEYS, num_stages=1):
        key = at * TILE + part * KEYS + tl.arange(0, KEYS)
        present = key < k_len
        live = key[None, :] <= position[:, None]
        if WINDOW:
            live = live & (key[None, :] > floor[:, None])
        if ROWS == 2:
            # Does the second query tile want the first one's own?
            wanted = (dense_last != 0) | (tl.load(held + 1) != 0)
            live = live & ((half == 0) | (part >= 64 // KEYS) | wanted)[:, None]
        k_rows, v_rows = _key_rows(key, present, pages, k_batch, k_row, v_batch, v_row, PAGE)
        acc0, acc1, top, total = _attend(
            q0, q1, k, v, k_rows, v_rows, present, live, acc0, acc1, top, total, scale, softcap, e_first,
            D, D0, D1, E, E0, E1, SOFTCAP, PRECISION, True, True, SAFE,
        )  # fmt: skip
    return acc0, acc1, top, total


@triton.jit
def _counts(logits, limit, asked):
    """Whether some query of a tile has a logit that is no less than its limit; NaN is less than nothing."""
    counts = asked[:, None] & ((logits < limit[:, None]) == 0)
    return tl.max(tl.max(counts.to(tl.int32), 1), 0)


@triton.jit
def _attend_or_skip(
    q0, q1, k, v, acc0, acc1, top, total, scale, softcap, e_first,
    entries, floor, asked, bound, pages, k_batch, k_row, v_batch, v_row,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, HAS_WALK: tl.constexpr, HAS_TILES: tl.constexpr,
    DENSE_TAIL: tl.constexpr, WINDOW: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, SAFE: tl.constexpr,
):  # fmt: skip
    """Key tile 0, if the row wants it, then those of the others that are not skipped; and how many were.

    `bound` is the log of the threshold. Columns and the own tile have been computed. A tile that takes several steps is
    multiplied once more where it counts.
    """
    PARTS: tl.constexpr = 64 // KEYS
    _, _, inner, _, _, edges, cut, tiles, listed, held, at, dense, _ = entries
    whole = inner + listed - cut
    left = -1
    lane = tl.arange(0, KEYS)
    anchored = 0
    if HAS_TILES:
        anchored = ((listed > 0) & (tl.load(tiles, mask=listed > 0, other=1) == 0)).to(tl.int32)
    # A row of a dense tail skips nothing: no tile has to come before the others.
    anchored = tl.where((dense == 0) & (at > 0) & ((tl.load(held + at) != 0) | (anchored != 0)), 1, 0)
    if anchored != 0:
        for part in tl.range(0, PARTS, num_stages=1):
            seen = (part * KEYS + lane)[None, :] > floor[:, None]
            k_run, v_run, k_rows, v_rows = _step_rows(
                k, v, 0, 0, part, pages, k_batch, k_row, v_batch, v_row, PAGE, KEYS
            )
            acc0, acc1, top, total = _attend(
                q0, q1, k_run, v_run, k_rows, v_rows, asked, seen, acc0, acc1, top, total, scale, softcap, e_first,
                D, D0, D1, E, E0, E1, SOFTCAP, PRECISION, False, WINDOW, SAFE,
            )  # fmt: skip
    factor = scale
    if SOFTCAP:
        factor = 1.0
    # Infinities and NaN among the anchors are in the sum as NaN.
    limit = tl.where(total == total, top + bound * LOG2E / factor, float("nan"))
    if DENSE_TAIL:
        limit = tl.where(dense != 0, float("nan"), limit)
    skipped = 0
    # Keys are loaded for every tile, so that they are copied ahead; values only where it counts.
    LEVELS: tl.constexpr = (1 if (HAS_WALK or HAS_TILES) and not WINDOW else 0) + (1 if PAGE > 0 else 0)
    for i in tl.range(0, whole + edges + cut, num_stages=1 + (STAGES - 1) * (1 + LEVELS)):
        tile, wants = _entry(i, left, entries, 1, HAS_WALK, HAS_TILES, DENSE_TAIL, False)
        if WINDOW or (HAS_WALK and HAS_TILES):
            edge, wanted = _entry(i - whole, left, entries, 1, HAS_WALK, HAS_TILES, DENSE_TAIL, True)
            tile = tl.where(i < whole, tile, edge)
            wants = tl.where(i < whole, wants, wanted)
        counts = 0
        for part in tl.static_range(PARTS):
            seen = (tile * TILE + part * KEYS + lane)[None, :] > floor[:, None]
            k_run, v_run, k_rows, v_rows = _step_rows(
                k, v, tile, tile, part, pages, k_batch, k_row, v_batch, v_row, PAGE, KEYS
            )
            logits = _logits(
                q0, q1, k_run, k_rows, asked, seen, scale, softcap, D, D0, D1, SOFTCAP, PRECISION, False, WINDOW
            )  # fmt: skip
            counts = tl.maximum(counts, _counts(logits, limit, asked))
        candidate = tl.where((wants != 0) & ((tile > 0) | (anchored == 0)), 1, 0)
        counts *= candidate
        skipped += candidate - counts
        if counts != 0:
            if PARTS == 1:
                acc0, acc1, top, total = _weigh(
                    logits, v_run, v_rows, asked, seen, acc0, acc1, top, total, scale, e_first,
                    E, E0, E1, SOFTCAP, PRECISION, False, WINDOW, SAFE,
                )  # fmt: skip
            else:
                for again in tl.range(0, PARTS, num_stages=1):
                    kept = (tile * TILE + again * KEYS + lane)[None, :] > floor[:, None]
                    k_some, v_some, k_those, v_those = _step_rows(
                        k, v, tile, tile, again, pages, k_batch, k_row, v_batch, v_row, PAGE, KEYS
                    )
                    acc0, acc1, top, total = _attend(
                        q0, q1, k_some, v_some, k_those, v_those, asked, kept, acc0, acc1, top, total, scale,
                        softcap, e_first, D, D0, D1, E, E0, E1, SOFTCAP, PRECISION, False, WINDOW, SAFE,
                    )  # fmt: skip
    return acc0, acc1, top, total, skipped


@triton.jit
def _every_step(
    q0, q1, k, v, scale, softcap, e_first,
    entries, columns, first_column, column_count, pages, half, floor, position, asked, k_len, bound,
    search_steps,
    k_batch, k_row, v_batch, v_row,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, HAS_WALK: tl.constexpr, HAS_TILES: tl.constexpr,
    HAS_COLUMNS: tl.constexpr, DENSE_TAIL: tl.constexpr, WINDOW: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, SKIP: tl.constexpr,
    SAFE: tl.constexpr,
):  # fmt: skip
    """Unnormalised output, maximum and sum of one program: columns, then inner tiles, then edges, then its own.

    If SKIP, its own tile comes after the columns, then those that may be skipped, whose number is returned last.
    """
    _, _, inner, _, _, _, cut, tiles, listed, held, at, _, dense_last = entries
    acc0 = tl.zeros([ROWS * TILE, E0], tl.float32)
    acc1 = acc0
    if E1 > 0:
        acc1 = tl.zeros([ROWS * TILE, E1], tl.float32)
    top = tl.full([ROWS * TILE], LOWEST, tl.float32)
    total = tl.zeros([ROWS * TILE], tl.float32)

    skipped = 0
    COLUMNS: tl.constexpr = 64 if KEYS > 64 else KEYS
    if HAS_COLUMNS:
        count = column_count
        if HAS_TILES:  # noqa: SIM102 (known at compile time; the next is not)
            # Only heads with listed tiles pay for the search; the others of the layer take the loop below.
            if listed > 0:
                acc0, acc1, top, total = _attend_columns(
                    q0, q1, k, v, acc0, acc1, top, total, scale, softcap, e_first,
                    columns, first_column, count, dense_last, held, at, half, floor, tiles, listed, search_steps,
                    pages, k_batch, k_row, v_batch, v_row,
                    D, D0, D1, E, E0, E1, SOFTCAP, PRECISION, WINDOW, ROWS, COLUMNS, STAGES, PAGE, True, SAFE,
                )  # fmt: skip
                count = 0
        acc0, acc1, top, total = _attend_columns(
            q0, q1, k, v, acc0, acc1, top, total, scale, softcap, e_first,
            columns, first_column, count, dense_last, held, at, half, floor, tiles, listed, search_steps,
            pages, k_batch, k_row, v_batch, v_row,
            D, D0, D1, E, E0, E1, SOFTCAP, PRECISION, WINDOW, ROWS, COLUMNS, STAGES, PAGE, False, SAFE,
        )  # fmt: skip

    if SKIP:
        acc0, acc1, top, total = _attend_own(
            q0, q1, k, v, acc0, acc1, top, total, scale, softcap, e_first,
            held, at, half, floor, position, k_len, dense_last, pages, k_batch, k_row, v_batch, v_row,
            D, D0, D1, E, E0, E1, SOFTCAP, PRECISION, WINDOW, PAGE, ROWS, COLUMNS, SAFE,
        )  # fmt: skip
        acc0, acc1, top, total, skipped = _attend_or_skip(
            q0, q1, k, v, acc0, acc1, top, total, scale, softcap, e_first,
            entries, floor, asked, bound, pages, k_batch, k_row, v_batch, v_row,
            D, D0, D1, E, E0, E1, SOFTCAP, PRECISION, HAS_WALK, HAS_TILES, DENSE_TAIL, WINDOW,
            PAGE, KEYS, STAGES, SAFE,
        )  # fmt: skip
    elif HAS_WALK or HAS_TILES or DENSE_TAIL:
        left = -1
        if KEYS > 64:
            whole = inner + listed - cut
            last, _ = _entry(tl.maximum(whole - 1, 0), 0, entries, ROWS, HAS_WALK, HAS_TILES, DENSE_TAIL, False)
            left = tl.where(whole % 2 == 1, last, -1)
        acc0, acc1, top, total = _attend_tiles(
            q0, q1, k, v, acc0, acc1, top, total, scale, softcap, e_first,
            left, entries, half, floor, pages, k_batch, k_row, v_batch, v_row,
            D, D0, D1, E, E0, E1, SOFTCAP, PRECISION, HAS_WALK, HAS_TILES, DENSE_TAIL, WINDOW, PAGE, ROWS, KEYS,
            STAGES, False, SAFE,
        )  # fmt: skip
        if ROWS == 2 or KEYS > 64 or WINDOW or (HAS_WALK and HAS_TILES):
            acc0, acc1, top, total = _attend_tiles(
                q0, q1, k, v, acc0, acc1, top, total, scale, softcap, e_first,
                left, entries, half, floor, pages, k_batch, k_row, v_batch, v_row,
                D, D0, D1, E, E0, E1, SOFTCAP, PRECISION, HAS_WALK, HAS_TILES, DENSE_TAIL, WINDOW, PAGE, ROWS, KEYS,
                STAGES, True, SAFE,
            )  # fmt: skip

    if not SKIP:
        acc0, acc1, top, total = _attend_own(
            q0, q1, k, v, acc0, acc1, top, total, scale, softcap, e_first,
            held, at, half, floor, position, k_len, dense_last, pages, k_batch, k_row, v_batch, v_row,
            D, D0, D1, E, E0, E1, SOFTCAP, PRECISION, WINDOW, PAGE, ROWS, COLUMNS, SAFE,
        )  # fmt: skip
    return acc0, acc1, top, total, skipped


@triton.jit
def _sums(top, total, asked, scale, sinks, head, SOFTCAP: tl.constexpr, SINKS: tl.constexpr):
    """The log-sum-exp of each query as a power of two, and what its output is multiplied by in the end."""
    total = tl.where(asked, total, 1.0)
    factor = scale
    if SOFTCAP:
        factor = 1.0
    log_sum = top * factor + tl.log2(total)
    share = 1.0 / total
    if SINKS:
        log_sum, left = with_sink(log_sum, tl.load(sinks + head))
        share = share * left
    return log_sum, share


@triton.jit
def _program(
    pid,
    q, k, v, out, lse, tables, tiles, columns, dense_tail, pages, places, sinks, skip, skipped, heads, scale, softcap,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    num_heads, num_kv_heads, head_count, chunks, q_len, k_len, first_row, num_rows, window,
    walk_width, table_width, tiles_width, columns_width, pages_width, search_steps,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, HAS_WALK: tl.constexpr, HAS_TILES: tl.constexpr,
    HAS_COLUMNS: tl.constexpr, DENSE_TAIL: tl.constexpr, WINDOW: tl.constexpr, RAGGED: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, SINKS: tl.constexpr,
    SKIP: tl.constexpr, SUBSET: tl.constexpr,
    SAFE: tl.constexpr,
):  # fmt: skip
    """One program of sparse_attention_kernel; 1 if its output holds NaN, which SAFE then replaces."""
    tl.static_assert(ROWS == 1 or not (HAS_TILES or SKIP))
    # The query heads of one KV head run side by side and read its keys while the L2 cache has them; long rows start
    # first, so that the last programs to finish are short ones.
    group = num_heads // num_kv_heads
    blocks = (num_rows + ROWS - 1) // ROWS
    chunk = pid // (blocks * group)
    rest = pid % (blocks * group)
    sequence = (chunk // chunks).to(tl.int64)
    head = (chunk % chunks * group + rest % group).to(tl.int64)
    if SUBSET:
        head = tl.load(heads + head).to(tl.int64)
    kv_head = head // group

    batch = sequence
    lse_len = q_len
    if RAGGED:
        places += sequence * 5
        batch = tl.load(places).to(tl.int64)
        q += tl.load(places + 1).to(tl.int64) * q_row
        q_len = tl.load(places + 2)
        if PAGE == 0:
            k_start = tl.load(places + 3).to(tl.int64)
            k += k_start * k_row
            v += k_start * v_row
        k_len = tl.load(places + 4)
        first_row = (k_len - q_len) // TILE
        blocks = ((k_len + TILE - 1) // TILE - first_row + ROWS - 1) // ROWS
    row = (blocks - 1 - rest // group) * ROWS
    at = first_row + row

    heads_before = sequence * num_heads + head
    walk = tables + heads_before * (4 * walk_width + 7 * table_width)
    counts = walk + 4 * walk_width
    held = counts + 6 * table_width
    q += batch * q_batch + head * q_head
    k += kv_head * k_head
    v += kv_head * v_head
    if PAGE == 0:
        k += batch * k_batch
        v += batch * v_batch
    else:
        pages += sequence * pages_width

    # How many tiles before its own a query tile can see, and the last key that each query no longer sees.
    reach = at
    local = tl.arange(0, ROWS * TILE)
    half = local // TILE
    position = at * TILE + local
    floor = position
    # The farthest tile that no query's window cuts.
    uncut = at
    if WINDOW:
        reach = tl.minimum(at, (window + TILE - 2) // TILE)
        floor = position - window
        uncut = tl.minimum(at, window // TILE - ROWS)
    # Whether the first and the last query tile see every key.
    dense = 0
    dense_last = 0
    if DENSE_TAIL:
        tail = tl.load(dense_tail + head)
        first_dense = tl.where(tail > 0, tl.maximum(k_len - tail, 0) // TILE, k_len + 1)
        dense = (at >= first_dense).to(tl.int32)
        dense_last = (at + ROWS - 1 >= first_dense).to(tl.int32)

    query = position - (k_len - q_len)
    asked = (query >= 0) & (query < q_len)
    q_rows = query.to(tl.int64) * q_row
    q0 = load_rows(q, q_rows, asked, 0, D0, D, True)
    q1 = q0
    if D1 > 0:
        q1 = load_rows(q, q_rows, asked, D0, D1, D, True)
    # Listed tiles before the own one, and how many of them are edges: all, if one of them is on a diagonal, too.
    listed = 0
    cut = 0
    if HAS_TILES:
        tiles += (heads_before * num_rows + row) * tiles_width
        beyond = 0
        twice = 0
        for start in range(0, tiles_width, 128):
            i = start + tl.arange(0, 128)
            tile = tl.load(tiles + i, mask=i < tiles_width, other=at)
            there = (tile < at) & (tile >= at - reach)
            listed += tl.sum(there.to(tl.int32))
            if WINDOW:
                beyond += tl.sum((tile < at - reach).to(tl.int32))
                cut += tl.sum((there & (tile < at - uncut)).to(tl.int32))
            if HAS_WALK:
                twice += tl.sum(tl.load(held + at - tile, mask=there, other=0).to(tl.int32))
        tiles += beyond
        cut = tl.where(twice > 0, listed, cut)
        if DENSE_TAIL:
            listed = tl.where(dense != 0, 0, listed)
            cut = tl.where(dense != 0, 0, cut)

    inner = 0
    firsts = 0
    seconds = 0
    edges = 0
    if HAS_WALK:
        inner = tl.load(counts + at)
        if ROWS == 2:
            firsts = tl.load(counts + table_width + at)
            seconds = tl.load(counts + 2 * table_width + at)
        edges = firsts + seconds
        if WINDOW:
            edges += tl.load(counts + 3 * table_width + at)
    if DENSE_TAIL:
        inner = tl.where(dense != 0, tl.maximum(tl.minimum(reach, uncut), 0), tl.where(dense_last != 0, 0, inner))
        edges = tl.where(dense_last != 0, reach - inner, edges)
        firsts = tl.where(dense_last != 0, 0, firsts)
        seconds = tl.where(dense_last != 0, 0, seconds)
    first_column = 0
    column_count = 0
    if HAS_COLUMNS:
        columns += heads_before * columns_width
        column_count = tl.load(counts + 4 * table_width + at + ROWS - 1)
        if WINDOW:
            first_column = tl.load(counts + 5 * table_width + at)
        if DENSE_TAIL:
            column_count = tl.where(dense != 0, 0, column_count)

    entries = (
        walk, walk_width, inner, firsts, seconds, edges, cut, tiles, listed, held, at, dense, dense_last,
    )  # fmt: skip
    bound = 0.0
    if SKIP:
        bound = tl.load(skip + heads_before)
    spoilt = 0
    if SAFE:
        if RAGGED:
            out += tl.load(places + 1).to(tl.int64) * out_row
        out += batch * out_batch + head * out_head
        out_rows = query.to(tl.int64) * out_row
        # A few keys and a few columns at a time, so as to take no more registers than the fast way does.
        for e_first in range(0, E, 16):
            acc, _, top, total, _ = _every_step(
                q0, q1, k, v, scale, softcap, e_first,
                entries, columns, first_column, column_count, pages, half, floor, position, asked, k_len, bound,
                search_steps,
                k_batch, k_row, v_batch, v_row,
                D, D0, D1, E, 16, 0, SOFTCAP, PRECISION, HAS_WALK, HAS_TILES, HAS_COLUMNS, DENSE_TAIL, WINDOW,
                PAGE, ROWS, 16, 1, SKIP, True,
            )  # fmt: skip
            _, share = _sums(top, total, asked, scale, sinks, head, SOFTCAP, SINKS)
            e = e_first + tl.arange(0, 16)
            there = asked[:, None] & (e < E)[None, :]
            tl.store(out + out_rows[:, None] + e[None, :], (acc * share[:, None]).to(out.dtype.element_ty), mask=there)
    else:
        acc0, acc1, top, total, left_out = _every_step(
            q0, q1, k, v, scale, softcap, 0,
            entries, columns, first_column, column_count, pages, half, floor, position, asked, k_len, bound,
            search_steps,
            k_batch, k_row, v_batch, v_row,
            D, D0, D1, E, E0, E1, SOFTCAP, PRECISION, HAS_WALK, HAS_TILES, HAS_COLUMNS, DENSE_TAIL, WINDOW,
            PAGE, ROWS, KEYS, STAGES, SKIP, False,
        )  # fmt: skip
        if SKIP:
            tl.atomic_add(skipped + heads_before, left_out)
        if RAGGED:
            # Read again: what a load has given takes registers for as long as it is kept.
            batch = tl.load(places, volatile=True).to(tl.int64)
            q_start = tl.load(places + 1, volatile=True).to(tl.int64)
            q_len = tl.load(places + 2, volatile=True)
            query = position - (tl.load(places + 4, volatile=True) - q_len)
            asked = (query >= 0) & (query < q_len)
            out += q_start * out_row
            lse += q_start
        log_sum, share = _sums(top, total, asked, scale, sinks, head, SOFTCAP, SINKS)
        out += batch * out_batch + head * out_head
        out_rows = query.to(tl.int64) * out_row
        _store(out, out_rows, asked, acc0 * share[:, None], 0, E0, E)
        if E1 > 0:
            _store(out, out_rows, asked, acc1 * share[:, None], E0, E1, E)
        tl.store(lse + (batch * num_heads + head) * lse_len + query, log_sum * LN2, mask=asked)
        spoilt = tl.max(tl.max((acc0 != acc0).to(tl.int32), 1), 0)
        if E1 > 0:
            spoilt = tl.maximum(spoilt, tl.max(tl.max((acc1 != acc1).to(tl.int32), 1), 0))
    return spoilt


@triton.jit(
    do_not_specialize=[
        "num_heads", "num_kv_heads", "head_count", "chunks", "q_len", "k_len", "first_row", "num_rows", "window",
        "walk_width", "table_width", "tiles_width", "columns_width", "pages_width", "search_steps",
    ]
)  # fmt: skip
def sparse_attention_kernel(
    q, k, v, out, lse, tables, tiles, columns, dense_tail, pages, places, sinks, skip, skipped, heads, scale, softcap,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    num_heads, num_kv_heads, head_count, chunks, q_len, k_len, first_row, num_rows, window,
    walk_width, table_width, tiles_width, columns_width, pages_width, search_steps,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, HAS_WALK: tl.constexpr, HAS_TILES: tl.constexpr,
    HAS_COLUMNS: tl.constexpr, DENSE_TAIL: tl.constexpr, WINDOW: tl.constexpr, RAGGED: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, SINKS: tl.constexpr,
    SKIP: tl.constexpr, SUBSET: tl.constexpr,
):  # fmt: skip
    """Sparse attention of one program: ROWS query tiles of one head (MInference 1.0, Algorithm 5, for every pattern).

    e is a distance in key tiles from a program's first query tile.
    tables (B, H, 4 * walk_width + 7 * table_width) int32, table_width = N + 1, by the tables kernel; of each head:
    walk (4, walk_width): distances in key tiles from a program's first query tile, ascending, of tiles that both of
    its query tiles want, only the first, only the second, or whoever does but the window cuts.
    counts (6, table_width), by the first query tile: how many entries of each of these it has; by the last: columns
    before the unbroken run of diagonals; by the first: columns before all tiles that it sees.
    held (table_width): whether the head has that diagonal.
    dense_tail (H) int32 if DENSE_TAIL: how many of the last queries see every key.
    pages (B, pages_width) int32 if PAGE > 0; k_batch and v_batch are then the strides of a page.
    places (B, 5) int32 if RAGGED: batch row, first query, queries, first key and keys of each sequence; B is then the
    number of sequences, and num_rows, q_len of q and the widths of all tables are those of the longest.
    sinks (H) fp32 if SINKS: a logit of each head that takes a share and has no value.
    heads (head_count) int32 if SUBSET: the heads that the launch serves, ascending, `chunks` times H / G of them.
    skip (B, H) fp32 if SKIP: the log of each head's threshold; skipped (B, H) int32: how many tiles it skips is added.
    """
    pid = tl.program_id(0)
    group = num_heads // num_kv_heads
    rows = (num_rows + ROWS - 1) // ROWS * group
    if SUBSET:  # noqa: SIM102 (known at compile time; the next is not)
        if pid // rows % chunks * group + pid % rows % group >= head_count:
            return
    if RAGGED:
        mine = places + (pid // rows // chunks).to(tl.int64) * 5
        seen = tl.load(mine + 4)
        have = (seen + TILE - 1) // TILE - (seen - tl.load(mine + 2)) // TILE
        if pid % rows // group >= (have + ROWS - 1) // ROWS:
            return
    spoilt = _program(
        pid, q, k, v, out, lse, tables, tiles, columns, dense_tail, pages, places, sinks, skip, skipped, heads,
        scale, softcap,
        q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
        num_heads, num_kv_heads, head_count, chunks, q_len, k_len, first_row, num_rows, window,
        walk_width, table_width, tiles_width, columns_width, pages_width, search_steps, D, D0, D1, E, E0, E1,
        SOFTCAP, PRECISION, HAS_WALK, HAS_TILES, HAS_COLUMNS, DENSE_TAIL, WINDOW, RAGGED, PAGE, ROWS, KEYS, STAGES,
        SINKS, SKIP, SUBSET, False,
    )  # fmt: skip
    # A zero weight times a value that is NaN or infinite is NaN. Such values are rare, so nobody looks for them until
    # they show; then everything is done again with care.
    if spoilt != 0:
        # In truth the same number: whatever follows from it is worked out anew, and held in no register until then.
        pid += spoilt - 1
        _program(
            pid, q, k, v, out, lse, tables, tiles, columns, dense_tail, pages, places, sinks, skip, skipped,
            heads, scale, softcap,
            q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
            num_heads, num_kv_heads, head_count, chunks, q_len, k_len, first_row, num_rows, window,
            walk_width, table_width, tiles_width, columns_width, pages_width, search_steps, D, D0, D1, E, E0, E1,
            SOFTCAP, PRECISION, HAS_WALK, HAS_TILES, HAS_COLUMNS, DENSE_TAIL, WINDOW, RAGGED, PAGE, ROWS, KEYS,
            STAGES, SINKS, SKIP, SUBSET, True,
        )  # fmt: skip
