"""python -m search.transfer: take an artifact over to a fine-tune of its model; search again what no longer fits."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from artifacts.command_line import ArgumentParser, run_command
from search.transferring.run import MAX_DRIFT, Transfer, report, run

_EPILOG = """\
The patterns of the artifact run beside dense attention on the prompts that it was searched on, in the other model. A
head's drift is how much its error has grown: 0.5 is half as much again. Heads that have drifted further than
--max-drift are searched again, with the artifact's own candidates and budget; the others keep their patterns.

examples:
  python -m search.transfer --from cfg.yaml --model ./finetune --out finetune.yaml
  python -m search.transfer --from cfg.yaml --model ./finetune --out finetune.yaml --max-drift 0    whatever got worse
  python -m search.explain finetune.yaml --head 3.5
"""


def parser() -> argparse.ArgumentParser:
    """The command line of python -m search.transfer."""
    p = ArgumentParser(
        prog="python -m search.transfer",
        description="Take an artifact over to a fine-tune of its model; search again the heads that moved.",
        epilog=_EPILOG,
    )
    p.add_argument("--from", dest="source", required=True, type=Path, metavar="FILE", help="artifact with its sidecar")
    p.add_argument("--model", required=True, help="the fine-tune: hub id, local folder or GGUF file")
    p.add_argument("--out", required=True, type=Path, help="artifact to write")
    p.add_argument(
        "--max-drift", type=float, default=MAX_DRIFT, help="how much a head's error may grow (default %(default)s)"
    )
    p.add_argument(
        "--calibration", action="append", metavar="TASK", help="a task of the search that has a file: text:FILE"
    )
    p.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: as searched")
    p.add_argument("--device", default="cpu")
    p.add_argument("--backend", default="auto", help="attention backend (default: the fastest that serves)")
    p.add_argument("--revision", help="revision of a hub model")
    p.add_argument("--fresh", action="store_true", help="discard what an interrupted run left")
    p.add_argument("--no-picture", dest="picture", action="store_false", help="do not draw the pattern map")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point."""
    given = sys.argv[1:] if argv is None else list(argv)
    options = vars(parser().parse_args(given))
    options["calibration"] = tuple(options["calibration"] or ())
    config = Transfer(**options, command="python -m search.transfer " + shlex.join(given))
    print(report(*run(config), config))
    return 0


if __name__ == "__main__":
    run_command(main)
