"""Plain values as bytes, without pickle, for resume files; tables as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

_ARRAY = "__array__"
_JSON = "json"


def to_bytes(value: Any) -> bytes:
    """Pack JSON values with text keys and numpy arrays among them into a safetensors file.

    Raises:
        TypeError: something else is among them.
    """
    arrays: dict[str, np.ndarray] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            name = str(len(arrays))
            # safetensors writes the buffer as it lies.
            arrays[name] = np.asarray(value, dtype=value.dtype.newbyteorder("="), order="C")
            return {_ARRAY: name}
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Mapping):
            if wrong := [key for key in value if not isinstance(key, str) or key == _ARRAY]:
                raise TypeError(f"keys must be text other than {_ARRAY}, got {wrong[0]!r}")
            return {key: plain(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [plain(entry) for entry in value]
        if value is None or isinstance(value, str | int | float):
            return value
        raise TypeError(f"a value must be JSON or arrays of numbers, got {type(value).__name__}")

    from safetensors.numpy import save

    text = json.dumps(plain(value)).encode()
    data: bytes = save({_JSON: np.frombuffer(text, dtype=np.uint8), **arrays})
    return data


def from_bytes(data: bytes) -> Any:
    """Unpack to_bytes(): tuples come back as lists, numpy's numbers as Python's."""
    from safetensors.numpy import load

    arrays: dict[str, np.ndarray] = load(data)

    def read(entry: dict[str, Any]) -> Any:
        # Those that safetensors returns cannot be written to.
        if _ARRAY in entry:
            return arrays[entry[_ARRAY]].copy()
        return entry

    return json.loads(arrays[_JSON].tobytes(), object_hook=read)


def csv_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The table as text; floats have six digits, NaN is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return text.getvalue()


def _cell(value: object) -> object:
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return ""
    return f"{value:.6g}"
