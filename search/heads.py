"""headwise search: find a sparse pattern for every attention head of a model and write the artifact.

By default one budget is spent over all heads of the model, in seconds of this machine, and what comes out is proven end
to end. --preset paper is the published search, a budget for each head (MInference 1.0, Algorithm 1).

    torchrun --nproc_per_node 2 -m search.heads --model MODEL --out cfg.yaml      several processes share the work
"""

from __future__ import annotations

import sys
from typing import Any

from artifacts import HeadwiseError, arguments
from artifacts.command_line import ArgumentParser, run_command
from profiling.memory_use.sizes import bytes_of
from profiling.prompts.prompt import CALIBRATED_TASKS, TASKS
from search.model.config import DEFAULT_BUDGET, DEFAULT_TRIALS, SHORT, TAILS, ModelSearch
from search.model.limits import add_limits, limits_of
from search.model.pipeline import run as run_model
from search.model.refine import without_password
from search.model.report import report
from search.published.search import HeadSearch
from search.published.search import run as run_published
from search.published.space import PAPER_BUDGET, PAPER_LENGTH

# What only one of the two searches knows, by option.
_OF_MODEL = (
    "cost",
    "n_trials",
    "storage",
    "max_memory",
    "max_kl",
    "max_perplexity",
    "max_nll",
    "max_lost",
)


def parser() -> ArgumentParser:
    """The command line of headwise search."""
    p = ArgumentParser(prog="headwise search", description=__doc__)
    arguments.add_model(p)
    arguments.add_out(p, "artifact to write, such as cfg.yaml")
    arguments.add_task(
        p,
        f"what prompts are made of (default {' '.join(CALIBRATED_TASKS)}; with --preset paper kv_retrieval); add "
        f"text:FILE for text like yours; known: {TASKS}",
        dest="calibration",
    )
    arguments.add_length(
        p,
        "prompt lengths in tokens: patterns are for the longest, the others show how sizes go with the length "
        f"(default: the model's positions, at most 8192; with --preset paper {PAPER_LENGTH})",
        several=True,
    )
    p.add_argument("--samples", type=int, default=1, help="prompts of each task and length (default 1)")
    p.add_argument(
        "--budget",
        help=f"share of what computing all of attention costs (default {DEFAULT_BUDGET}, more where nothing keeps to "
        "that); with --preset paper "
        f"what a head may compute, such a share or a_shape:SINK,WINDOW (default {PAPER_BUDGET})",
    )
    p.add_argument("--cost", choices=("seconds", "flops"), default="seconds", help="what is spent (default seconds)")
    p.add_argument(
        "--n-trials",
        type=int,
        default=DEFAULT_TRIALS,
        help=f"ways of spending the budget that are tried on the whole model (default {DEFAULT_TRIALS})",
    )
    p.add_argument("--storage", metavar="URL", help="where Optuna keeps the study of its draws, from --n-trials 3 on")
    p.add_argument(
        "--max-memory",
        metavar="SIZE",
        help="weights that stay on the device, such as 16GiB; other layers come in one at a time (default: all stay)",
    )
    add_limits(p)
    p.add_argument(
        "--preset",
        choices=("paper",),
        help="paper: MInference's own search, a budget for each head",
    )
    arguments.add_seed(p)
    arguments.add_dtype(p)
    arguments.add_device(p)
    p.add_argument("--backend", default="auto", help="attention backend (default: the fastest that serves)")
    arguments.add_revision(p)
    p.add_argument(
        "--dense-below", type=int, help="prompts shorter than this stay dense (default: measured, or half the length)"
    )
    p.add_argument(
        "--dense-tail",
        type=int,
        help="last queries of a prompt that see every key (default: the best of "
        f"{', '.join(map(str, TAILS))}, below {SHORT:,} tokens also 0; with --preset paper 0)",
    )
    p.add_argument("--beyond-positions", action="store_true", help="allow a --length over the model's positions")
    p.add_argument("--fresh", action="store_true", help="discard what an interrupted search left")
    p.add_argument("--no-picture", dest="picture", action="store_false", help="do not draw the pattern map")
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    argv = sys.argv[1:] if argv is None else argv
    p = parser()
    options = vars(p.parse_args(argv))
    # It goes into the artifact.
    command = arguments.as_typed("search.heads", [without_password(argument) for argument in argv])
    model, out = options["model"], options["out"]
    if options.pop("preset") == "paper":
        for name in _OF_MODEL:
            if options.pop(name) != p.get_default(name):
                raise HeadwiseError(
                    f"--{name.replace('_', '-')} goes with one budget for the model, not with --preset paper"
                )
        artifact = run_published(_published(options, command))
    else:
        found = run_model(_for_model(options, command))
        if found is None:
            return 0
        artifact = found
    print(report(artifact, out, model))
    return 0


def _published(options: dict[str, Any], command: str) -> HeadSearch:
    for name in ("length", "calibration"):
        if options[name] is not None and len(options[name]) > 1:
            option = "task" if name == "calibration" else name
            raise HeadwiseError(f"--{option} takes one value with --preset paper, got {len(options[name])}")
        options[name] = options[name][0] if options[name] else None
    given = {name: value for name, value in options.items() if value is not None}
    return HeadSearch(**given, command=command)


def _for_model(options: dict[str, Any], command: str) -> ModelSearch:
    limits = limits_of(options)
    tasks, lengths, budget = (options.pop(name) for name in ("calibration", "length", "budget"))
    try:
        share = None if budget is None else float(budget)
    except ValueError:
        raise HeadwiseError(
            f"--budget {budget!r} must be a share of all of attention such as 0.25; a_shape:SINK,WINDOW goes with "
            "--preset paper"
        ) from None
    memory = options.pop("max_memory")
    return ModelSearch(
        **options,
        max_memory=None if memory is None else bytes_of(memory, "--max-memory"),
        tasks=tuple(tasks or CALIBRATED_TASKS),
        lengths=None if lengths is None else tuple(lengths),
        budget=share,
        limits=limits,
        command=command,
    )


if __name__ == "__main__":
    run_command(main)
