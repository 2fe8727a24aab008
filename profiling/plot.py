"""headwise plot: a picture of an artifact.

patterns     kind of each head's pattern (color) and its recall (shade)

    headwise plot cfg.yaml --out cfg
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from artifacts import HeadwiseError, load_pair
from artifacts.cli.arguments import ArtifactFile, Out
from artifacts.cli.options import Arg, CommandConfig
from artifacts.errors import one_line
from artifacts.files import check_writable
from profiling.pictures.registry import Source, pictures

_PICTURES = pictures("artifact")
_SUFFIXES = (".png", ".svg", ".csv")


class Config(CommandConfig):
    """Options of a picture."""

    config: ArtifactFile
    out: Annotated[Out, Arg("stem of the .png, .svg and .csv to write", metavar="STEM")]
    picture: Annotated[str, Arg("what to draw (default patterns)", choices=tuple(_PICTURES))] = (
        "patterns"
    )


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
    artifact, arrays = load_pair(config.config)
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
    source = Source(artifact=artifact, arrays=arrays)
    drawings = _PICTURES[config.picture].draw(source)
    return [path for drawing in drawings for path in drawing.write(stem)]
