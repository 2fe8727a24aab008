"""headwise stream: perplexity over a long stream, by what is kept of keys and values (StreamingLLM).

streaming     sinks and a window, positions counted inside the cache; streaming:S with S sinks in as many tokens
window-only   the window alone, of as many tokens
recomputed    for each token a forward over the last tokens, from scratch: measured at one token in --stride
dense         everything is kept
original      sinks and a window, positions as they are in the text

Feeding --chunk tokens at a time gives what one by one gives. A killed run goes on where it was: each finished block of
tokens is kept, and the cache is fed again up to there.

headwise stream --model smollm2 --text book.txt --tokens 20000 --out stream/
headwise stream --model smollm2 --text book.txt --tokens 1000000 --methods streaming --out stream/
headwise stream --model gemma3 --task stream_eval --tokens 20000 --out eval/
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from artifacts import arguments
from artifacts.command_line import ArgumentParser, run_command
from profiling.streams.methods import METHODS
from profiling.streams.report import Row, table
from profiling.streams.run import TASKS, Streamed, run
from profiling.streams.speed import SPEED_ROUNDS


def report(config: Streamed, found: Sequence[Row], record: dict[str, Any]) -> str:
    """The table, and beside it what is not to be read from it."""
    lines = [table(found)]
    settings = record["settings"]
    if settings["repeats"]:
        lines.append(f"the text is shorter than the stream: it was begun again {settings['repeats']} times")
    if "recomputed" in config.methods:
        what = "at the answers" if config.task == "stream_eval" else f"at one token in {config.stride}"
        lines.append(f"recomputed: {what} only; the ratios are over those of them that are past the window")
    if seconds := record["timed"]:
        middle = {name: sorted(values)[len(values) // 2] for name, values in seconds.items()}
        base = middle.get("recomputed")
        for name, value in middle.items():
            ratio = f", {base / value:.1f}x as fast as recomputed" if base and name != "recomputed" else ""
            lines.append(f"one by one, {name}: {1e3 * value:.2f} ms a token (median of {SPEED_ROUNDS} rounds){ratio}")
    return "\n".join(lines)


def parser() -> ArgumentParser:
    """The command line of headwise stream."""
    p = ArgumentParser(prog="headwise stream", description=__doc__)
    arguments.add_model(p)
    arguments.add_out(p, "folder for stream.json, .csv, .png and .svg", metavar="FOLDER")
    p.add_argument("--tokens", required=True, type=int, help="length of the stream")
    p.add_argument("--text", type=Path, help="text file; begun again where it is shorter than the stream")
    arguments.add_task(p, f"one of {', '.join(TASKS)} (default text)", several=False, default=Streamed.task)
    p.add_argument("--sinks", type=int, default=Streamed.sinks, help="first tokens that are kept (default 4)")
    p.add_argument("--window", type=int, default=Streamed.window, help="last tokens that are kept (default 1020)")
    p.add_argument("--methods", nargs="+", default=METHODS, help=f"any of {', '.join(METHODS)}, streaming:SINKS")
    p.add_argument("--chunk", type=int, default=Streamed.chunk, help="tokens fed at a time (default 256)")
    p.add_argument("--block", type=int, help="tokens of a mean and of a unit of the ledger (default 1024 or more)")
    p.add_argument(
        "--stride", type=int, default=Streamed.stride, help="recomputed at every so many tokens (default 16)"
    )
    p.add_argument(
        "--timed", type=int, default=Streamed.timed, help="tokens of a round timed one by one (default none)"
    )
    arguments.add_seed(p, Streamed.seed, "of stream_eval")
    arguments.add_dtype(p)
    arguments.add_device(p)
    arguments.add_revision(p)
    p.add_argument("--fresh", action="store_true", help="discard what a killed run left")
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    options["methods"] = tuple(options["methods"])
    config = Streamed(**options, command=arguments.as_typed("profiling.stream", argv))
    found, record = run(config)
    print(report(config, found, record))
    print(f"wrote {config.out / 'stream.json'}, .csv, .png and .svg")
    return 0


if __name__ == "__main__":
    run_command(main)
