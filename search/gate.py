"""headwise gate: what an artifact loses on prompts that its search did not see, before anyone serves with it.

The worst task decides, or all answers together: KL to dense attention, perplexity on text, and on answers how much less
likely the right one becomes and how many that dense attention gets right are lost.

    headwise gate cfg.yaml --model MODEL --max-kl 0.05 --max-lost 0.1
    headwise gate cfg.yaml --model FINE_TUNE --out new.yaml

With --out an artifact that passes is written for the model that it was checked on: a fine-tune, or the model of an
import, which does not say which it is for.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from artifacts import arguments
from artifacts.command_line import FOUND, ArgumentParser, run_command
from profiling.prompts.prompt import GATE_TASKS
from search.model.check import Check, run
from search.model.limits import add_limits, limits_of
from search.model.task_losses import line


def parser() -> ArgumentParser:
    """The command line of headwise gate."""
    p = ArgumentParser(prog="headwise gate", description=__doc__)
    arguments.add_artifact(p)
    arguments.add_model(p)
    p.add_argument(
        "--out", type=Path, metavar="FILE", help="write the artifact for this model, with its fingerprint and evidence"
    )
    add_limits(p)
    arguments.add_task(p, f"what is asked (default {' '.join(GATE_TASKS)})")
    arguments.add_length(p, "tokens of a prompt (default: what was searched)")
    p.add_argument(
        "--samples",
        type=int,
        default=1,
        help="four times as many contexts of each task, twice as many windows of a text (default 1)",
    )
    arguments.add_seed(p)
    arguments.add_dtype(p)
    arguments.add_device(p)
    arguments.add_json(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point: 0 where the artifact passes, 3 where it does not."""
    options = vars(parser().parse_args(argv))
    limits, tasks, to_json = limits_of(options), options.pop("tasks"), options.pop("json")
    verdict = run(Check(**options, limits=limits, tasks=tuple(tasks) if tasks else None))
    lines = [f"  {line(task)}" for task in verdict.tasks]
    if verdict.fault is None:
        text = ["passes", *lines]
        if options["out"] is not None:
            text.append(f"wrote {options['out']}, for {options['model']}")
        if verdict.left_out:
            text.append(f"left out, for they were measured on other weights: {', '.join(verdict.left_out)}")
    else:
        heads = (
            f"head {layer}.{head}: error {error:.3f}, its search measured {before:.3f}"
            for layer, head, error, before in verdict.heads
        )
        text = [f"fails: {verdict.fault}", *lines, *(f"  {head}" for head in heads)]
        if options["out"] is not None:
            text.append(f"nothing was written: search again, headwise search --model {options['model']}")
    arguments.deliver("\n".join(text), {"passes": verdict.fault is None, **asdict(verdict)}, to_json)
    return 0 if verdict.fault is None else FOUND


if __name__ == "__main__":
    run_command(main)
