"""The loops of the attention kernel, on the device: over own tiles, columns, inner tiles, edges.

Imports triton.

Shapes: M queries of a program, S keys of a step.

Tiles that every query of the program sees come in a loop without mask code (inner tiles); those
that one of the two query tiles wants, or that the window cuts, in a loop with it (edges). A softmax
step takes H.keys keys, at most 64 where there is a mask; 128 are two tiles, wherever they lie. A
loop looks its tiles up itself, in the step that copies them, so that Triton copies ahead: an
address that comes from the step before makes every copy wait. A value that is
looked up for an address may not be used for anything else.

Columns are gathered in every program. Copied once per head to where they lie end to end they would
come as tiles do. By the compiler's count that saves 3 to 6% of this one loop's instructions (20%
where keys lie in pages), whose mask costs more: by estimate 1% of a prefill (4% in pages), for
another launch and C * (D + E) numbers of each query head.

`place` is (held, at, half, floor, position, exists, first_key, k_len, dense, dense_last, part,
parts): which diagonals the head has, the first query tile, of each query its tile of the two, the
last key that it no longer sees, its position and whether it exists, the first key that any of them
sees and the number of keys, whether the first and the last tile see every key, and which part of
how many the program computes. Memory of keys before `first_key` is not read: it may belong to
another sequence. `named` is (walk, walk_width, table_width,
reach, inner, cut, tiles, listed): the entries of tables and lists, how many tiles before its own
the first query tile can see, how many are inner tiles, and lists that are edges; `edged` is
(firsts, seconds, edges), tiles wanted by the first alone, by the second alone, and edges in all;
`columned` is (columns, first, count, search_steps). The others are triton_step's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton_step import (
    LOG2E,
    TILE,
    attend,
    is_listed,
    key_rows,
    logits_of,
    no_state,
    scaled,
    step_rows,
    weigh,
)  # fmt: skip


@triton.jit
def _part(count, place, H: tl.constexpr):
    """This program's part of `count` tiles, pairs of tiles or runs of 64 columns."""
    begin = 0
    end = count
    if H.split:
        _, _, _, _, _, _, _, _, _, _, part, parts = place
        begin = count * part // parts
        end = count * (part + 1) // parts
    return begin, end


@triton.jit
def _words(flags, KEYS: tl.constexpr):
    """The flags of a step's keys as the bits of two numbers, the second for those beyond 32."""
    lane = tl.arange(0, KEYS)
    bits = flags.to(tl.int32) << (lane % 32)
    low = tl.sum(tl.where(lane < 32, bits, 0))
    high = low
    if KEYS > 32:
        high = tl.sum(tl.where(lane < 32, 0, bits))
    return low, high


@triton.jit
def _columns(asked, state, kv, place, named, columned, H: tl.constexpr, SEARCH: tl.constexpr):
    """Gather the columns first ... count, some a step (PIT).

    SEARCH seeks them in the row's listed tiles.
    """
    held, at, half, floor, _, _, first_key, _, _, dense_last, _, _ = place
    _, _, _, _, _, _, tiles, listed = named
    columns, first, count, search_steps = columned
    lane = tl.arange(0, H.masked_keys)
    if H.split:
        begin, end = _part((tl.maximum(count - first, 0) + 63) // 64, place, H)
        count = tl.minimum(count, first + end * 64)
        first += begin * 64
    # As for tiles (_tiles): the column is looked up, and the page of its key.
    LEVELS: tl.constexpr = (0 if H.window else 1) + (1 if H.page > 0 else 0)
    for start in tl.range(
        first, count, H.masked_keys, num_stages=1 + (H.stages - 1) * (1 + LEVELS)
    ):
        present = start + lane < count
        column = tl.load(columns + start + lane, mask=present, other=0)
        tile = column // TILE
        # Every head holds diagonal 0, so a column at or beyond the own tile counts as held.
        free = present & (tl.load(held + tl.maximum(at - tile, 0)) == 0)
        if SEARCH:
            free = free & (is_listed(tiles, tile, listed, search_steps) == 0)
        # By way of two numbers: else each thread of a product would look up all of them itself.
        low, high = _words(free, H.masked_keys)
        if H.rows == 2:
            free = present & (dense_last == 0) & (tl.load(held + tl.maximum(at + 1 - tile, 0)) == 0)
            second_low, second_high = _words(free, H.masked_keys)
            low = tl.where(half == 0, low, second_low)[:, None]
            high = tl.where(half == 0, high, second_high)[:, None]
        live = ((tl.where(lane[None, :] < 32, low, high) >> (lane % 32)[None, :]) & 1) == 1
        if H.window:
            live = live & (column[None, :] > floor[:, None])
            column = tl.maximum(column, first_key)
        # Places without a column read the first key, not page 0, which may belong to another
        # sequence: NaN times a zero weight is NaN.
        k_rows, v_rows = key_rows(column, lane < H.masked_keys, kv, H)
        state = attend(asked, state, kv[0], kv[1], k_rows, v_rows, present, live, H, False, True)
    return state


@triton.jit
def _edges(place, named, H: tl.constexpr):
    """`edged` of the module's docstring, looked up late: it would be held over the loops before."""
    _, at, _, _, _, _, _, _, _, dense_last, _, _ = place
    walk, walk_width, table_width, reach, inner, _, _, _ = named
    counts = walk + 4 * walk_width + at
    firsts = 0
    seconds = 0
    edges = 0
    if H.walk:
        if H.rows == 2:
            firsts = tl.load(counts + table_width)
            seconds = tl.load(counts + 2 * table_width)
        edges = firsts + seconds
        if H.window:
            edges += tl.load(counts + 3 * table_width)
    if H.tail:
        edges = tl.where(dense_last != 0, reach - inner, edges)
        firsts = tl.where(dense_last != 0, 0, firsts)
        seconds = tl.where(dense_last != 0, 0, seconds)
    return firsts, seconds, edges


@triton.jit
def _entry(i, left, place, named, edged, H: tl.constexpr, EDGE: tl.constexpr):
    """Key tile of entry i of the inner tiles or the edges, and a bit for each query tile.

    `wants` depends on no load that the tile depends on: Triton copies ahead only values that are
    used for one purpose.

    Args:
        i: number of the entry.
        left: the inner tile without a second one to pair with, which becomes an edge; -1 for none.
        place: see the module's docstring.
        named: see the module's docstring.
        edged: see the module's docstring; read only if EDGE.
        H: see the module's docstring.
        EDGE: True for an edge, False for an inner tile.
    """
    held, at, _, _, _, _, _, _, dense, dense_last, _, _ = place
    walk, walk_width, _, _, inner, cut, tiles, listed = named
    wants = 3
    if EDGE:
        firsts, seconds, edges = edged
        i -= (left >= 0).to(tl.int32)
        there = (i >= 0) & (i < edges)
        wants = tl.where(there, 3, 0)
        # Beyond the edges: the tile before, wanted by neither query tile.
        far = 1
        if H.walk:
            at_walk = walk_width + i
            if H.rows == 2:
                wants = tl.where(i < firsts, 1, tl.where(i < firsts + seconds, 2, wants))
                at_walk += tl.where(i >= firsts, walk_width - firsts, 0)
                at_walk += tl.where(i >= firsts + seconds, walk_width - seconds, 0)
            else:
                at_walk += 2 * walk_width
            far = tl.load(walk + at_walk, mask=there & (dense_last == 0), other=1)
        if H.tail:
            # All that the second query tile sees; the first goes by its diagonals unless it is
            # dense, too.
            far = tl.where(there & (dense_last != 0), inner + 1 + i, far)
            if H.rows == 2:
                second_alone = (dense == 0) & (dense_last != 0) & there
                wants = tl.where(
                    second_alone & (tl.load(held + inner + 1 + i, mask=second_alone, other=0) == 0),
                    2,
                    wants,
                )
        tile = at - far
        if H.tiles:
            there = (i >= edges) & (i < edges + cut)
            entry = tl.load(tiles + i - edges, mask=there, other=at - 1)
            # A tile on a diagonal has been attended to.
            free = there & (tl.load(held + at - entry, mask=there, other=1) == 0)
            tile = tl.where(i < edges, tile, entry)
            wants = tl.where(i < edges, wants, free.to(tl.int32))
        tile = tl.where(i < 0, left, tl.maximum(tile, 0))
        wants = tl.where(i < 0, 3, wants)
    else:
        far = i + 1
        if H.walk:
            far = tl.load(walk + i, mask=(i < inner) & (dense == 0), other=i + 1)
        tile = tl.maximum(at - far, 0)
        if H.tiles:
            entry = tl.load(
                tiles + cut + i - inner, mask=(i >= inner) & (i < inner + listed - cut), other=0
            )
            tile = tl.where(i < inner, tile, entry)
    return tile, wants


@triton.jit
def _tiles(asked, state, kv, left, place, named, H: tl.constexpr, EDGE: tl.constexpr):
    """The inner tiles, unmasked, or the edges: for one query tile of two, or cut by the window.

    Edges come in steps of at most a tile: what 128 keys and a mask take of registers is more than
    there are.
    """
    _, _, half, floor, _, _, first_key, _, _, _, _, _ = place
    _, _, _, _, inner, cut, _, listed = named
    KEYS: tl.constexpr = H.masked_keys if EDGE else H.keys
    # Tiles of a step, or steps of a tile.
    PAIR: tl.constexpr = 2 if KEYS > 64 else 1
    PARTS: tl.constexpr = 1 if KEYS > 64 else 64 // KEYS
    lane = tl.arange(0, KEYS)
    count = (inner + listed - cut) // PAIR
    edged = (0, 0, 0)
    if EDGE:
        edged = _edges(place, named, H)
        _, _, edges = edged
        count = (left >= 0).to(tl.int32) + edges + cut
    begin, end = _part(count, place, H)
    # Each look-up that an address waits for takes as many stages as a copy to be as far ahead. What
    # the window is compared with is not copied ahead.
    CUT: tl.constexpr = 1 if H.window and EDGE else 0
    NAMED: tl.constexpr = 1 if (H.walk or H.tiles) and not CUT else 0
    LEVELS: tl.constexpr = NAMED + (1 if H.page > 0 else 0)
    for step in tl.range(begin * PARTS, end * PARTS, num_stages=1 + (H.stages - 1) * (1 + LEVELS)):
        part = step % PARTS
        one, wants = _entry(step // PARTS * PAIR, left, place, named, edged, H, EDGE)
        two = one
        if PAIR == 2:
            two, wants = _entry(2 * step + 1, left, place, named, edged, H, EDGE)
        seen = (((wants >> half) & 1) == 1)[:, None]
        present = lane < KEYS
        if CUT:
            key = one * TILE + part * KEYS + lane
            seen = seen & (key[None, :] > floor[:, None])
            present = key >= first_key
        k_run, v_run, k_rows, v_rows = step_rows(kv, one, two, part, H, KEYS)
        state = attend(asked, state, k_run, v_run, k_rows, v_rows, present, seen, H, CUT, EDGE)
    return state


@triton.jit
def _own(asked, state, kv, place, H: tl.constexpr):
    """The own tiles: the only ones with the causal triangle, or in which keys may end."""
    held, at, half, floor, position, _, first_key, k_len, _, dense_last, _, _ = place
    PARTS: tl.constexpr = 64 // H.masked_keys
    begin, end = _part(H.rows, place, H)
    for part in tl.range(begin * PARTS, end * PARTS, num_stages=1):
        key = at * TILE + part * H.masked_keys + tl.arange(0, H.masked_keys)
        present = key < k_len
        live = key[None, :] <= position[:, None]
        if H.window:
            live = live & (key[None, :] > floor[:, None])
            present = present & (key >= first_key)
        if H.rows == 2:
            # Does the second query tile want the first one's own?
            wanted = (dense_last != 0) | (tl.load(held + 1) != 0)
            live = live & ((half == 0) | (part >= PARTS) | wanted)[:, None]
        k_rows, v_rows = key_rows(key, present, kv, H)
        state = attend(asked, state, kv[0], kv[1], k_rows, v_rows, present, live, H, True, True)
    return state


@triton.jit
def _counts(logits, limit, exists):
    """True if a query of the tile has a logit no less than its limit; NaN is less than nothing."""
    counts = exists[:, None] & ((logits < limit[:, None]) == 0)
    return tl.max(tl.max(counts.to(tl.int32), 1), 0)


@triton.jit
def _tile_again(asked, state, kv, tile, place, H: tl.constexpr):
    """All keys of one tile."""
    _, _, _, floor, _, _, first_key, _, _, _, _, _ = place
    for part in tl.range(0, 64 // H.keys, num_stages=1):
        key = tile * TILE + part * H.keys + tl.arange(0, H.keys)
        seen = key[None, :] > floor[:, None]
        k_run, v_run, k_rows, v_rows = step_rows(kv, tile, tile, part, H, H.keys)
        state = attend(
            asked, state, k_run, v_run, k_rows, v_rows, key >= first_key, seen, H, H.window,
            H.window
        )  # fmt: skip
    return state


@triton.jit
def _or_skip(asked, state, kv, place, named, bound, H: tl.constexpr):
    """Key tile 0, if wanted, then the others that are not skipped; and the number skipped.

    `bound` is the log of the threshold. Columns and the own tile have been computed. A tile that
    takes several steps is multiplied once more where it counts.
    """
    PARTS: tl.constexpr = 64 // H.keys
    held, at, _, floor, _, exists, first_key, _, dense, _, _, _ = place
    _, _, _, _, inner, cut, tiles, listed = named
    edged = _edges(place, named, H)
    _, _, edges = edged
    whole = inner + listed - cut
    left = -1
    anchored = 0
    if H.tiles:
        anchored = ((listed > 0) & (tl.load(tiles, mask=listed > 0, other=1) == 0)).to(tl.int32)
    # A row of a dense tail skips nothing: no tile has to come before the others.
    anchored = tl.where(
        (dense == 0) & (at > 0) & ((tl.load(held + at) != 0) | (anchored != 0)), 1, 0
    )
    if anchored != 0:
        state = _tile_again(asked, state, kv, tl.full([], 0, tl.int32), place, H)
    _, _, scale, _ = asked
    _, _, top, total = state
    # Infinities and NaN among the anchors are in the sum as NaN.
    limit = tl.where(total == total, top + bound * LOG2E / scaled(1.0, scale, H), float("nan"))
    if H.tail:
        limit = tl.where(dense != 0, float("nan"), limit)
    skipped = 0
    # Keys are loaded for every tile, so that they are copied ahead; values only where it counts.
    LEVELS: tl.constexpr = (1 if (H.walk or H.tiles) and not H.window else 0) + (
        1 if H.page > 0 else 0
    )
    for i in tl.range(0, whole + edges + cut, num_stages=1 + (H.stages - 1) * (1 + LEVELS)):
        tile, wants = _entry(i, left, place, named, edged, H, False)
        if H.window or (H.walk and H.tiles):
            edge, wanted = _entry(i - whole, left, place, named, edged, H, True)
            tile = tl.where(i < whole, tile, edge)
            wants = tl.where(i < whole, wants, wanted)
        counts = 0
        for part in tl.static_range(PARTS):
            key = tile * TILE + part * H.keys + tl.arange(0, H.keys)
            seen = key[None, :] > floor[:, None]
            present = key >= first_key
            k_run, v_run, k_rows, v_rows = step_rows(kv, tile, tile, part, H, H.keys)
            logits = logits_of(asked, k_run, k_rows, present, seen, H, H.window, H.window)
            counts = tl.maximum(counts, _counts(logits, limit, exists))
        candidate = tl.where((wants != 0) & ((tile > 0) | (anchored == 0)), 1, 0)
        counts *= candidate
        skipped += candidate - counts
        if counts != 0:
            if PARTS == 1:
                state = weigh(asked, state, logits, v_run, v_rows, present, H, H.window)
            else:
                state = _tile_again(asked, state, kv, tile, place, H)
    return state, skipped


@triton.jit
def every_step(asked, kv, place, named, columned, bound, H: tl.constexpr):
    """The state of one program: its own tiles, then columns, then inner tiles, then edges; and 0.

    What own tiles and columns take of registers is free again in the loops that take the most. If
    H.skip, the last are those that may be skipped, and how many were is returned.
    """
    _, _, _, _, inner, cut, _, listed = named
    columns, first, count, search_steps = columned
    state = no_state(H)
    skipped = 0
    if H.columns:
        if H.tiles:  # noqa: SIM102 (known at compile time; the next is not)
            # Only heads with listed tiles pay for the search; the others of the layer take the loop
            # below.
            if listed > 0:
                state = _columns(asked, state, kv, place, named, columned, H, True)
                count = 0
        state = _columns(
            asked, state, kv, place, named, (columns, first, count, search_steps), H, False
        )
    if H.skip:
        state = _own(asked, state, kv, place, H)
        state, skipped = _or_skip(asked, state, kv, place, named, bound, H)
    elif H.walk or H.tiles or H.tail:
        left = -1
        if H.keys > 64:
            whole = inner + listed - cut
            last, _ = _entry(tl.maximum(whole - 1, 0), 0, place, named, (0, 0, 0), H, False)
            left = tl.where(whole % 2 == 1, last, -1)
        state = _tiles(asked, state, kv, left, place, named, H, False)
        if H.rows == 2 or H.keys > 64 or H.window or (H.walk and H.tiles):
            state = _tiles(asked, state, kv, left, place, named, H, True)
    if not H.skip:
        state = _own(asked, state, kv, place, H)
    return state, skipped
