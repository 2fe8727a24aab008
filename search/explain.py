"""python -m search.explain: why a head has the pattern that it has, from what the search wrote down."""

from __future__ import annotations

from artifacts import HeadwiseError, arguments
from artifacts.command_line import ArgumentParser, run_command
from artifacts.options import add_arguments, config_of
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


def parser() -> ArgumentParser:
    """The command line of python -m search.explain."""
    p = ArgumentParser(
        prog="python -m search.explain", description="Say why heads have the patterns that they have.", epilog=_EPILOG
    )
    which = p.add_mutually_exclusive_group(required=True)
    which.add_argument("--head", metavar="LAYER.HEAD", help="one head, or all for a line a layer")
    which.add_argument("--layer", type=int, help="the heads of a layer, a line each")
    add_arguments(p, Question)
    arguments.add_json(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    to_json, named = options.pop("json"), options.pop("head")
    if named not in (None, "all"):
        layer, dot, head = named.partition(".")
        if not (dot and layer.isdecimal() and head.isdecimal()):
            raise HeadwiseError(f"--head {named!r} must be LAYER.HEAD such as 3.5, or all")
        options |= {"layer": int(layer), "head": int(head)}
    answer = run(config_of(Question, options, command=arguments.as_typed("search.explain", argv)))
    arguments.deliver(report(answer), answer, to_json)
    return 0


if __name__ == "__main__":
    run_command(main)
