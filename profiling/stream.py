"""headwise stream: perplexity over a long stream, by what is kept of keys and values
(StreamingLLM).

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

from collections.abc import Sequence
from typing import Any

from artifacts.cli import arguments
from artifacts.cli.command import ArgumentParser, run_command
from artifacts.cli.options import add_arguments, config_of
from profiling.streams.report import Row, table
from profiling.streams.run import Streamed, run
from profiling.streams.speed import SPEED_ROUNDS


def report(config: Streamed, found: Sequence[Row], record: dict[str, Any]) -> str:
    """The table, and beside it what is not to be read from it."""
    lines = [table(found)]
    settings = record["settings"]
    if settings["repeats"]:
        lines.append(
            f"the text is shorter than the stream: it was begun again {settings['repeats']} times"
        )
    if "recomputed" in config.methods:
        what = (
            "at the answers" if config.task == "stream_eval" else f"at one token in {config.stride}"
        )
        lines.append(
            f"recomputed: {what} only; the ratios are over those of them that are past the window"
        )
    if seconds := record["timed"]:
        middle = {name: sorted(values)[len(values) // 2] for name, values in seconds.items()}
        base = middle.get("recomputed")
        for name, value in middle.items():
            ratio = (
                f", {base / value:.1f}x as fast as recomputed"
                if base and name != "recomputed"
                else ""
            )
            lines.append(
                f"one by one, {name}: {1e3 * value:.2f} ms a token (median of {SPEED_ROUNDS} "
                f"rounds){ratio}"
            )
    return "\n".join(lines)


def parser() -> ArgumentParser:
    """The command line of headwise stream."""
    p = ArgumentParser(prog="headwise stream", description=__doc__)
    add_arguments(p, Streamed)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    config = config_of(Streamed, options, command=arguments.as_typed("stream", argv))
    found, record = run(config)
    print(report(config, found, record))
    print(f"wrote {config.out / 'stream.json'}, .csv, .png and .svg")
    return 0


if __name__ == "__main__":
    run_command(main)
