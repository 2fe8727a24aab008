"""python -m search.explain: why a head has the pattern that it has, from what the search wrote down."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from artifacts import HeadwiseError
from artifacts.command_line import ArgumentParser, run_command
from search.explaining.answer import report, run
from search.explaining.question import Question

_EPILOG = """\
Without --model nothing is measured: the scores are those of the search, on its own prompts.

examples:
  python -m search.explain cfg.yaml --head all                     each layer in a line
  python -m search.explain cfg.yaml --layer 3                      each head of a layer in a line
  python -m search.explain cfg.yaml --head 3.5                     what was tried for a head, and why the winner won
  python -m search.explain cfg.yaml --head 3.5 --model smollm2     and a picture: its attention, and what is missed
"""


def parser() -> argparse.ArgumentParser:
    """The command line of python -m search.explain."""
    p = ArgumentParser(
        prog="python -m search.explain", description="Say why heads have the patterns that they have.", epilog=_EPILOG
    )
    p.add_argument("file", metavar="FILE", type=Path, help="artifact, such as cfg.yaml, with its sidecar")
    which = p.add_mutually_exclusive_group(required=True)
    which.add_argument("--head", metavar="LAYER.HEAD", help="one head, or all for a line a layer")
    which.add_argument("--layer", type=int, help="the heads of a layer, a line each")
    p.add_argument("--model", help="draw the head on a prompt: hub id, local folder, GGUF file, smollm2 or gemma3")
    p.add_argument("--length", type=int, help="tokens of that prompt (default: as searched)")
    p.add_argument("--task", help="of that prompt (default: as searched)")
    p.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="of the model (default: as searched)")
    p.add_argument("--device", default="cpu")
    p.add_argument("--out", metavar="FOLDER", type=Path, help="where the picture goes (default: beside FILE)")
    p.add_argument("--json", action="store_true", help="print one JSON object in place of the text")
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    given = sys.argv[1:] if argv is None else argv
    options = vars(parser().parse_args(given))
    as_json, named = options.pop("json"), options.pop("head")
    if named not in (None, "all"):
        layer, dot, head = named.partition(".")
        if not (dot and layer.isdecimal() and head.isdecimal()):
            raise HeadwiseError(f"--head {named!r} must be LAYER.HEAD such as 3.5, or all")
        options |= {"layer": int(layer), "head": int(head)}
    answer = run(Question(**options, command=f"python -m search.explain {shlex.join(given)}"))
    print(json.dumps(answer) if as_json else report(answer))
    return 0


if __name__ == "__main__":
    run_command(main)
