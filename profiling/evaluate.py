"""headwise evaluate: accuracy and speed of artifacts vs dense attention and other methods.

The first artifact is the row `headwise`, each further one a row by the name of its file. Every
prompt under every method is a file of a ledger in the report's folder: a killed run goes on where
it was, and methods, tasks, lengths and samples can be added later without running again what is
there.

headwise evaluate cfg.yaml --model smollm2 --length 4096 8192 --text book.txt --out report/
headwise evaluate cfg.yaml other.yaml --model smollm2 --quick --out report/
headwise evaluate cfg.yaml --model smollm2 --length 8192 --speed-only --out report/
"""

from __future__ import annotations

from artifacts.cli import arguments
from artifacts.cli.command import ArgumentParser, run_command
from artifacts.cli.interrupt import while_importing
from artifacts.cli.options import add_arguments, config_of
from profiling.evaluation.config import Config


def parser() -> ArgumentParser:
    """The command line of headwise evaluate."""
    p = ArgumentParser(prog="headwise evaluate", description=__doc__)
    add_arguments(p, Config)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    command = arguments.as_typed("evaluate", argv)
    config = config_of(Config, options, command=command)
    with while_importing():
        from profiling.evaluation.measure import OUTPUT
        from profiling.evaluation.report import PAGE, markdown
        from profiling.evaluation.run import run
    record = run(config)
    print(markdown(record))
    print(f"\nwrote {config.out / PAGE} and {config.out / OUTPUT}")
    return 0


if __name__ == "__main__":
    run_command(main)
