"""Environment of a measurement: the machine, and versions of packages."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Packages whose version a measurement depends on.
_PACKAGES = ("headwise", "torch", "transformers")
_CPUINFO = Path("/proc/cpuinfo")


def environment(device: str | torch.device = "cpu") -> dict[str, str]:
    """Describe device, instructions, cores, threads and versions for a record."""
    import torch

    return {
        "device": device_name(device),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        **versions(),
    }


def versions() -> dict[str, str]:
    """Return the version of each package that a measurement depends on."""
    return {name: version(name) for name in _PACKAGES}


def device_name(device: str | torch.device) -> str:
    """The GPU's name, or the processor's."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if os.path.exists(_CPUINFO):
        lines = (line.partition(":") for line in _CPUINFO.read_text().splitlines())
        if name := next(
            (value.strip() for key, _, value in lines if key.strip() == "model name"), ""
        ):
            return name
    return platform.processor() or platform.machine()
