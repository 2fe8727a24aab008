"""A cost table whose times are a straight line for each kind, so that a test knows what it says."""

from __future__ import annotations

from profiling.speed.cost_table import Cost, CostTable

LENGTH = 1024
_START = {"a_shape": 1e-4, "vertical_slash": 3e-4, "block_sparse": 2e-4, "dense": 1e-4}


def linear_table(
    *, device: str = "Abacus 3000", tiles: tuple[int, ...] = (10, 40, 136), factor: float = 1.0, length: int = LENGTH
) -> CostTable:
    """Of heads of dim 16 in fp32: what a kind takes to begin with, and 1 us a tile."""
    costs = [
        Cost(
            pattern=kind,
            dtype="float32",
            length=length,
            head_dim=16,
            heads=6,
            kv_heads=2,
            density=count / 136,
            tiles=6 * count,
            sparse_seconds=6 * factor * count * 1e-6,
            build_seconds=6 * factor * start,
            dense_seconds=6 * factor * 2e-3,
        )
        for kind, start in _START.items()
        for count in tiles
    ]
    return CostTable(device=device, backend="cpu", versions={"torch": "0"}, command="by hand", costs=tuple(costs))
