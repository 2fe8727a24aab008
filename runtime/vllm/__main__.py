"""python -m runtime.vllm: would an artifact serve inside vLLM?"""

from __future__ import annotations

import sys

from artifacts.command_line import ArgumentParser, run_command

_EPILOG = """\
exit status:
  0  it would serve
  1  it would not, with every reason (with a traceback: a bug)
  2  bad input, said in one line

examples:
  python -m runtime.vllm check cfg.yaml --model HuggingFaceTB/SmolLM2-135M-Instruct
  python -m runtime.vllm check cfg.yaml --model ./model --tensor-parallel-size 4
"""


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run the verb and print what it gives; returns the exit status."""
    parser = ArgumentParser(
        prog="python -m runtime.vllm", description="Headwise inside vLLM: see docs/vllm.md.", epilog=_EPILOG
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    what = "would this artifact serve that model inside vLLM, and if not, why not?"
    checking = verbs.add_parser("check", help=what, description=what.capitalize(), epilog=_EPILOG)
    from runtime.vllm import check

    check.add_arguments(checking)
    given = vars(parser.parse_args(argv))
    given.pop("verb")
    outcome = check.run(check.Config(**given))
    sys.stdout.write(outcome.text)
    return outcome.status


if __name__ == "__main__":
    run_command(main)
