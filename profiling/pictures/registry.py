"""Registry of pictures: each is one function that yields drawings, registered by `@picture`.

`headwise heatmaps` draws those of a profile and of a model, `headwise plot` those of an artifact.
Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator

from artifacts import Artifact, HeadwiseError
from artifacts.errors import shorten
from profiling.pictures.drawing import save, save_table
from profiling.similarities.similarity_profile import Profile

if TYPE_CHECKING:
    from profiling.models.loading import LoadedModel
    from profiling.prompts.prompt import Prompt

Origin = Literal["artifact", "model", "profile"]


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


@dataclass(frozen=True, eq=False, kw_only=True)
class Source:
    """The sources of pictures; an absent one is None.

    Attributes:
        command: the command line, for captions.
        artifact: an artifact.
        arrays: of its sidecar.
        profile: a similarity profile.
        loaded: a model.
        prompt: for the model.
        prompt_name: its task, length and seed.
        head: layer and query head.
    """

    command: str = ""
    artifact: Artifact | None = None
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    profile: Profile | None = None
    loaded: LoadedModel | None = None
    prompt: Prompt | None = None
    prompt_name: str = ""
    head: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Drawing:
    """One figure and its numbers.

    Attributes:
        name: of its files, without a suffix.
        figure: a matplotlib figure.
        header: columns of the numbers.
        rows: the numbers.
    """

    name: str
    figure: Any
    header: Sequence[str]
    rows: Iterable[Sequence[object]]

    def write(self, stem: Path) -> list[Path]:
        """Write STEM.png, STEM.svg and STEM.csv."""
        return [*save(self.figure, stem), save_table(stem, self.header, self.rows)]


Draw = Callable[[Source], Iterator[Drawing]]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A registered picture.

    Attributes:
        of: kind of its source.
        draw: the function.
    """

    of: Origin
    draw: Draw


_PICTURES: dict[str, Picture] = {}


def picture(*, of: Origin) -> Callable[[Draw], Draw]:
    """Register a function as the picture of its name."""

    def register(draw: Draw) -> Draw:
        _PICTURES[draw.__name__] = Picture(of=of, draw=draw)
        return draw

    return register


def pictures(*of: Origin) -> dict[str, Picture]:
    """Return the pictures that are drawn from one of these, by name."""
    for module in iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")
    in_order = sorted(_PICTURES, key=lambda name: _PICTURES[name].draw.__module__)
    return {name: _PICTURES[name] for name in in_order if _PICTURES[name].of in of}
