"""headwise search: find a sparse pattern for every attention head and write the artifact.

The fastest that is proven, at 95% confidence, to lose at most --max-lost of the correct answers.
Exit status 3: no budget is proven (no file), the artifact is too slow to serve (no file without
--keep), it is not reliably faster, or a --budget is not proven (the file is written).

    torchrun --nproc_per_node 2 -m search.heads --model MODEL --out cfg.yaml    two processes
"""

from __future__ import annotations

import runpy
import sys

from artifacts import HeadwiseError
from artifacts.cli.command import FOUND
from artifacts.cli.interrupt import while_importing
from search.model.config import ModelSearch as Config
from search.paper_config import PaperSearch


def run(config: Config) -> int:
    """Search: 0, or 3 where the artifact is too slow, not reliably faster, or not proven.

    Raises:
        HeadwiseError: a mistake of the user, or no budget is proven.
    """
    if config.preset is not None:
        _run_paper(config)
        return 0
    with while_importing():
        from search.model.report import report
        from search.model.search import run
    record = run(config)
    if record is None:
        return 0
    print(report(config, record))
    is_useful = record.is_reliably_faster and record.accepted.proof.verdict.proven
    if is_useful or config.keep:
        return 0
    return FOUND


def _run_paper(config: Config) -> None:
    """Run the search of --preset paper, which is of one task, and report."""
    typed = (config.model_fields_set - {"limits"}) | config.limits.model_fields_set
    shared = typed & PaperSearch.model_fields.keys()
    for name in sorted(typed - shared - {"tasks", "preset"}):
        raise HeadwiseError(
            f"--{name.replace('_', '-')} goes with one budget for the model, not with "
            "--preset paper"
        )
    options = {name: getattr(config, name) for name in shared}
    if "tasks" in typed:
        if len(config.tasks) > 1:
            count = len(config.tasks)
            raise HeadwiseError(f"--task takes one value with --preset paper, got {count}")
        options["calibration"] = config.tasks[0]
    if config.budget is not None:
        options["budget"] = str(config.budget)
    with while_importing():
        from search.model.report import report_paper
        from search.paper import run
    search = PaperSearch(**options)
    print(report_paper(search, run(search)))


if __name__ == "__main__":
    sys.argv.insert(1, "search")
    runpy.run_module("headwise", run_name="__main__", alter_sys=True)
