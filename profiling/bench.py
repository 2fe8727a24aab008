"""Speed of the kernels against torch's, side by side in one run, of right results only.

Prefill by torch's attention, by Headwise over every key, and by Headwise with patterns.

    headwise bench --length 4096 8192 --head-dims 64 128 --json out.json
"""

from __future__ import annotations

from artifacts.cli import arguments
from artifacts.cli.command import ArgumentParser, run_command
from artifacts.cli.interrupt import while_importing
from artifacts.cli.options import add_arguments, config_of
from profiling.speed.config import Bench


def parser() -> ArgumentParser:
    """The command line of headwise bench."""
    p = ArgumentParser(prog="headwise bench", description=__doc__)
    add_arguments(p, Bench)
    arguments.add_json(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = parser().parse_args(argv)
    config = config_of(Bench, vars(options))
    command = arguments.as_typed("bench", argv)
    with while_importing():
        from profiling.models.device import settled
        from profiling.speed.run import run
    config = settled(config)
    record = run(config, command, show=options.json != arguments.STDOUT)
    arguments.deliver_json(record, options.json)
    return 0


if __name__ == "__main__":
    run_command(main)
