"""The cost table of a device: measured seconds, read back as a function of what an index computes.

A safetensors file of columns of one length, a row for each measurement; names, device, versions and command lie in its
metadata. docs/costs.md says what each column is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from artifacts import HeadwiseError
from artifacts.files import atomic_write
from profiling.attention_speed import Size, Speed

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One measurement, of all query heads of a layer at once; tiles and seconds are of the layer."""

    pattern: str
    dtype: str
    length: int
    head_dim: int
    heads: int
    kv_heads: int
    density: float
    tiles: int
    sparse_seconds: float
    build_seconds: float
    dense_seconds: float

    @classmethod
    def of(cls, size: Size, speed: Speed) -> Cost:
        """From a measurement of profiling.attention_speed."""
        known = asdict(size) | asdict(speed)
        return cls(**{field.name: known[field.name] for field in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """All measurements of one device and kernel backend."""

    device: str
    backend: str
    versions: dict[str, str]
    command: str
    costs: tuple[Cost, ...]

    def seconds(self, pattern: str, *, tiles: float, length: int, head_dim: int, dtype: str, heads: int) -> float:
        """Attention and index build of `heads` query heads that compute `tiles` tiles in all.

        Linear in the tiles between measurements of the nearest length (by ratio) and beyond them in proportion; the
        length is then scaled by rows, of which each costs its own tile. Seconds for one head grow with heads measured
        together, since they share K and V: the table should hold the head counts that will serve.

        Raises:
            HeadwiseError: nothing was measured for the pattern, head dim or dtype.
        """
        rows = [c for c in self.costs if (c.pattern, c.head_dim, c.dtype) == (pattern, head_dim, dtype)]
        near = self._nearest(rows, length, f"{pattern} with head dim {head_dim} in {dtype}")
        known = sorted((c.tiles / c.heads, (c.sparse_seconds + c.build_seconds) / c.heads) for c in near)
        # Tiles a head, as they would be at the measured length with the same tiles a row.
        wanted = tiles / heads * near[0].length / length
        return _line(known, wanted) * heads * length / near[0].length

    def dense_seconds(self, *, length: int, head_dim: int, dtype: str, heads: int) -> float:
        """torch's dense attention of `heads` query heads, scaled by the square of the length from the nearest one."""
        rows = [c for c in self.costs if (c.head_dim, c.dtype) == (head_dim, dtype)]
        near = self._nearest(rows, length, f"head dim {head_dim} in {dtype}")
        per_head = float(np.median([c.dense_seconds / c.heads for c in near]))
        return per_head * heads * (length / near[0].length) ** 2

    def _nearest(self, rows: Sequence[Cost], length: int, what: str) -> list[Cost]:
        if not rows:
            known = sorted({(c.pattern, c.head_dim, c.dtype) for c in self.costs})
            raise HeadwiseError(f"the cost table has no {what}; it has: {', '.join(map(str, known))}")
        best = min({c.length for c in rows}, key=lambda n: abs(np.log(n / length)))
        return [c for c in rows if c.length == best]


def _line(known: list[tuple[float, float]], at: float) -> float:
    """Piecewise linear through the points; beyond the last in proportion, before the first its value."""
    x, y = (np.array(values) for values in zip(*known, strict=True))
    if at > x[-1]:
        return float(y[-1] * at / x[-1])
    return float(np.interp(at, x, y))


def save(table: CostTable, path: Path) -> None:
    """Write the table; the file is there whole or not at all."""
    from safetensors.numpy import save as to_bytes

    columns = {field.name: [getattr(cost, field.name) for cost in table.costs] for field in fields(Cost)}
    names = {name: sorted(set(columns[name])) for name in ("pattern", "dtype")}
    arrays = {
        name: np.array([names[name].index(v) for v in values] if name in names else values)
        for name, values in columns.items()
    }
    about = {"format": FORMAT, **{f.name: getattr(table, f.name) for f in fields(table) if f.name != "costs"}, **names}
    atomic_write(path, to_bytes(arrays, metadata={"headwise": json.dumps(about)}))


def load(path: str | Path) -> CostTable:
    """Read a table.

    Raises:
        HeadwiseError: no such file, or not a cost table of this format.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise HeadwiseError(f"cost table {path} does not exist")
    try:
        with safe_open(path, framework="numpy") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {})["headwise"])
            columns = {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, KeyError, ValueError) as error:
        raise HeadwiseError(f"{path} is not a cost table: write one with python -m profiling.kernels") from error
    if about.get("format") != FORMAT or set(columns) != {field.name for field in fields(Cost)}:
        raise HeadwiseError(f"{path} is a cost table of format {about.get('format')}, this headwise reads {FORMAT}")
    for name in ("pattern", "dtype"):
        columns[name] = [about[name][i] for i in columns[name]]
    rows = zip(*columns.values(), strict=True)
    costs = tuple(Cost(**dict(zip(columns, row, strict=True))) for row in rows)
    return CostTable(costs=costs, **{name: about[name] for name in ("device", "backend", "versions", "command")})
