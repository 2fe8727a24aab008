"""Options of headwise heatmaps. Imports no torch, so that a wrong option is refused at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from artifacts import HeadwiseError
from artifacts.cli import arguments
from artifacts.cli.options import arg, at_least, check_ranges, option, shared
from artifacts.errors import shorten
from profiling.pictures.registry import pictures
from profiling.prompts.prompt import parse_task
from profiling.similarities.config import DEFAULT_LENGTH

_PICTURES = pictures("model", "profile")
_NAMES = ", ".join(_PICTURES)
_SHORTEST = 16


def _head(text: str) -> tuple[int, int]:
    """Read `12.5`: layer and head."""
    match = re.fullmatch(r"\s*(\d+)\.(\d+)\s*", text)
    if match is None:
        raise HeadwiseError(f"--head must be layer.head, such as 12.5, got {shorten(text)}")
    return int(match[1]), int(match[2])


@dataclass(frozen=True, kw_only=True)
class Heatmaps:
    """Options of the pictures; None takes the default that depends on the rest.

    Attributes:
        head: (layer, query head).
    """

    config: Path | None = shared(
        arguments.add_artifact,
        "artifact: its pattern is drawn over a head's attention, its filter layers marked",
        nargs="?",
        default=None,
    )
    out: Path = shared(arguments.add_out, "folder for the pictures", metavar="FOLDER")
    profile: Path | None = option("folder that headwise similarity wrote", default=None)
    model: str | None = shared(arguments.add_model, required=False, default=None)
    pictures: tuple[str, ...] | None = arg(
        "--picture",
        default=None,
        action="append",
        help=f"one of {_NAMES}; repeatable (default: all that can be drawn)",
    )
    head: tuple[int, int] | None = option(
        "head whose attention is drawn, as layer.head, such as 12.5", default=None, read=_head
    )
    task: str = shared(
        arguments.add_task,
        f"prompt (default passkey); {arguments.TASKS}",
        several=False,
        default="passkey",
    )
    length: int | None = shared(
        arguments.add_length,
        f"its length in tokens (default {DEFAULT_LENGTH})",
        default=None,
        within=at_least(_SHORTEST),
    )
    seed: int = shared(arguments.add_seed, default=0)
    dtype: str = shared(arguments.add_dtype, default="auto")
    device: str = shared(arguments.add_device, default="auto")
    revision: str | None = shared(arguments.add_revision, default=None)
    command: str = ""

    def __post_init__(self) -> None:
        check_ranges(self)
        parse_task(self.task)
        if self.profile is None and self.model is None:
            raise HeadwiseError("nothing to draw from: give --profile DIR or --model M")
        for name in self.pictures or ():
            if name not in _PICTURES:
                raise HeadwiseError(f"unknown picture {shorten(name)}; known: {_NAMES}")
            if _PICTURES[name].of == "model" and (self.model is None or self.head is None):
                raise HeadwiseError(f"the picture {name!r} needs --model and --head")

    @property
    def names(self) -> list[str]:
        """Names of the pictures that are drawn."""
        can_be = [
            name
            for name, each in _PICTURES.items()
            if each.of == "profile" or (self.model is not None and self.head is not None)
        ]
        return [name for name in can_be if self.pictures is None or name in self.pictures]
