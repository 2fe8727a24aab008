"""Options of headwise heatmaps. Imports no torch, so that a wrong option is refused at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from artifacts import HeadwiseError
from artifacts.cli.arguments import (
    TASKS,
    ArtifactFile,
    Device,
    Dtype,
    Length,
    ModelName,
    Out,
    Revision,
    Seed,
    Task,
)
from artifacts.cli.options import Arg, CommandConfig
from artifacts.errors import shorten
from profiling.pictures.registry import pictures
from profiling.prompts.prompt import parse_task
from profiling.similarities.config import DEFAULT_LENGTH, SHORTEST

_PICTURES = pictures("model", "profile")
_NAMES = ", ".join(_PICTURES)
_SHORTEST = 16


def _head(value: Any) -> Any:
    """Read `12.5`: layer and head."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+)\.(\d+)\s*", value)
    if match is None:
        raise HeadwiseError(f"--head must be layer.head, such as 12.5, got {shorten(value)}")
    return int(match[1]), int(match[2])


Head = Annotated[tuple[int, int] | None, BeforeValidator(_head)]
"""Layer and query head, written 12.5."""


class Heatmaps(CommandConfig):
    """Options of the pictures; None takes the default that depends on the rest.

    Attributes:
        head: (layer, query head).
    """

    artifact: Annotated[
        ArtifactFile | None,
        Arg("artifact: its pattern is drawn over a head's attention, its filter layers marked"),
    ] = None
    out: Annotated[Out, Arg("folder for the pictures", metavar="FOLDER")]
    profile: Annotated[Path | None, Arg("folder that headwise similarity wrote")] = None
    model: ModelName | None = None
    pictures: Annotated[
        tuple[str, ...] | None,
        Arg(
            f"one of {_NAMES}; repeatable (default: all that can be drawn)",
            repeat=True,
            flags=("--picture",),
        ),
    ] = None
    head: Annotated[Head, Arg("head whose attention is drawn, as layer.head, such as 12.5")] = None
    task: Annotated[Task, Arg(f"prompt (default passkey); {TASKS}")] = "passkey"
    length: Annotated[
        Length | None, Arg(f"its length in tokens (default {DEFAULT_LENGTH})"), Field(ge=_SHORTEST)
    ] = None
    seed: Seed = 0
    dtype: Dtype = "auto"
    device: Device = "auto"
    revision: Revision = None
    command: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        parse_task(self.task)
        if self.profile is None and self.model is None:
            raise HeadwiseError("nothing to draw from: give --profile DIR or --model M")
        for name in self.pictures or ():
            if name not in _PICTURES:
                raise HeadwiseError(f"unknown picture {shorten(name)}; known: {_NAMES}")
            if _PICTURES[name].of == "model" and (self.model is None or self.head is None):
                raise HeadwiseError(f"the picture {name!r} needs --model and --head")
        measured = [name for name in self.names if _PICTURES[name].of == "profile"]
        if self.profile is None and measured and (self.length or SHORTEST) < SHORTEST:
            raise HeadwiseError(
                f"--length must be at least {SHORTEST} for the picture {measured[0]!r}, got "
                f"{self.length}"
            )
        return self

    @property
    def names(self) -> list[str]:
        """Names of the pictures that are drawn."""
        can_be = [
            name
            for name, each in _PICTURES.items()
            if each.of == "profile" or (self.model is not None and self.head is not None)
        ]
        return [name for name in can_be if self.pictures is None or name in self.pictures]
