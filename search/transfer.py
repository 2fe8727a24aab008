"""python -m search.transfer: take an artifact over to a fine-tune of its model; search again what no longer fits."""

from __future__ import annotations

from collections.abc import Sequence

from artifacts import arguments
from artifacts.command_line import ArgumentParser, run_command
from artifacts.options import add_arguments, config_of
from search.transferring.run import Transfer, report, run

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
    add_arguments(p, Transfer)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    config = config_of(Transfer, options, command=arguments.as_typed("search.transfer", argv))
    print(report(*run(config), config))
    return 0


if __name__ == "__main__":
    run_command(main)
