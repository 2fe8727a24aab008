"""headwise stream: perplexity over an endless text, by the cache (StreamingLLM).

    headwise stream --model smollm2 --text book.txt --tokens 20000 --out stream/

Each --policy is a cache that is fed the text, as in headwise decode: `full` keeps every token,
`streaming` first tokens and a window, `h2o` the heavy hitters and a window. `recomputed` is the
baseline: for each token a forward over the last --recompute tokens from scratch, measured at one
token in --stride. A full or streaming cache gives the same for any --chunk. Rerun a killed command
to resume: finished blocks of tokens are kept, and the caches are filled again.
"""

from __future__ import annotations

from artifacts.cli.interrupt import while_importing
from profiling.streams.config import RECOMPUTED
from profiling.streams.config import StreamConfig as Config


def run(config: Config) -> int:
    """Stream through every method, and print the table."""
    with while_importing():
        from profiling.streams.report import table
        from profiling.streams.run import OUTPUT
        from profiling.streams.run import run as stream
    rows, record = stream(config)
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
