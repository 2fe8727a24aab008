"""python -m profiling.heatmaps: pictures of what attention does, layer by layer and head by head.

layers     from a saved profile, or one measured on the model: layer x layer similarity (OmniKV, Figure 8), filtering
           ability, hit rate and variability (Figures 6a, 6b, 1c)
maps       attention of single heads, an artifact's patterns drawn over it
sparsity   of each head (H2O, Figure 2a), and with an artifact of its kernels (MInference 1.0, Figure 12)
totals     the power law of accumulated attention (H2O, Figure 2b)
kept       attention that later queries find in the heavy hitters and latest tokens so far, by KV head and budget
sinks      logits of short sentences (StreamingLLM, Figure 2)

Each as PNG and SVG with the numbers beside it.

python -m profiling.heatmaps --profile profile/ --out pictures/
python -m profiling.heatmaps cfg.yaml --model smollm2 --out pictures/ --task passkey --length 4096
"""

from __future__ import annotations

import re
from pathlib import Path

from artifacts import HeadwiseError, arguments
from artifacts.command_line import ArgumentParser, run_command
from artifacts.errors import shorten
from artifacts.files import check_writable, out_folder
from profiling.pictures.picture_book import PICTURES, Heatmaps, PictureBook
from profiling.prompts.prompt import TASKS
from profiling.similarities.layer_similarity import DEFAULT_LENGTH


def run(config: Heatmaps) -> list[Path]:
    """Draw into the folder `config.out` and return the files.

    Raises:
        HeadwiseError: anything that the user has to put right.
    """
    with out_folder(config.out):
        check_writable(config.out / "similarity.png")
        book = PictureBook(config)
        wanted = config.pictures or (PICTURES if config.model else ("layers",))
        return [path for name in PICTURES if name in wanted for path in getattr(book, name)()]


def _heads(text: str) -> tuple[tuple[int, int], ...]:
    """Read `3.0,12.5`: layer and head of each."""
    parts = [re.fullmatch(r"\s*(\d+)\.(\d+)\s*", part) for part in text.split(",")]
    if not all(parts):
        raise HeadwiseError(f"--heads must be layer.head, such as 3.0,12.5, got {shorten(text)}")
    return tuple((int(part[1]), int(part[2])) for part in parts if part)


def parser() -> ArgumentParser:
    """The command line of python -m profiling.heatmaps."""
    p = ArgumentParser(prog="python -m profiling.heatmaps", description=__doc__)
    arguments.add_artifact(
        p, "artifact: its patterns are drawn over the maps, its filter layers marked", nargs="?", old="--config"
    )
    arguments.add_out(p, "folder for the pictures", metavar="FOLDER")
    p.add_argument("--profile", type=Path, help="what python -m profiling.similarity wrote")
    arguments.add_model(p, required=False)
    p.add_argument(
        "--picture",
        dest="pictures",
        action="append",
        help=f"one of {', '.join(PICTURES)}; again for each further one (default: all that can be drawn)",
    )
    p.add_argument("--heads", help="heads of the maps as layer.head, such as 3.0,12.5 (default: a few typical ones)")
    arguments.add_task(p, f"prompt (default passkey); known: {TASKS}", several=False, default=Heatmaps.task)
    arguments.add_length(p, f"its length in tokens (default {DEFAULT_LENGTH})")
    arguments.add_seed(p, Heatmaps.seed)
    arguments.add_dtype(p)
    arguments.add_device(p)
    arguments.add_revision(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    options["heads"] = None if options["heads"] is None else _heads(options["heads"])
    options["pictures"] = None if options["pictures"] is None else tuple(options["pictures"])
    for path in run(Heatmaps(**options, command=arguments.as_typed("profiling.heatmaps", argv))):
        print(path)
    return 0


if __name__ == "__main__":
    run_command(main)
