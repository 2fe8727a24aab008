"""headwise plot: a picture of an artifact.

patterns     kind of each head's pattern (color) and its recall (shade)

    headwise plot cfg.yaml --out cfg
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from artifacts import HeadwiseError, load_pair
from artifacts.cli import arguments
from artifacts.cli.command import ArgumentParser, run_command
from artifacts.cli.options import add_arguments, config_of, option, shared
from artifacts.errors import one_line
from artifacts.files import check_writable
from profiling.pictures.registry import Source, pictures

_PICTURES = pictures("artifact")
_SUFFIXES = (".png", ".svg", ".csv")


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Options of a picture."""

    config: Path = shared(arguments.add_artifact)
    out: Path = shared(
        arguments.add_out, "stem of the .png, .svg and .csv to write", metavar="STEM"
    )
    picture: str = option(
        "what to draw (default patterns)", default="patterns", choices=tuple(_PICTURES)
    )


def run(config: Plot) -> list[Path]:
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


def parser() -> ArgumentParser:
    """The command line of headwise plot."""
    p = ArgumentParser(prog="headwise plot", description=__doc__)
    add_arguments(p, Plot)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    for path in run(config_of(Plot, vars(parser().parse_args(argv)))):
        print(one_line(str(path)))
    return 0


if __name__ == "__main__":
    run_command(main)
