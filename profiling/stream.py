"""headwise stream: perplexity over an endless text, by the cache (StreamingLLM).

    headwise stream --model smollm2 --text book.txt --tokens 20000 --out stream/

Each --policy is a cache that is fed the text, as in headwise decode: `full` keeps every token,
`streaming` first tokens and a window, `h2o` the heavy hitters and a window. `recomputed` is the
baseline: for each token a forward over the last --recompute tokens from scratch, measured at one
token in --stride. A full or streaming cache gives the same for any --chunk. Rerun a killed command
to resume: finished blocks of tokens are kept, and the caches are filled again.
"""

from __future__ import annotations

from artifacts.cli import arguments
from artifacts.cli.command import ArgumentParser, run_command
from artifacts.cli.interrupt import while_importing
from artifacts.cli.options import add_arguments, config_of
from profiling.streams.config import RECOMPUTED, StreamConfig


def parser() -> ArgumentParser:
    """The command line of headwise stream."""
    p = ArgumentParser(prog="headwise stream", description=__doc__)
    add_arguments(p, StreamConfig)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    config = config_of(StreamConfig, options, command=arguments.as_typed("stream", argv))
    with while_importing():
        from profiling.streams.report import table
        from profiling.streams.run import OUTPUT, run
    rows, record = run(config)
    print(table(rows))
    if repeats := record["settings"]["repeats"]:
        print(f"the text is shorter than the stream: it was repeated {repeats} times")
    if RECOMPUTED in config.methods:
        print(
            f"recomputed: at one token in {config.stride}; ratios are over those past the window "
            f"of {config.recompute}"
        )
    print(f"wrote {config.out / OUTPUT}")
    return 0


if __name__ == "__main__":
    run_command(main)
