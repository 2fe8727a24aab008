"""headwise plot: a picture of an artifact.

frontier     seconds to the first token against correct answers lost, of the search's budgets

patterns     kind of each head's pattern (color) and its recall (shade)

candidates   of --head: loss of each candidate of the search by its cost, the chosen one marked

    headwise plot cfg.yaml --out cfg
    headwise plot cfg.yaml --picture patterns --out patterns
    headwise plot cfg.yaml --head 3.5 --out head
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import model_validator

from artifacts import Artifact, HeadwiseError, load_pair
from artifacts.cli.arguments import ArtifactFile, Out
from artifacts.cli.options import Arg, CommandConfig
from artifacts.errors import one_line
from artifacts.files import check_writable
from profiling.pictures.registry import Head, Source, pictures

_PICTURES = pictures("artifact")
_SUFFIXES = (".png", ".svg", ".csv")


class Config(CommandConfig):
    """Options of a picture; None takes candidates with a head, else the frontier or patterns."""

    artifact: ArtifactFile
    out: Annotated[Out, Arg("stem of the .png, .svg and .csv to write", metavar="STEM")]
    picture: Annotated[
        str | None,
        Arg(
            "what to draw (default candidates with --head, else the frontier, or the patterns of "
            "an artifact that has none)",
            choices=tuple(_PICTURES),
        ),
    ] = None
    head: Annotated[Head, Arg("head, as layer.head, such as 12.5")] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        is_of_head = self.picture in (None, "candidates")
        if (self.head is not None and not is_of_head) or (
            self.picture == "candidates" and self.head is None
        ):
            raise HeadwiseError("--head goes with the picture candidates, which needs it")
        return self

    def name(self, artifact: Artifact) -> str:
        """Name of the picture that is drawn of an artifact."""
        if self.picture is not None:
            return self.picture
        if self.head is not None:
            return "candidates"
        if artifact.search is not None and artifact.search.frontier:
            return "frontier"
        return "patterns"


def run(config: Config) -> int:
    """Draw the picture, and print its files."""
    for path in draw(config):
        print(one_line(str(path)))
    return 0


def draw(config: Config) -> list[Path]:
    """Draw the picture and return its files.

    Raises:
        HeadwiseError: the artifact cannot be read, or a file cannot be written.
    """
    artifact, arrays = load_pair(config.artifact)
    stem = config.out
    if not stem.name:
        raise HeadwiseError(
            "--out: give the stem of the .png, .svg and .csv, such as maps/cfg, got nothing"
        )
    # --out maps/cfg.png means the stem maps/cfg; a dot elsewhere belongs to the name.
    if stem.suffix in _SUFFIXES:
        stem = stem.with_suffix("")
    for suffix in _SUFFIXES:
        check_writable(stem.with_name(stem.name + suffix))
    source = Source(artifact=artifact, arrays=arrays, head=config.head)
    drawings = _PICTURES[config.name(artifact)].draw(source)
    return [path for drawing in drawings for path in drawing.write(stem)]
