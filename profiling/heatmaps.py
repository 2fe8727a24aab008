"""python -m profiling.heatmaps: pictures of what attention does, layer by layer and head by head.

layers     from a saved profile, or one measured on the model: layer x layer similarity (OmniKV, Figure 8), filtering
           ability, hit rate and variability (Figures 6a, 6b, 1c)
maps       attention of single heads, an artifact's patterns drawn over it
sparsity   of each head (H2O, Figure 2a), and with an artifact of its kernels (MInference 1.0, Figure 12)
totals     the power law of accumulated attention (H2O, Figure 2b)
sinks      logits of short sentences (StreamingLLM, Figure 2)

Each as PNG and SVG with the numbers beside it.

python -m profiling.heatmaps --profile profile/ --out pictures/
python -m profiling.heatmaps --model smollm2 --config cfg.yaml --out pictures/ --task passkey --length 4096
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

from artifacts import HeadwiseError
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


def parser() -> argparse.ArgumentParser:
    """The command line of python -m profiling.heatmaps."""
    p = ArgumentParser(prog="python -m profiling.heatmaps", description=__doc__)
    p.add_argument("--out", required=True, type=Path, help="folder for the pictures")
    p.add_argument("--profile", type=Path, help="what python -m profiling.similarity wrote")
    p.add_argument("--model", help="hub id, local folder, GGUF file, smollm2 or gemma3")
    p.add_argument(
        "--config", type=Path, help="artifact: its patterns are drawn over the maps, its filter layers marked"
    )
    p.add_argument(
        "--picture",
        dest="pictures",
        action="append",
        help=f"one of {', '.join(PICTURES)}; again for each further one (default: all that can be drawn)",
    )
    p.add_argument("--heads", help="heads of the maps as layer.head, such as 3.0,12.5 (default: a few typical ones)")
    p.add_argument("--task", default=Heatmaps.task, help=f"prompt (default passkey); known: {TASKS}")
    p.add_argument("--length", type=int, help=f"its length in tokens (default {DEFAULT_LENGTH})")
    p.add_argument("--seed", type=int, default=Heatmaps.seed)
    p.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    p.add_argument("--device", default="cpu")
    p.add_argument("--revision", help="revision of a hub model")
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    argv = sys.argv[1:] if argv is None else argv
    options = vars(parser().parse_args(argv))
    options["heads"] = None if options["heads"] is None else _heads(options["heads"])
    options["pictures"] = None if options["pictures"] is None else tuple(options["pictures"])
    for path in run(Heatmaps(**options, command="python -m profiling.heatmaps " + shlex.join(argv))):
        print(path)
    return 0


if __name__ == "__main__":
    run_command(main)
