"""What whole layers take at least by the time model: prefills of the published sizes, and a token's attention.

The layer is that of an 8B model in bf16: 32 query heads on 8, head dim 128.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kernels.index import TILE, num_tiles
from kernels.patterns import Pattern
from profiling.gpu.builds import SORTS
from profiling.gpu.steps import Rows
from profiling.gpu.time_model import DEVICES, Device
from profiling.speed.attention_speed import paper_patterns

_HEADS, _KV_HEADS, _DIM, _BYTES = 32, 8, 128, 2
_CHOSEN = 2048


def of_builds(rows: Rows) -> dict[str, list[dict[str, Any]]]:
    """What layers take at least on each device of the model whose builds for head dim 128 are among the rows."""
    found: dict[str, list[dict[str, Any]]] = {"prefill": [], "decode": []}
    for target in DEVICES:
        pieces = {sort: f"{target} 128 attention: {name}" for name, sort in SORTS.items()}
        facts = {sort: rows[piece]["attention"].get("predicted") for sort, piece in pieces.items() if piece in rows}
        if len(facts) == len(pieces) and all(facts.values()):
            flops = {sort: each["flops"] for sort, each in facts.items()}
            layers = _prefills(flops, DEVICES[target])
            found["prefill"] += ({"target": target, **each} for each in layers)
            found["decode"] += ({"target": target, **each} for each in _decodes(DEVICES[target]))
    return found


def lines(found: Mapping[str, Sequence[dict[str, Any]]]) -> Iterator[list[Sequence[str]]]:
    """A table of the prefills and one of decode, where there are any."""
    if found["prefill"]:
        yield [
            ("device", "pattern", "tokens", "density", "a layer, at least", "bound by"),
            *(
                (
                    row["target"], row["pattern"], f"{row['tokens']:,}", f"{row['density']:.3f}",
                    f"{1e3 * row['seconds']:.2f} ms", row["bound"],
                )
                for row in found["prefill"]
            ),
        ]  # fmt: skip
        yield [
            ("device", "keys", "a token, all of them, at least", "chosen", "a token, chosen, at least"),
            *(
                (
                    row["target"], f"{row['keys']:,}", f"{1e6 * row['seconds']:.0f} us", f"{row['chosen']:,}",
                    f"{1e6 * row['chosen_seconds']:.1f} us",
                )
                for row in found["decode"]
            ),
        ]  # fmt: skip


def _tiles(pattern: Pattern) -> tuple[str, float]:
    """The sort of its heads, and the fewest tiles of keys that a row of queries far from the start computes."""
    sizes: Any = pattern
    if pattern.kind == "block_sparse":
        return "lists", float(sizes.blocks)
    if pattern.kind == "a_shape":
        return "paired", num_tiles(sizes.sink) + num_tiles(sizes.window) + 1
    return "paired", num_tiles(sizes.slash) + 1 + sizes.vertical / TILE


def _prefills(flops: Mapping[str, float], device: Device) -> Iterator[dict[str, Any]]:
    """What a layer of one pattern takes at least at 8K to 1M tokens, by the builds' most operations a second.

    flops: of "paired" and "lists" heads. Diagonals of a vertical-slash head are counted as if they lay side by side.
    """
    for length in (8192, 32_768, 131_072, 1 << 20):
        for pattern in paper_patterns():
            sort, most = _tiles(pattern)
            rows = num_tiles(length)
            tiles = sum(min(row + 1.0, most) for row in range(rows))
            computed = tiles * _HEADS * 4 * TILE * TILE * _DIM / flops[sort]
            memory = 2 * (_HEADS + _KV_HEADS) * length * _DIM * _BYTES / device.memory_bytes
            yield {
                "pattern": pattern.kind, "tokens": length, "density": 2 * tiles / (rows * (rows + 1)),
                "seconds": max(computed, memory), "bound": "memory" if memory > computed else "its loop",
            }  # fmt: skip


def _decodes(device: Device) -> Iterator[dict[str, Any]]:
    """What one token's attention of a layer takes at least, over all keys and over chosen ones: reading them once."""
    a_key = 2 * _KV_HEADS * _DIM * _BYTES
    for keys in (8192, 32_768, 131_072, 1 << 20):
        every, some = (n * a_key / device.memory_bytes for n in (keys, _CHOSEN))
        yield {"keys": keys, "seconds": every, "chosen": _CHOSEN, "chosen_seconds": some}
