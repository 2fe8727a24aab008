"""headwise heatmaps: pictures of what attention does, layer by layer and head by head.

layers     from a saved profile, or one measured on the model: layer x layer similarity (OmniKV,
           Figure 8), filtering ability, hit rate and variability (Figures 6a, 6b, 1c)
maps       attention of single heads, an artifact's patterns drawn over it
sparsity   of each head (H2O, Figure 2a), and with an artifact of its kernels (MInference 1.0,
           Figure 12)

Each as PNG and SVG with the numbers beside it.

headwise heatmaps --profile profile/ --out pictures/
headwise heatmaps cfg.yaml --model smollm2 --out pictures/ --task passkey --length 4096
"""

from __future__ import annotations

from artifacts.cli import arguments
from artifacts.cli.command import ArgumentParser, run_command
from artifacts.cli.interrupt import while_importing
from artifacts.cli.options import add_arguments, config_of
from profiling.pictures.config import Heatmaps


def parser() -> ArgumentParser:
    """The command line of headwise heatmaps."""
    p = ArgumentParser(prog="headwise heatmaps", description=__doc__)
    add_arguments(p, Heatmaps)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    command = arguments.as_typed("heatmaps", argv)
    config = config_of(Heatmaps, options, command=command)
    with while_importing():
        from profiling.pictures.picture_book import run
    for path in run(config):
        print(path)
    return 0


if __name__ == "__main__":
    run_command(main)
