r"""headwise similarity: which layers rank first the tokens that the layers after them attend to.

Prompts of several tasks are decoded step by step. At each step every layer that sees the whole
prompt ranks the tokens by its own attention, and S[i, j] is the fraction of layer j's attention on
layer i's top-k tokens: OmniKV, section 3.1 and Figures 1c, 6 and 8, with what it does to each KV
head's output. Sliding-window layers are marked and left out.

headwise similarity --model smollm2 --out profile/ --task multi_hop:novel.txt --task kv_retrieval \
    --task text:novel.txt --length 4096 --steps 32
"""

from __future__ import annotations

import time
from typing import Annotated

from artifacts.cli.arguments import Out
from artifacts.cli.interrupt import while_importing
from artifacts.cli.options import Arg
from profiling.similarities.config import SimilarityConfig
from profiling.similarities.similarity_profile import FILE


class Config(SimilarityConfig):
    """The measurement, and the folder of its profile."""

    out: Annotated[Out, Arg(f"folder for {FILE} and a CSV for each array", metavar="FOLDER")]


def run(config: Config) -> int:
    """Measure, and print a line for each task."""
    start = time.perf_counter()
    with while_importing():
        from profiling.similarities.run import report
        from profiling.similarities.run import run as measure
    profile = measure(config, config.out)
    print(report(profile))
    seconds = time.perf_counter() - start
    print(f"wrote {config.out / FILE} and a CSV for each array in {seconds:.0f} s")
    return 0
