"""Commands of other pages that want a GPU: the cost table of a search, and with a model its memory and its decode."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profiling.gpu.steps import Rows, Setting


def pieces(step: str, setting: Setting) -> list[str]:
    """See profiling.gpu.steps."""
    if step == "costs":
        return ["costs 200" if setting.small else "costs 8192 32768"]
    return ["decode", "memory"] if setting.model is not None else []


def run(piece: str, setting: Setting) -> dict[str, Any]:
    """What the command printed, and its figures.

    Raises:
        RuntimeError: it failed; the end of what it said.
    """
    name, *lengths = piece.split()
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "found.json"
        command = _command(name, lengths, setting, to)
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}: {done.stderr[-400:]}")
        found = json.loads(to.read_text()) if to.is_file() else None
    return {"command": " ".join(command), "printed": done.stdout, "found": found}


def _command(name: str, lengths: Sequence[str], setting: Setting, to: Path) -> list[str]:
    device = ["--device", setting.device]
    if name == "costs":
        small = ["--head-dims", "64", "--heads", "2/1", "--densities", "0.5", "--repeats", "1"]
        few = ["--head-dims", "128", "--heads", "32/8", "--densities", "0.06", "0.12", "0.25"]
        length = "256" if setting.small else lengths[0]
        return [
            "profiling.kernels", *device, "--out", str(to.with_suffix(".safetensors")), "--length", length,
            *(lengths[1:]), "--dtype", setting.dtype, *(small if setting.small else few),
        ]  # fmt: skip
    model = [str(setting.artifact), "--model", str(setting.model), *device, "--json", str(to)]
    if name == "decode":
        how = ["--offload", "never", "packed", "brutal", "--context", "131072"]
        small = ["--repeats", "1", "--steps", "1", "--context", "200"]
        return ["profiling.decode", *model, "--trials", "0", *(small if setting.small else how)]
    how = ["--offload", "packed", "--dense", "--length", "131072", "262144", "524288", "1048576"]
    return ["profiling.memory", *model, *(["--length", "200"] if setting.small else how)]


def lines(rows: Rows) -> list[Sequence[str]]:
    """The last line that each printed."""
    last = {name: row["printed"].strip().splitlines()[-1:] for name, row in rows.items()}
    return [("command", "said"), *((name, *(said or [""])) for name, said in last.items())]
