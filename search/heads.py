"""headwise search: find a sparse pattern for every attention head and write the artifact.

It tries up to four budgets and takes the cheapest that is proven, at 95% confidence, to lose at
most --max-lost of the correct answers. Exit status 3: no budget is proven (no file, except where
the model answers nothing), the artifact is too slow to serve (no file without --keep), it is not
reliably faster, or a --budget is not proven (the file is written unless it is also too slow).

    torchrun --nproc_per_node 2 -m search.heads --model MODEL --out cfg.yaml    two processes
"""

from __future__ import annotations

import sys

from artifacts.cli.command import FOUND, run_command
from artifacts.cli.interrupt import while_importing
from artifacts.cli.parser import run_verb
from search.model.config import ModelSearch as Config


def run(config: Config) -> int:
    """Search: 0, or 3 where the artifact is too slow, not reliably faster, or not proven.

    Raises:
        HeadwiseError: a mistake of the user, or no budget is proven.
    """
    with while_importing():
        from search import paper
        from search.model.report import report, report_paper
        from search.model.search import run
    if config.preset is not None:
        print(report_paper(config, paper.run(config)))
        return 0
    record = run(config)
    if record is None:
        return 0
    print(report(config, record))
    is_useful = record.is_reliably_faster and record.accepted.proof.verdict.proven
    if is_useful or config.keep:
        return 0
    return FOUND


if __name__ == "__main__":
    run_command(lambda _: run_verb(sys.modules[__name__], "search", sys.argv[1:]))
