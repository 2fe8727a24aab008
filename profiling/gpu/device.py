"""Which device and versions there are, and what the device reaches: memory traffic and a matrix product."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from profiling.gpu.steps import Rows, Setting
from profiling.speed.latency import in_turn, medians

_PACKAGES = ("torch", "triton", "transformers", "numpy", "flashinfer-python", "vllm")


def pieces(step: str, setting: Setting) -> list[str]:
    """See profiling.gpu.steps."""
    return ["facts", "copy", "product"]


def run(piece: str, setting: Setting) -> dict[str, Any]:
    """The facts, or a rate in units a second."""
    if piece == "facts":
        return facts(setting)
    n = 256 if setting.small else 8192
    dtype = getattr(torch, setting.dtype)
    a, b = (torch.randn(n, n, device=setting.device).to(dtype) for _ in range(2))
    if piece == "copy":
        # Larger than any cache of the second level.
        a = torch.empty((1 if setting.small else 2048) * 2**20, dtype=torch.uint8, device=setting.device)
        b = torch.empty_like(a)
        taken = medians(in_turn({"": lambda: b.copy_(a)}, repeats=5, device=setting.device))[""]
        return {"what": "copied, read and written", "rate": 2 * a.numel() / taken, "unit": "B/s"}
    taken = medians(in_turn({"": lambda: a @ b}, repeats=5, device=setting.device))[""]
    return {"what": f"product of {n} x {n} matrices", "rate": 2 * n**3 / taken, "unit": "FLOP/s"}


def facts(setting: Setting) -> dict[str, Any]:
    """Name, capability, memory and versions.

    Raises:
        RuntimeError: torch finds no such device.
    """
    device = torch.device(setting.device)
    found: dict[str, Any] = {"device": "cpu (a rehearsal)", "python": platform.python_version()}
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError("torch finds no GPU; --rehearse runs the same on the CPU")
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda or torch.version.hip,
        }
    return found | {name: _version(name) for name in _PACKAGES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def lines(rows: Rows) -> list[Sequence[str]]:
    """See profiling.gpu.steps."""
    rates = [row for row in rows.values() if "rate" in row]
    return [("what", "rate"), *((row["what"], f"{row['rate'] / 1e12:.2f} T{row['unit']}") for row in rates)]
