"""headwise decode: seconds a token, perplexity, accuracy and cache bytes of artifacts and caches.

headwise decode cfg.yaml --model smollm2 --context 8192 --text novel.txt --trials 20

With --policy caches that drop tokens are compared, with an artifact or without one. With
--dense-prefill texts are prefilled densely for the artifact: what decode alone loses. With --json
FILE an interrupted comparison resumes after the last method whose quality it has.

Speed is measured on a cache of random keys and values (of random tokens where it drops some),
whatever context the model was trained for; quality on prompts.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from artifacts.cli import arguments
from artifacts.cli.command import ArgumentParser, run_command
from artifacts.cli.interrupt import while_importing
from artifacts.cli.options import add_arguments, config_of
from profiling.decoding.config import Comparison


def parser() -> ArgumentParser:
    """The command line of headwise decode."""
    p = ArgumentParser(prog="headwise decode", description=__doc__)
    add_arguments(p, Comparison)
    arguments.add_json(p)
    arguments.add_fresh(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = parser().parse_args(argv)
    config = config_of(Comparison, vars(options))
    with while_importing():
        from profiling.decoding.run import run
        from profiling.decoding.table import table
        from profiling.ledger import Ledger
        from profiling.prompts.held_out import overlap_sentence
    # The resume file is next to the output file; timed rounds are always measured again.
    resumable = isinstance(options.json, Path) and options.json != arguments.STDOUT
    with (
        Ledger(options.json, "decode", fresh=options.fresh)
        if resumable
        else nullcontext() as ledger
    ):
        rows, record = run(config, ledger)
        record = {"command": arguments.as_typed("decode", argv), **record}
        lines = [
            table(rows, record["all_seconds"], config.trials),
            *(overlap_sentence(**each) for each in record["seen_by_search"]),
        ]
        arguments.deliver("\n".join(lines), record, options.json)
        if ledger is not None:
            ledger.remove()
    return 0


if __name__ == "__main__":
    run_command(main)
