"""Options of headwise memory. Imports no torch, so that a wrong option is refused at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from artifacts import HeadwiseError
from artifacts.cli import arguments
from artifacts.cli.options import at_least, check_ranges, option, shared
from runtime.memory import OFFLOADS

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def bytes_of(text: str, option: str) -> int:
    """Bytes in a text such as 67108864 or 64MiB, given to a command as `option`.

    Raises:
        HeadwiseError: it is no positive number with a known unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise HeadwiseError(
            f"{option} must be a number of bytes such as 67108864 or 64MiB, got {text!r}"
        )
    return int(float(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Options of a measurement, or of a prediction with --plan."""

    config: Path | None = shared(arguments.add_artifact, nargs="?", default=None)
    model: str | None = shared(arguments.add_model, required=False, default=None)
    length: tuple[int, ...] = shared(
        arguments.add_length, "tokens of the prompts", several=True, required=True
    )
    dense: bool = option("also the model without an artifact", default=False, action="store_true")
    offload: str = option("where the cache keeps keys and values", default="auto", choices=OFFLOADS)
    plan: str | None = option(
        "only predict: config.json, a folder with one, or its JSON", default=None, metavar="SHAPE"
    )
    banked: int = option(
        "with --plan: layers whose keys and values are offloaded", default=0, within=at_least(0)
    )
    memory: int | None = option(
        "with --plan: bytes of the device, such as 139GB: which rows fit",
        default=None,
        read=lambda text: bytes_of(text, "--memory"),
    )
    dtype: str = shared(arguments.add_dtype, default="auto")
    device: str = shared(arguments.add_device, default="auto")
    revision: str | None = shared(arguments.add_revision, default=None)

    def __post_init__(self) -> None:
        check_ranges(self)
        if min(self.length) < 1:
            raise HeadwiseError(f"--length must be at least 1, got {min(self.length)}")
        if self.plan is None and (self.config is None or self.model is None):
            raise HeadwiseError(
                "name an artifact and its model with --model, or a configuration with --plan"
            )
