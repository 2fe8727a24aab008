"""Builds that were timed on this machine's GPU: they take the place of triton_launch's table, which nobody has timed.

python -m profiling.gpu_report times them and writes the file; one of other kernels, Triton or device is not looked at.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch

from kernels.attention.triton_launch import Launch, choose
from kernels.dispatch import say_once
from kernels.native.build import cache_folder

# "paired" or "lists", a head dim, and whether it reads by descriptors -> the fastest build.
Builds = Mapping[tuple[str, int, bool], Launch]


def best(device: torch.device, target: str, *, dim: int, itemsize: int, has_tiles: bool, bulk: bool) -> Launch:
    """The build that was the fastest on this device, for the next head dim that was timed; else the table's.

    bulk: whether descriptors can be made of keys and values. A build with them is kept only where it is the faster.
    """
    if timed(device, itemsize):
        sort = "lists" if has_tiles else "paired"
        fitting = [
            (at, not described, build)
            for (kind, at, described), build in _timed(torch.cuda.get_device_name(device)).items()
            if kind == sort and dim <= at < 2 * dim and bulk >= described
        ]
        if fitting:
            return min(fitting, key=lambda each: each[:2])[2]
    return choose(target, dim=dim, itemsize=itemsize, has_tiles=has_tiles)


def timed(device: torch.device, itemsize: int) -> bool:
    """Whether any build was timed on this device."""
    return device.type == "cuda" and itemsize == 2 and bool(_timed(torch.cuda.get_device_name(device)))


def path(device_name: str) -> Path:
    """Where a device's builds are kept; RuntimeError where the user has no home."""
    return cache_folder() / f"launch-{re.sub('[^a-z0-9]+', '-', device_name.lower())}.json"


def text(builds: Builds) -> str:
    """The file's content."""
    entries = [{"heads": sort, "dim": dim, **asdict(build)} for (sort, dim, _), build in sorted(builds.items())]
    return json.dumps({**_made_with(), "builds": entries}, indent=1) + "\n"


@functools.cache
def _timed(device_name: str) -> Builds:
    try:
        return read(path(device_name))
    except (FileNotFoundError, RuntimeError):
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        say_once("the timed builds of triton", f"{path(device_name)}: {error}")
        return {}


def read(file: Path) -> Builds:
    """What a file holds; nothing where it is of other kernels or another Triton. ValueError for what is no build."""
    found = json.loads(file.read_text())
    if any(found.get(name) != value for name, value in _made_with().items()):
        return {}
    builds = {}
    for entry in found["builds"]:
        sort, dim = entry.pop("heads"), entry.pop("dim")
        build = Launch(**entry)
        fits = build.keys in (16, 32, 64, 128) and build.warps in (4, 8) and 1 <= build.stages <= 8
        if not fits or build.rows not in ((1,) if sort == "lists" else (1, 2)):
            raise ValueError(f"it holds {entry}, which is no build for {sort}")
        builds[sort, int(dim), build.descriptors] = build
    return builds


@functools.cache
def _made_with() -> dict[str, str]:
    rooms = ("triton_step.py", "triton_loops.py", "triton_kernel.py")
    source = b"".join(Path(__file__).with_name(room).read_bytes() for room in rooms)
    return {"kernel": hashlib.sha256(source).hexdigest()[:16], "triton": version("triton")}
