"""python -m search.transfer: take an artifact over to a fine-tune of its model; search again what no longer fits."""

from __future__ import annotations

from collections.abc import Sequence

from artifacts import arguments
from artifacts.command_line import ArgumentParser, run_command
from search.transferring.run import MAX_DRIFT, Transfer, report, run

_EPILOG = """\
The patterns of the artifact run beside dense attention on the prompts that it was searched on, in the other model. A
head's drift is how much its error has grown: 0.5 is half as much again. Heads that have drifted further than
--max-drift are searched again, with the artifact's own candidates and budget; the others keep their patterns.

examples:
  python -m search.transfer cfg.yaml --model ./finetune --out finetune.yaml
  python -m search.transfer cfg.yaml --model ./finetune --out finetune.yaml --max-drift 0    whatever got worse
  python -m search.explain finetune.yaml --head 3.5
"""


def parser() -> ArgumentParser:
    """The command line of python -m search.transfer."""
    p = ArgumentParser(
        prog="python -m search.transfer",
        description="Take an artifact over to a fine-tune of its model; search again the heads that moved.",
        epilog=_EPILOG,
    )
    arguments.add_artifact(p, "artifact with its sidecar", dest="source", old="--from")
    arguments.add_model(p, "the fine-tune: hub id, local folder or GGUF file")
    arguments.add_out(p, "artifact to write")
    p.add_argument(
        "--max-drift", type=float, default=MAX_DRIFT, help="how much a head's error may grow (default %(default)s)"
    )
    arguments.add_task(p, "a task of the search that has a file: text:FILE", dest="calibration", old="--calibration")
    arguments.add_dtype(p, "(default: as searched)", default=None)
    arguments.add_device(p)
    p.add_argument("--backend", default="auto", help="attention backend (default: the fastest that serves)")
    arguments.add_revision(p)
    p.add_argument("--fresh", action="store_true", help="discard what an interrupted run left")
    p.add_argument("--no-picture", dest="picture", action="store_false", help="do not draw the pattern map")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    options["calibration"] = tuple(options["calibration"] or ())
    config = Transfer(**options, command=arguments.as_typed("search.transfer", argv))
    print(report(*run(config), config))
    return 0


if __name__ == "__main__":
    run_command(main)
