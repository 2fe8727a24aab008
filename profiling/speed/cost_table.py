"""The cost table of a device: measured seconds, read back as a function of what an index computes.

A safetensors file of columns of one length, a row for each measurement; names, device, versions and
command lie in its metadata. An artifact carries the same columns in its sidecar. docs/artifact.md
says what each column is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from artifacts import Artifact, DeviceCosts, HeadwiseError
from artifacts.errors import shorten
from artifacts.files import atomic_write
from artifacts.store.arrays import columns
from profiling.speed.attention_speed import Speed
from profiling.speed.config import Size

FORMAT = 1
_NAMED = ("pattern", "dtype")
_ABOUT = ("device", "backend", "versions", "command")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One measurement, of all query heads of a layer at once; tiles and seconds are of the layer.

    Attributes:
        dense_seconds: of Headwise's kernel over every key, in the same rounds: by it a machine that
            became slower is known.
    """

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
        """From a measurement of profiling.speed.attention_speed."""
        known = asdict(size) | asdict(speed) | {"dense_seconds": speed.kernel_seconds}
        return cls(**{field.name: known[field.name] for field in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """All measurements of one device and kernel backend."""

    device: str
    backend: str
    versions: dict[str, str]
    command: str
    costs: tuple[Cost, ...]

    def seconds(
        self, pattern: str, *, tiles: float, length: int, head_dim: int, dtype: str, heads: int
    ) -> float:
        """Attention and index build of `heads` query heads that compute `tiles` tiles in all.

        Linear in the tiles between measurements of the nearest length (by ratio) and beyond them in
        proportion; the length is then scaled by rows, of which each costs its own tile. Seconds for
        one head grow with heads measured together, since they share K and V: the table should hold
        the head counts that will serve.

        Raises:
            HeadwiseError: nothing was measured for the pattern, head dim or dtype.
        """
        x, y = self.line(pattern, length=length, head_dim=head_dim, dtype=dtype)
        at = tiles / heads
        if at > x[-1]:
            seconds = y[-1] * at / x[-1]
        else:
            seconds = np.interp(at, x, y)
        return heads * float(seconds)

    def line(
        self, pattern: str, *, length: int, head_dim: int, dtype: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read one head's measurements: ascending tiles and their seconds at `length` tokens.

        From the nearest length by ratio: seconds and tiles both go with the rows, for the same
        tiles a row.

        Raises:
            HeadwiseError: nothing was measured for the pattern, head dim or dtype.
        """
        rows = [
            c for c in self.costs if (c.pattern, c.head_dim, c.dtype) == (pattern, head_dim, dtype)
        ]
        near = self._nearest(rows, length, f"{pattern} with head dim {head_dim} in {dtype}")
        known = sorted(
            (c.tiles / c.heads, (c.sparse_seconds + c.build_seconds) / c.heads) for c in near
        )
        x, y = (np.array(values) * length / near[0].length for values in zip(*known, strict=True))
        return x, y

    def dense_seconds(self, *, length: int, head_dim: int, dtype: str, heads: int) -> float:
        """Seconds of the dense kernel, from the nearest length by the square of both."""
        rows = [c for c in self.costs if (c.head_dim, c.dtype) == (head_dim, dtype)]
        near = self._nearest(rows, length, f"head dim {head_dim} in {dtype}")
        per_head = float(np.median([c.dense_seconds / c.heads for c in near]))
        return per_head * heads * (length / near[0].length) ** 2

    def _nearest(self, rows: Sequence[Cost], length: int, measurement: str) -> list[Cost]:
        if not rows:
            known = sorted({(c.pattern, c.head_dim, c.dtype) for c in self.costs})
            held = ", ".join(map(str, known)) or "nothing"
            raise HeadwiseError(f"the cost table has no {measurement}; it has: {held}")
        best = min({c.length for c in rows}, key=lambda n: abs(np.log(n / length)))
        return [c for c in rows if c.length == best]


def save(table: CostTable, path: Path) -> None:
    """Write the table; the file is there whole or not at all."""
    from safetensors.numpy import save as to_bytes

    names, arrays = _columns(table)
    about = {
        "format": FORMAT,
        **{f.name: getattr(table, f.name) for f in fields(table) if f.name != "costs"},
        **names,
    }
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
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, KeyError, ValueError) as error:
        raise HeadwiseError(
            f"{path} is not a cost table: write one with headwise bench --costs"
        ) from error
    if about.get("format") != FORMAT:
        raise HeadwiseError(
            f"{path} is a cost table of format {about.get('format')}, this headwise reads {FORMAT}"
        )
    costs = _rows({name: about[name] for name in _NAMED}, arrays, str(path))
    return CostTable(costs=costs, **{name: about[name] for name in _ABOUT})


def embed(
    tables: Sequence[CostTable], *, optimised: CostTable | None = None
) -> tuple[tuple[DeviceCosts, ...], dict[str, np.ndarray]]:
    """The tables as an artifact carries them: its section `costs`, and the arrays for its sidecar.

    Args:
        optimised: the one of them that the search's objective is made of, where it counts seconds.
    """
    section = []
    arrays = dict[str, np.ndarray]()
    for number, table in enumerate(tables):
        names, columns = _columns(table)
        section.append(
            DeviceCosts(
                **{name: getattr(table, name) for name in _ABOUT},
                optimised=table is optimised,
                patterns=tuple(names["pattern"]),
                dtypes=tuple(names["dtype"]),
            )
        )
        arrays |= {f"cost.{number}.{name}": column for name, column in columns.items()}
    return tuple(section), arrays


def embedded(artifact: Artifact, arrays: Mapping[str, np.ndarray]) -> tuple[CostTable, ...]:
    """The tables that an artifact carries, in the order of its section `costs`.

    Raises:
        HeadwiseError: the sidecar's arrays are not those of the section.
    """
    tables = []
    for number, entry in enumerate(artifact.costs):
        names = {"pattern": list(entry.patterns), "dtype": list(entry.dtypes)}
        costs = _rows(names, columns(arrays, number), f"costs[{number}]")
        tables.append(CostTable(costs=costs, **{name: getattr(entry, name) for name in _ABOUT}))
    return tuple(tables)


def attach(
    artifact: Artifact, arrays: Mapping[str, np.ndarray], table: CostTable
) -> tuple[Artifact, dict[str, np.ndarray]]:
    """Put one device's table into the artifact, in place of an older one of that device.

    Raises:
        HeadwiseError: the search's objective is made of that device's table, so it has to stay.
    """
    tables = dict(
        zip(
            ((t.device, t.backend) for t in artifact.costs), embedded(artifact, arrays), strict=True
        )
    )
    counted = {(t.device, t.backend) for t in artifact.costs if t.optimised}
    key = table.device, table.backend
    if key in counted:
        raise HeadwiseError(
            f"the artifact is optimised for {shorten(table.device)} by the table that it carries: "
            f"that one stays; "
            "search again to use another"
        )
    tables[key] = table
    section, own = embed(
        list(tables.values()), optimised=next((tables[key] for key in counted), None)
    )
    rest = {name: array for name, array in arrays.items() if not name.startswith("cost.")}
    return artifact.model_copy(update={"costs": section}), {**rest, **own}


def _columns(table: CostTable) -> tuple[dict[str, list[str]], dict[str, np.ndarray]]:
    """The names that numbers in the columns `pattern` and `dtype` stand for, and the columns."""
    values = {
        field.name: [getattr(cost, field.name) for cost in table.costs] for field in fields(Cost)
    }
    names = {name: sorted(set(values[name])) for name in _NAMED}
    return names, {
        name: np.array([names[name].index(v) for v in column] if name in names else column)
        for name, column in values.items()
    }


def _rows(
    names: Mapping[str, Sequence[str]], arrays: Mapping[str, np.ndarray], where: str
) -> tuple[Cost, ...]:
    wanted = [field.name for field in fields(Cost)]
    if sorted(arrays) != sorted(wanted):
        raise HeadwiseError(
            f"{where}: a cost table has the columns {', '.join(wanted)}, "
            f"got {', '.join(arrays) or 'none'}"
        )
    values = {name: arrays[name].tolist() for name in wanted}
    for name in _NAMED:
        if wrong := [at for at in values[name] if at not in range(len(names[name]))]:
            raise HeadwiseError(
                f"{where}: the column {name} names entry {wrong[0]!r} of {len(names[name])}"
            )
        values[name] = [names[name][int(at)] for at in values[name]]
    return tuple(
        Cost(**dict(zip(wanted, row, strict=True))) for row in zip(*values.values(), strict=True)
    )
