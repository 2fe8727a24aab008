"""What a sweep leaves behind: the fastest builds, in the cache for this machine and in print for the launch table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from artifacts.files import atomic_write
from kernels.attention import triton_tuned
from kernels.attention.triton_launch import Launch
from profiling.gpu.steps import Rows, Setting
from profiling.gpu.sweep import fastest

# A build that is faster by less may only have been lucky.
_LEAST_GAIN = 1.02


def keep(rows: Rows, facts: Mapping[str, Any], out: Path, setting: Setting) -> dict[str, Any] | None:
    """Write the fastest builds to `out` and, on a GPU, to the cache; what to print, or None without any.

    The table's own build stays where no other is clearly faster.
    """
    builds, lines = {}, []
    for row in fastest(rows).values():
        gain = row["table_seconds"] / row["seconds"]
        if row["own"] or gain < _LEAST_GAIN:
            lines.append(f"# {row['sort']}, head dim {row['dim']}: the table's build stays")
            continue
        build = Launch(**row["build"])
        builds[row["sort"], row["dim"], build.descriptors] = build
        lines.append(
            f"# {row['target']}, {row['sort']}, head dim {row['dim']}: {gain:.2f} times as fast as the table's"
        )
        lines.append(f"{row['dim']}: {build},")
    if not lines:
        return None
    written = triton_tuned.text(builds).encode()
    atomic_write(out / "launch.json", written)
    file = None
    if not setting.small:
        file = triton_tuned.path(facts["device"])
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_write(file, written)
    return {"lines": lines, "file": None if file is None else str(file)}
