"""What was measured on this machine, kept in the cache folder: a small file for each thing, for this user alone."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernels import dispatch
from kernels.native.build import cache_folder

_log = logging.getLogger("headwise")


def folder() -> Path:
    """Where measurements are kept; HEADWISE_CACHE moves it."""
    try:
        return cache_folder().parent / "dense"
    except RuntimeError:
        # Of a user without a home nothing is kept.
        return Path(os.devnull)


def file_of(device: torch.device, *what: object) -> Path:
    """The file of what was measured on this machine with this number of threads, these kernels and this torch."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    all_of_it = (name, torch.__version__, torch.get_num_threads(), *map(str, what), _sources())
    return folder() / f"{hashlib.sha256(repr(all_of_it).encode()).hexdigest()[:24]}.json"


def read(file: Path) -> dict[str, Any] | None:
    """What a file says; None where there is none that can be understood."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write(file: Path, found: dict[str, Any]) -> None:
    """Keep a measurement, whole or not at all; a folder that takes none costs a measurement in the next process."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "w") as new:
            new.write(json.dumps(found) + "\n")
        os.replace(beside, file)
    except (OSError, RuntimeError) as error:
        _log.info("the measurement cannot be kept: %s", error)


def wait(device: torch.device) -> None:
    """Until the device has done what it was given, as a clock wants it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@cache
def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    told = dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features")))
    return "\n".join((platform.machine(), *told))


@cache
def _sources() -> str:
    """A hash of the kernels' code: another kernel is measured again."""
    digest = hashlib.sha256()
    kernels = Path(dispatch.__file__).parent
    for file in sorted((*kernels.glob("attention/*"), *kernels.glob("patterns/*"), *kernels.glob("native/*.h"))):
        if file.suffix in (".py", ".cpp", ".h"):
            digest.update(file.read_bytes())
    return digest.hexdigest()
