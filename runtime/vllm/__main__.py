"""python -m runtime.vllm check: would an artifact serve inside vLLM, and if not, why not?"""

from __future__ import annotations

import sys

from artifacts.command_line import ArgumentParser, run_command
from runtime.vllm import check

_EPILOG = """\
exit status:
  0  it would serve
  1  a bug of ours, with a traceback
  2  bad input, said in one line
  3  it would not serve, with every reason

examples:
  python -m runtime.vllm check cfg.yaml --model HuggingFaceTB/SmolLM2-135M-Instruct
  python -m runtime.vllm check cfg.yaml --model ./model --tensor-parallel-size 4
"""
_WHAT = "would this artifact serve that model inside vLLM, and if not, why not?"


def parser() -> ArgumentParser:
    """The command line of python -m runtime.vllm."""
    p = ArgumentParser(
        prog="python -m runtime.vllm", description="Headwise inside vLLM: see docs/vllm.md.", epilog=_EPILOG
    )
    verbs = p.add_subparsers(dest="verb", metavar="VERB", required=True)
    check.add_arguments(verbs.add_parser("check", help=_WHAT, description=f"{_WHAT[0].upper()}{_WHAT[1:]}"))
    return p


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, check and print what was found; returns the exit status."""
    given = vars(parser().parse_args(argv))
    del given["verb"]
    outcome = check.run(check.Config(**given))
    sys.stdout.write(outcome.text)
    return int(outcome.status)


if __name__ == "__main__":
    run_command(main)
