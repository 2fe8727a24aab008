"""Options of headwise heatmaps. Imports no torch, so that a wrong option is refused at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from artifacts import HeadwiseError
from artifacts.cli import arguments
from artifacts.cli.options import arg, at_least, check_ranges, option, shared
from artifacts.errors import shorten
from profiling.prompts.prompt import parse_task
from profiling.similarities.config import DEFAULT_LENGTH

PICTURES = ("layers", "maps", "sparsity")
_SHORTEST = 16


def _heads(text: str) -> tuple[tuple[int, int], ...]:
    """Read `3.0,12.5`: layer and head of each."""
    parts = [re.fullmatch(r"\s*(\d+)\.(\d+)\s*", part) for part in text.split(",")]
    if not all(parts):
        raise HeadwiseError(f"--heads must be layer.head, such as 3.0,12.5, got {shorten(text)}")
    return tuple((int(part[1]), int(part[2])) for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class Heatmaps:
    """Options of the pictures; None takes the default that depends on the rest.

    Attributes:
        heads: (layer, head) of the maps.
    """

    config: Path | None = shared(
        arguments.add_artifact,
        "artifact: its patterns are drawn over the maps, its filter layers marked",
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
        help=f"one of {', '.join(PICTURES)}; repeatable (default: all that can be drawn)",
    )
    heads: tuple[tuple[int, int], ...] | None = option(
        "heads of the maps as layer.head, such as 3.0,12.5 (default: a few typical ones)",
        default=None,
        read=_heads,
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
            if name not in PICTURES:
                raise HeadwiseError(
                    f"unknown picture {shorten(name)}; known: {', '.join(PICTURES)}"
                )
            if self.model is None and name != "layers":
                raise HeadwiseError(
                    f"the picture {name!r} needs --model: a profile has no single heads"
                )
