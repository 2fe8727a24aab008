"""What was measured on this machine, kept in the cache folder: a small file for each thing, for this user alone."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from functools import cache
from importlib.metadata import PackageNotFoundError, version
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
    """The file of what was measured on this machine with so many threads, these kernels, this torch and this Triton."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    kernels = sources_of(Path(dispatch.__file__).parent)
    all_of_it = (name, torch.__version__, triton(), torch.get_num_threads(), *map(str, what), kernels)
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
def triton() -> str | None:
    """The version of Triton, which compiles kernels; None where there is none."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


@cache
def sources_of(kernels: Path) -> str:
    """A hash of all code in the kernels' folder, with how it is compiled: another kernel is measured again."""
    digest = hashlib.sha256()
    for file in sorted(kernels.rglob("*")):
        if file.suffix in (".py", ".cpp", ".h"):
            digest.update(file.read_bytes())
    return digest.hexdigest()
