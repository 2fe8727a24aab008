"""headwise stream: perplexity over a long stream, by the tokens that are kept (StreamingLLM).

streaming     sinks and a window, positions counted inside the cache; streaming:S with S sinks in as
              many tokens
window-only   the window alone, of as many tokens
recomputed    for each token a forward over the last tokens, from scratch: measured at one
              token in --stride
dense         everything is kept
original      sinks and a window, positions as they are in the text

Feeding --chunk tokens at a time gives what one by one gives. A killed run goes on where it was:
each finished block of tokens is kept, and the cache is fed again up to there.

headwise stream --model smollm2 --text book.txt --tokens 20000 --out stream/
headwise stream --model smollm2 --text book.txt --tokens 1000000 --methods streaming --out stream/
headwise stream --model gemma3 --task stream_eval --tokens 20000 --out eval/
"""

from __future__ import annotations

from artifacts.cli import arguments
from artifacts.cli.command import ArgumentParser, run_command
from artifacts.cli.interrupt import while_importing
from artifacts.cli.options import add_arguments, config_of
from profiling.streams.config import Streamed


def parser() -> ArgumentParser:
    """The command line of headwise stream."""
    p = ArgumentParser(prog="headwise stream", description=__doc__)
    add_arguments(p, Streamed)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    config = config_of(Streamed, options, command=arguments.as_typed("stream", argv))
    with while_importing():
        from profiling.streams.report import report
        from profiling.streams.run import run
    rows, record = run(config)
    print(report(config, rows, record))
    print(f"wrote {config.out / 'stream.json'}, .csv, .png and .svg")
    return 0


if __name__ == "__main__":
    run_command(main)
