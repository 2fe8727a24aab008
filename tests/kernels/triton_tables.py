"""Tables of the attention kernel against their definition, one query tile at a time."""

from __future__ import annotations

import itertools

import torch

from kernels.attention import triton
from kernels.index import PAD, SparseIndex, no_lists, num_tiles
from kernels.triton_calls import run_calls

LENGTH = 500
DIAGONALS = [[0], [0, 1, 2], [0, 2, 3, 5], [0, 1, 7], list(range(8))]
COLUMNS = [[0, 1, 70, 300], [5], [0, 63, 64, 127, 128, 200, 449], [], [3, 500]]
TABLES = {
    f"tables, {rows} query tiles, window {window}": (rows, window)
    for rows, window in itertools.product((1, 2), (None, 1, 65, 66, 200, 300))
}


def _padded(rows: list[list[int]]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[row + [PAD] * (width - len(row)) for row in rows]], dtype=torch.int32)


def tables_error(name: str, device: torch.device) -> tuple[float, float]:
    """Entries of the walk, and counts of columns, that are wrong."""
    rows, window = TABLES[name]
    n = num_tiles(LENGTH)
    index = SparseIndex(
        q_len=LENGTH,
        k_len=LENGTH,
        diagonals=_padded(DIAGONALS).to(device),
        **no_lists(1, len(DIAGONALS), n, device=device),
        columns=_padded(COLUMNS).to(device),
        window=window,
    )
    call = triton.tables(index, rows, window)
    run_calls([call], device, "tables")
    width, reach = call.arguments["walk_width"], index.reach
    made = call.arguments["tables"].cpu()[0].split([4 * width, 6 * (n + 1), n + 1], dim=-1)
    wrong, miscounted = 0, 0
    for walk, counts, held, diagonals, columns in zip(*made, DIAGONALS, COLUMNS, strict=True):
        seen = [d for d in diagonals if d <= reach]
        wrong += held.nonzero().flatten().tolist() != seen
        counted = counts.view(6, n + 1).tolist()
        unbroken = next(i for i, d in enumerate([*seen, PAD]) if i != d)
        for at in range(n):
            found: dict[int, list[tuple[int, bool]]] = {}
            for sort, wants in ((0, (0, 1)), (1, (0,)), (2, (1,)), (3, (0, 1)))[
                :: 3 if rows == 1 else 1
            ]:
                for e in walk.view(4, width)[sort, : counted[sort][at]].tolist():
                    for half in wants[:rows]:
                        found.setdefault(half, []).append((e, sort == 0))
            for half in range(rows):
                # Up to the last key that a window leaves to the program's last query no mask is
                # needed.
                whole = n if window is None else (window - 64 * rows) // 64
                entries = [(d - half, d - half <= whole) for d in seen if half < d <= at + half]
                both = {d for d in seen if rows == 1 or d + 1 - 2 * half in seen}
                expected = [(e, uncut and e + half in both) for e, uncut in entries]
                wrong += sorted(found.get(half, [])) != expected
            miscounted += counted[4][at] != sum(c // 64 <= at - unbroken for c in columns)
            miscounted += counted[5][at] != sum(c // 64 < at - reach for c in columns)
    return float(wrong), float(miscounted)
