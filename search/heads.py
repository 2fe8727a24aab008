"""headwise search: find a sparse pattern for every attention head and write the artifact.

One budget, in seconds of this machine, is spent over all heads; held-out prompts check the result.
Exit status 3: attention is less than 1.05 times as fast as the fastest dense attention, or the
first token is slower (no file without --keep), or noise hides which is faster.

    torchrun --nproc_per_node 2 -m search.heads --model MODEL --out cfg.yaml    two processes
"""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

from artifacts import HeadwiseError
from artifacts.cli import arguments
from artifacts.cli.command import FOUND, ArgumentParser, run_command
from artifacts.cli.interrupt import while_importing
from artifacts.cli.options import add_arguments, config_of
from search.model.config import ModelSearch
from search.model.limits import Limits
from search.paper_config import PaperSearch
from search.study import without_password

# Options of the search with one budget for the model that --preset paper lacks.
_OF_MODEL = tuple(
    field.name
    for field in (*fields(ModelSearch), *fields(Limits))
    if field.name not in {"tasks", "limits", *(shared.name for shared in fields(PaperSearch))}
)


def parser() -> ArgumentParser:
    """The command line of headwise search."""
    p = ArgumentParser(prog="headwise search", description=__doc__, shares_work=True)
    add_arguments(p, ModelSearch)
    add_arguments(p, PaperSearch, ("preset",))
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command: 0, or 3 where the artifact is too slow to serve or not proven faster."""
    if argv is None:
        argv = sys.argv[1:]
    p = parser()
    options = vars(p.parse_args(argv))
    # It goes into the artifact.
    command = arguments.as_typed("search", [without_password(word) for word in argv])
    if options["preset"] == "paper":
        for name in _OF_MODEL:
            if options[name] != p.get_default(name):
                raise HeadwiseError(
                    f"--{name.replace('_', '-')} goes with one budget for the model, not with "
                    "--preset paper"
                )
        _run_paper(options, command)
        return 0
    config = config_of(ModelSearch, options, command=command)
    with while_importing():
        from search.model.report import report
        from search.model.search import run
    record = run(config)
    if record is None:
        return 0
    print(report(config, record))
    if record.is_proven_faster or config.keep:
        return 0
    return FOUND


def _run_paper(options: dict[str, Any], command: str) -> None:
    """Run the search of --preset paper, which is of one task, and report."""
    with while_importing():
        from search.model.report import report_paper
        from search.paper import run
    tasks = options["tasks"]
    if tasks is not None and len(tasks) > 1:
        raise HeadwiseError(f"--task takes one value with --preset paper, got {len(tasks)}")
    calibration = tasks[0] if tasks else None
    config = config_of(PaperSearch, options | {"calibration": calibration}, command=command)
    print(report_paper(config, run(config)))


if __name__ == "__main__":
    run_command(main)
