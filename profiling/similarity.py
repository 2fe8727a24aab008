"""headwise similarity: which layers rank first the tokens that the layers after them attend to.

Prompts of several tasks are decoded step by step. At each step every layer that sees the whole
prompt ranks the tokens by its own attention, and S[i, j] is the fraction of layer j's attention on
layer i's top-k tokens: OmniKV, section 3.1 and Figures 1c, 6 and 8, with what it does to each KV
head's output. Sliding-window layers are marked and left out.

headwise similarity --model smollm2 --out profile/ --task multi_hop:novel.txt --task kv_retrieval \\
    --task text:novel.txt --length 4096 --steps 32
"""

from __future__ import annotations

import time

from artifacts.cli import arguments
from artifacts.cli.command import ArgumentParser, run_command
from artifacts.cli.interrupt import while_importing
from artifacts.cli.options import add_arguments, config_of
from profiling.similarities.config import SimilarityConfig
from profiling.similarities.similarity_profile import FILE


def parser() -> ArgumentParser:
    """The command line of headwise similarity."""
    p = ArgumentParser(prog="headwise similarity", description=__doc__)
    arguments.add_out(p, f"folder for {FILE} and a CSV for each array", metavar="FOLDER")
    add_arguments(p, SimilarityConfig)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    out = options.pop("out")
    start = time.perf_counter()
    command = arguments.as_typed("similarity", argv)
    config = config_of(SimilarityConfig, options, command=command)
    with while_importing():
        from profiling.similarities.run import report, run
    profile = run(config, out)
    print(report(profile))
    print(f"wrote {out / FILE} and a CSV for each array in {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    run_command(main)
