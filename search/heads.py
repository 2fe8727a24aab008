"""headwise search: find a sparse pattern for every attention head and write the artifact.

One budget is spent over all heads, in seconds of this machine, and held-out prompts check the
result, task by task. The last lines begin with the verdict; below 1.05 times the fastest dense
attention no file is written and the exit status is 3, unless --keep.

    torchrun --nproc_per_node 2 -m search.heads --model MODEL --out cfg.yaml    two processes
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from artifacts import HeadwiseError
from artifacts.cli import arguments
from artifacts.cli.command import FOUND, ArgumentParser, run_command
from artifacts.cli.interrupt import while_importing
from artifacts.cli.options import add_arguments, config_of, option
from search.model.config import ModelSearch, without_password
from search.model.limits import Limits
from search.published import PAPER_BUDGET, PAPER_LENGTH

# Options of the search with one budget for the model that --preset paper lacks, by field.
_OF_MODEL = {
    "samples": "--samples",
    "cost": "--cost",
    "n_trials": "--n-trials",
    "storage": "--storage",
    "max_memory": "--max-memory",
    "keep": "--keep",
    "kl": "--max-kl",
    "perplexity": "--max-perplexity",
    "nll": "--max-nll",
    "lost": "--max-lost",
}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A published search in place of one budget for the model."""

    preset: str | None = option(
        "paper: MInference's own search, of one prompt of one --task and --length (default "
        f"{PAPER_LENGTH}), with a --budget for each head, a share or a_shape:SINK,WINDOW (default "
        f"{PAPER_BUDGET})",
        default=None,
        choices=("paper",),
        advanced=True,
    )


def parser() -> ArgumentParser:
    """The command line of headwise search."""
    p = ArgumentParser(prog="headwise search", description=__doc__)
    add_arguments(p, ModelSearch)
    add_arguments(p, Limits)
    add_arguments(p, Preset)
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command: 0, and 3 where the artifact is not worth serving and so is not written."""
    if argv is None:
        argv = sys.argv[1:]
    p = parser()
    options = vars(p.parse_args(argv))
    # It goes into the artifact.
    command = arguments.as_typed("search", [without_password(word) for word in argv])
    if config_of(Preset, options).preset == "paper":
        for name, flag in _OF_MODEL.items():
            if options[name] != p.get_default(name):
                refused = "goes with one budget for the model, not with --preset paper"
                raise HeadwiseError(f"{flag} {refused}")
        _run_published(options, command)
        return 0
    config = config_of(ModelSearch, options, limits=config_of(Limits, options), command=command)
    with while_importing():
        from search.model.report import report
        from search.model.search import run
    recorded = run(config)
    if recorded is None:
        return 0
    print(report(config, recorded))
    return 0 if recorded.written else FOUND


def _run_published(options: dict[str, Any], command: str) -> None:
    """Run the search of --preset paper, which is of one task and one length, and report."""
    with while_importing():
        from search.model.report import report_published
        from search.published.search import HeadSearch, run
    single = {
        "length": _only(options["lengths"], "--length"),
        "calibration": _only(options["tasks"], "--task"),
    }
    artifact = run(config_of(HeadSearch, options | single, command=command))
    print(report_published(artifact, options["out"], options["model"]))


def _only(values: list[Any] | None, flag: str) -> Any:
    """The value of an option that --preset paper takes once; None if it was not given."""
    if values is None:
        return None
    if len(values) > 1:
        raise HeadwiseError(f"{flag} takes one value with --preset paper, got {len(values)}")
    return values[0]


if __name__ == "__main__":
    run_command(main)
