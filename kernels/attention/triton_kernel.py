"""The device code of the Triton backend; kernels.attention.triton launches it. Importing this imports triton.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim, R query tiles, N key
tiles; M queries of a program, S keys of a step.

A program serves ROWS adjacent query tiles of one query head. With ROWS = 2 a key tile that both want is read once,
which halves the traffic from the L2 cache; one that does not want it is masked. A softmax step takes KEYS keys.

A head dim is two powers of two side by side, D0 + D1 >= D (80 = 64 + 16, 96 = 64 + 32), so that little is padded; the
value dim likewise.

What a call does not need (DENSE_TAIL, WINDOW, RAGGED, PAGE, SOFTCAP, each sort of entries) is not compiled in.
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
def _run_rows(k, v, first, pages, k_page, k_row, v_page, v_row, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """Where KEYS keys in a row lie: a base and the offsets of their rows from there, for K and for V.

    Only small pages need 64-bit offsets and a look-up for each row; elsewhere they would cost registers.
    """
    within = tl.arange(0, KEYS)
    if PAGE % KEYS != 0:
        k_rows, v_rows = _key_rows(first + within, within < KEYS, pages, k_page, k_row, v_page, v_row, PAGE)
    else:
        slot = first
        if PAGE > 0:
            slot = first % PAGE
            page = tl.load(pages + first // PAGE).to(tl.int64)
            k += page * k_page
            v += page * v_page
        k += slot.to(tl.int64) * k_row
        v += slot.to(tl.int64) * v_row
        k_rows = within * k_row
        v_rows = within * v_row
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
    k0 = load_rows(k, k_rows, present, 0, D0, D, TAIL)
    logits = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
    if D1 > 0:
        k1 = load_rows(k, k_rows, present, D0, D1, D, TAIL)
        logits = tl.dot(q1, tl.trans(k1), logits, input_precision=PRECISION)
    factor = scale
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (e^2x + 1); the factors of both sides are in `scale` and `softcap`.
        logits = softcap * (1.0 - 2.0 / (tl.exp2(logits * scale) + 1.0))
        factor = 1.0
    if MASK:
        logits = tl.where(live, logits, float("-inf"))
    # Differences are scaled, not logits: in a fused multiply-add the product would be exact and the maximum rounded,
    # and above 2^31 the rounding alone overflows.
    highest = tl.maximum(top, tl.max(logits, 1))
    p = tl.exp2((logits - highest[:, None]) * factor)
    rescale = tl.exp2((top - highest) * factor)
    total = total * rescale + tl.sum(p, 1)
    if SAFE:
        v0 = load_some(v, v_rows, present, e_first, E0, E, TAIL)
        p = p.to(v0.dtype)
        acc0 = acc0 * rescale[:, None] + bad_values(p, v0, live, PRECISION, MASK)
        acc0 = tl.dot(p, finite_values(v0), acc0, input_precision=PRECISION)
    else:
        v0 = load_rows(v, v_rows, present, 0, E0, E, TAIL)
        p = p.to(v0.dtype)
        acc0 = tl.dot(p, v0, acc0 * rescale[:, None], input_precision=PRECISION)
        if E1 > 0:
            v1 = load_rows(v, v_rows, present, E0, E1, E, TAIL)
            acc1 = tl.dot(p, v1, acc1 * rescale[:, None], input_precision=PRECISION)
    return acc0, acc1, highest, total


@triton.jit
def _is_listed(tiles, wanted, count, steps):
    """Which of `wanted` are among the first `count` of the ascending `tiles`: a binary search of `steps` halvings."""
    low = tl.zeros_like(wanted)
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        open_ = low < high
        below = tl.load(tiles + middle, mask=open_, other=0) < wanted
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & below, high, tl.where(open_, middle, high))
    return tl.load(tiles + low, mask=low < count, other=-1) == wanted


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
    # A load whose address another load gives takes two stages more to be as far ahead. With one query tile a program it
    # is one more: the other takes the shared memory without which two programs fit a multiprocessor of Hopper.
    for start in tl.range(first, count, KEYS, num_stages=STAGES + 1 if ROWS == 1 and STAGES > 2 else STAGES + 2):
        present = start + lane < count
        column = tl.load(columns + start + lane, mask=present, other=0)
        tile = column // TILE
        # Every head holds diagonal 0, so a column at or beyond the own tile counts as held.
        free = present & (tl.load(held + tl.maximum(at - tile, 0)) == 0)
        if SEARCH:
            free = free & (_is_listed(tiles, tile, listed, search_steps) == 0)
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
def _step(
    step, walk, walked, tiles, listed, held, at, dense, dense_last,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
    HAS_WALK: tl.constexpr, HAS_TILES: tl.constexpr, DENSE_TAIL: tl.constexpr,
):  # fmt: skip
    """First key of a step through the walk and the list after it, and a bit for each query tile that wants it."""
    i = step // PARTS
    walking = i < walked
    wants = 1
    if DENSE_TAIL:
        walking = walking & (dense_last == 0)
    if ROWS == 2:
        entry = tl.load(walk + i, mask=walking, other=0)
        if DENSE_TAIL:
            # Where only the second query tile is dense the first still goes by its diagonals.
            first = (dense != 0) | (tl.load(held + i + 1, mask=i < walked, other=0) != 0)
            entry = tl.where(dense_last != 0, 4 * (i + 1) + 2 + first.to(tl.int32), entry)
        tile = at - entry // 4
        wants = entry % 4
    elif HAS_WALK or DENSE_TAIL:
        # Entry 0 of the walk is the own tile.
        diagonal = i + 1
        if HAS_WALK:
            diagonal = tl.load(walk + 1 + i, mask=walking, other=0)
            if DENSE_TAIL:
                diagonal = tl.where(dense_last != 0, i + 1, diagonal)
        tile = at - diagonal
        if HAS_TILES:
            entry = tl.load(tiles + i - walked, mask=(i >= walked) & (i < walked + listed), other=at)
            tile = tl.where(i < walked, tile, entry)
            if HAS_WALK:
                # A listed tile on a diagonal has been walked: it is multiplied again but counts for nothing.
                wants = ((i < walked) | (tl.load(held + at - entry) == 0)).to(tl.int32)
    else:
        tile = tl.load(tiles + i, mask=i < listed, other=0)
    return tile * TILE + step % PARTS * KEYS, wants


@triton.jit
def _every_step(
    q0, q1, k, v, scale, softcap, e_first,
    walk, walked, held, tiles, listed, columns, first_column, column_count, pages,
    at, half, floor, position, asked, k_len, dense, dense_last, search_steps, k_batch, k_row, v_batch, v_row,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, HAS_WALK: tl.constexpr, HAS_TILES: tl.constexpr,
    HAS_COLUMNS: tl.constexpr, DENSE_TAIL: tl.constexpr, WINDOW: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    SAFE: tl.constexpr,
):  # fmt: skip
    """Unnormalised output, maximum and sum of one program: columns, then walked and listed tiles, then its own."""
    acc0 = tl.zeros([ROWS * TILE, E0], tl.float32)
    acc1 = acc0
    if E1 > 0:
        acc1 = tl.zeros([ROWS * TILE, E1], tl.float32)
    top = tl.full([ROWS * TILE], LOWEST, tl.float32)
    total = tl.zeros([ROWS * TILE], tl.float32)

    if HAS_COLUMNS:
        count = column_count
        if HAS_TILES:  # noqa: SIM102 (known at compile time; the next is not)
            # Only heads with listed tiles pay for the search; the others of the layer take the loop below.
            if listed > 0:
                acc0, acc1, top, total = _attend_columns(
                    q0, q1, k, v, acc0, acc1, top, total, scale, softcap, e_first,
                    columns, first_column, count, dense_last, held, at, half, floor, tiles, listed, search_steps,
                    pages, k_batch, k_row, v_batch, v_row,
                    D, D0, D1, E, E0, E1, SOFTCAP, PRECISION, WINDOW, ROWS, KEYS, STAGES, PAGE, True, SAFE,
                )  # fmt: skip
                count = 0
        acc0, acc1, top, total = _attend_columns(
            q0, q1, k, v, acc0, acc1, top, total, scale, softcap, e_first,
            columns, first_column, count, dense_last, held, at, half, floor, tiles, listed, search_steps,
            pages, k_batch, k_row, v_batch, v_row,
            D, D0, D1, E, E0, E1, SOFTCAP, PRECISION, WINDOW, ROWS, KEYS, STAGES, PAGE, False, SAFE,
        )  # fmt: skip

    if HAS_WALK or HAS_TILES or DENSE_TAIL:
        # Each step is looked up one step early, so that the addresses of its keys wait for no load; a page is not.
        first, wants = _step(
            0, walk, walked, tiles, listed, held, at, dense, dense_last,
            ROWS, KEYS, PARTS, HAS_WALK, HAS_TILES, DENSE_TAIL,
        )  # fmt: skip
        PICKS: tl.constexpr = ROWS == 2 or (HAS_WALK and HAS_TILES)
        for step in tl.range(0, (walked + listed) * PARTS, num_stages=STAGES if PAGE == 0 else STAGES + 2):
            live = (((wants >> half) & 1) == 1)[:, None]
            if WINDOW:
                seen = (first + tl.arange(0, KEYS))[None, :] > floor[:, None]
                live = live & seen if PICKS else seen
            k_run, v_run, k_rows, v_rows = _run_rows(k, v, first, pages, k_batch, k_row, v_batch, v_row, PAGE, KEYS)
            first, wants = _step(
                step + 1, walk, walked, tiles, listed, held, at, dense, dense_last,
                ROWS, KEYS, PARTS, HAS_WALK, HAS_TILES, DENSE_TAIL,
            )  # fmt: skip
            acc0, acc1, top, total = _attend(
                q0, q1, k_run, v_run, k_rows, v_rows, asked, live, acc0, acc1, top, total, scale, softcap, e_first,
                D, D0, D1, E, E0, E1, SOFTCAP, PRECISION, False, WINDOW or PICKS, SAFE,
            )  # fmt: skip

    # The own tiles: the only ones that need the causal triangle and the only ones that the keys may end in.
    for part in tl.range(0, ROWS * PARTS, num_stages=1):
        key = at * TILE + part * KEYS + tl.arange(0, KEYS)
        present = key < k_len
        live = key[None, :] <= position[:, None]
        if WINDOW:
            live = live & (key[None, :] > floor[:, None])
        if ROWS == 2:
            # Does the second query tile want the first one's own?
            wanted = (dense_last != 0) | (tl.load(held + 1) != 0)
            live = live & ((half == 0) | (part >= PARTS) | wanted)[:, None]
        k_rows, v_rows = _key_rows(key, present, pages, k_batch, k_row, v_batch, v_row, PAGE)
        acc0, acc1, top, total = _attend(
            q0, q1, k, v, k_rows, v_rows, present, live, acc0, acc1, top, total, scale, softcap, e_first,
            D, D0, D1, E, E0, E1, SOFTCAP, PRECISION, True, True, SAFE,
        )  # fmt: skip
    return acc0, acc1, top, total


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
    q, k, v, out, lse, walk, walk_counts, held, tiles, columns, column_starts, column_counts, dense_tail, pages, places,
    sinks, scale, softcap,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    num_heads, num_kv_heads, q_len, k_len, first_row, num_rows, window,
    walk_width, table_width, tiles_width, columns_width, pages_width, search_steps,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, HAS_WALK: tl.constexpr, HAS_TILES: tl.constexpr,
    HAS_COLUMNS: tl.constexpr, DENSE_TAIL: tl.constexpr, WINDOW: tl.constexpr, RAGGED: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    SINKS: tl.constexpr,
    SAFE: tl.constexpr,
):  # fmt: skip
    """One program of sparse_attention_kernel; 1 if its output holds NaN, which SAFE then replaces."""
    tl.static_assert(ROWS == 1 or not HAS_TILES)
    # The query heads of one KV head run side by side and read its keys while the L2 cache has them; long rows start
    # first, so that the last programs to finish are short ones.
    group = num_heads // num_kv_heads
    blocks = (num_rows + ROWS - 1) // ROWS
    kv = pid // (blocks * group)
    rest = pid % (blocks * group)
    sequence = (kv // num_kv_heads).to(tl.int64)
    kv_head = (kv % num_kv_heads).to(tl.int64)
    head = kv_head * group + rest % group

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
    walk += heads_before * walk_width
    held += heads_before * table_width
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
    if WINDOW:
        reach = tl.minimum(at, (window + TILE - 2) // TILE)
        floor = position - window
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
    listed = 0
    if HAS_TILES:
        tiles += (heads_before * num_rows + row) * tiles_width
        beyond = 0
        for start in range(0, tiles_width, 128):
            i = start + tl.arange(0, 128)
            tile = tl.load(tiles + i, mask=i < tiles_width, other=at)
            listed += tl.sum((tile < at).to(tl.int32))
            if WINDOW:
                beyond += tl.sum((tile < at - reach).to(tl.int32))
        tiles += beyond
        listed -= beyond
        if DENSE_TAIL:
            listed = tl.where(dense != 0, 0, listed)

    walked = 0
    if HAS_WALK:
        walked = tl.load(walk_counts + heads_before * table_width + at)
    if DENSE_TAIL:
        walked = tl.where(dense_last != 0, reach, walked)
    first_column = 0
    column_count = 0
    if HAS_COLUMNS:
        columns += heads_before * columns_width
        column_count = tl.load(column_counts + heads_before * table_width + at + ROWS - 1)
        if WINDOW:
            first_column = tl.load(column_starts + heads_before * table_width + at)
        if DENSE_TAIL:
            column_count = tl.where(dense != 0, 0, column_count)

    spoilt = 0
    if SAFE:
        # TILE // 16, as a plain number: a global is a constexpr in the interpreter, too, and that has no 0 % constexpr.
        SAFE_PARTS: tl.constexpr = 4
        tl.static_assert(SAFE_PARTS * 16 == TILE)
        if RAGGED:
            out += tl.load(places + 1).to(tl.int64) * out_row
        out += batch * out_batch + head * out_head
        out_rows = query.to(tl.int64) * out_row
        # A few keys and a few columns at a time, so as to take no more registers than the fast way does.
        for e_first in range(0, E, 16):
            acc, _, top, total = _every_step(
                q0, q1, k, v, scale, softcap, e_first,
                walk, walked, held, tiles, listed, columns, first_column, column_count, pages,
                at, half, floor, position, asked, k_len, dense, dense_last, search_steps,
                k_batch, k_row, v_batch, v_row,
                D, D0, D1, E, 16, 0, SOFTCAP, PRECISION, HAS_WALK, HAS_TILES, HAS_COLUMNS, DENSE_TAIL, WINDOW,
                PAGE, ROWS, 16, SAFE_PARTS, 1, True,
            )  # fmt: skip
            _, share = _sums(top, total, asked, scale, sinks, head, SOFTCAP, SINKS)
            e = e_first + tl.arange(0, 16)
            there = asked[:, None] & (e < E)[None, :]
            tl.store(out + out_rows[:, None] + e[None, :], (acc * share[:, None]).to(out.dtype.element_ty), mask=there)
    else:
        acc0, acc1, top, total = _every_step(
            q0, q1, k, v, scale, softcap, 0,
            walk, walked, held, tiles, listed, columns, first_column, column_count, pages,
            at, half, floor, position, asked, k_len, dense, dense_last, search_steps, k_batch, k_row, v_batch, v_row,
            D, D0, D1, E, E0, E1, SOFTCAP, PRECISION, HAS_WALK, HAS_TILES, HAS_COLUMNS, DENSE_TAIL, WINDOW,
            PAGE, ROWS, KEYS, PARTS, STAGES, False,
        )  # fmt: skip
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
        "num_heads", "num_kv_heads", "q_len", "k_len", "first_row", "num_rows", "window",
        "walk_width", "table_width", "tiles_width", "columns_width", "pages_width", "search_steps",
    ]
)  # fmt: skip
def sparse_attention_kernel(
    q, k, v, out, lse, walk, walk_counts, held, tiles, columns, column_starts, column_counts, dense_tail, pages, places,
    sinks, scale, softcap,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    num_heads, num_kv_heads, q_len, k_len, first_row, num_rows, window,
    walk_width, table_width, tiles_width, columns_width, pages_width, search_steps,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, HAS_WALK: tl.constexpr, HAS_TILES: tl.constexpr,
    HAS_COLUMNS: tl.constexpr, DENSE_TAIL: tl.constexpr, WINDOW: tl.constexpr, RAGGED: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Sparse attention of one program: ROWS query tiles of one head (MInference 1.0, Algorithm 5, for every pattern).

    walk (B, H, walk_width) int32: ROWS = 1: the diagonals; ROWS = 2: 4 * e + wants, where the key tile e before the
    first query tile is wanted by the first query tile (wants & 1) and the second (wants & 2); ascending, e > 0.
    walk_counts (B, H, N + 1) int32: how many entries of walk a program has whose first query tile is at that key tile.
    held (B, H, N + 1) uint8: whether the head has that diagonal.
    column_counts (B, H, N + 1) int32: how many columns lie before the unbroken run of diagonals up to that query tile.
    column_starts (B, H, N + 1) int32 if WINDOW: how many columns lie before all tiles that it can see.
    dense_tail (H) int32 if DENSE_TAIL: how many of the last queries see every key.
    pages (B, pages_width) int32 if PAGE > 0; k_batch and v_batch are then the strides of a page.
    places (B, 5) int32 if RAGGED: batch row, first query, queries, first key and keys of each sequence; B is then the
    number of sequences, and num_rows, q_len of q and the widths of all tables are those of the longest.
    sinks (H) fp32 if SINKS: a logit of each head that takes a share and has no value.
    """
    pid = tl.program_id(0)
    if RAGGED:
        group = num_heads // num_kv_heads
        rows = (num_rows + ROWS - 1) // ROWS * group
        mine = places + (pid // rows // num_kv_heads).to(tl.int64) * 5
        seen = tl.load(mine + 4)
        have = (seen + TILE - 1) // TILE - (seen - tl.load(mine + 2)) // TILE
        if pid % rows // group >= (have + ROWS - 1) // ROWS:
            return
    spoilt = _program(
        pid, q, k, v, out, lse, walk, walk_counts, held, tiles, columns, column_starts, column_counts, dense_tail,
        pages, places, sinks, scale, softcap, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head,
        v_row, out_batch, out_head, out_row, num_heads, num_kv_heads, q_len, k_len, first_row, num_rows, window,
        walk_width, table_width, tiles_width, columns_width, pages_width, search_steps, D, D0, D1, E, E0, E1,
        SOFTCAP, PRECISION, HAS_WALK, HAS_TILES, HAS_COLUMNS, DENSE_TAIL, WINDOW, RAGGED, PAGE, ROWS, KEYS, PARTS,
        STAGES, SINKS, False,
    )  # fmt: skip
    # A zero weight times a value that is NaN or infinite is NaN. Such values are rare, so nobody looks for them until
    # they show; then everything is done again with care.
    if spoilt != 0:
        # In truth the same number: whatever follows from it is worked out anew, and held in no register until then.
        pid += spoilt - 1
        _program(
            pid, q, k, v, out, lse, walk, walk_counts, held, tiles, columns, column_starts, column_counts,
            dense_tail, pages, places, sinks, scale, softcap, q_batch, q_head, q_row, k_batch, k_head, k_row,
            v_batch, v_head, v_row, out_batch, out_head, out_row, num_heads, num_kv_heads, q_len, k_len, first_row,
            num_rows, window, walk_width, table_width, tiles_width, columns_width, pages_width, search_steps, D, D0,
            D1, E, E0, E1, SOFTCAP, PRECISION, HAS_WALK, HAS_TILES, HAS_COLUMNS, DENSE_TAIL, WINDOW, RAGGED, PAGE,
            ROWS, KEYS, PARTS, STAGES, SINKS, True,
        )  # fmt: skip
