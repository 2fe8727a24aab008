"""headwise gate: what an artifact loses on prompts that its search did not see, before anyone
serves with it.

The worst task decides, or all answers together: KL to dense attention, perplexity on text, and on
answers how much less likely the right one becomes and how many that dense attention gets right are
lost.

    headwise gate cfg.yaml --model MODEL --max-kl 0.05 --max-lost 0.1
    headwise gate cfg.yaml --model FINE_TUNE --out new.yaml

Where dense attention gets so few answers right that a loss of one in five would often not be seen,
nothing is proven: the first line says so, and the exit status is 3, as of a gate that fails.

With --out an artifact that passes is written for the model that it was checked on: a fine-tune, or
the model of an import, which does not say which it is for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from artifacts.cli import arguments
from artifacts.cli.command import FOUND, ArgumentParser, run_command
from artifacts.cli.options import add_arguments, config_of
from search.model.check import Check, Checked, run
from search.model.limits import Limits
from search.model.task_losses import line, pooled, remedy, summary


def parser() -> ArgumentParser:
    """The command line of headwise gate."""
    p = ArgumentParser(prog="headwise gate", description=__doc__)
    add_arguments(p, Check)
    add_arguments(p, Limits)
    arguments.add_json(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point: 0 where the artifact passes, 3 where it does not or too few answers
    were asked for."""
    options = vars(parser().parse_args(argv))
    config = config_of(Check, options, limits=config_of(Limits, options))
    checked = run(config)
    arguments.deliver(_text(config, checked), _record(checked), options["json"])
    return 0 if checked.passes else FOUND


def _text(config: Check, checked: Checked) -> str:
    """The verdict, then a line for each task, then what was written."""
    if checked.fault is not None:
        said = f"fails: {checked.fault}"
    elif checked.passes:
        said = f"passes: {summary(checked.tasks)}"
    else:
        said = f"not proven: {checked.verdict.why}; {remedy(checked.tasks, config.samples)}"
    lines = [said, *(f"  {line(task)}" for task in (*checked.tasks, *pooled(checked.tasks)))]
    for layer, head, error, before in checked.heads:
        lines.append(f"  head {layer}.{head}: error {error:.3f}, its search measured {before:.3f}")
    if config.out is None:
        return "\n".join(lines)
    if checked.passes:
        lines.append(f"wrote {config.out}, for {config.model}")
    elif checked.fault is None:
        lines.append("nothing was written: it is not proven")
    else:
        lines.append(f"nothing was written: search again, headwise search --model {config.model}")
    if checked.left_out:
        lines.append(
            f"left out, for they were measured on other weights: {', '.join(checked.left_out)}"
        )
    return "\n".join(lines)


def _record(checked: Checked) -> dict[str, Any]:
    """The same as JSON."""
    tasks = [asdict(task) for task in (*checked.tasks, *pooled(checked.tasks))]
    for task in tasks:
        del task["contexts"]
    return {
        "passes": checked.passes,
        "fault": checked.fault,
        "verdict": checked.verdict.model_dump(),
        "tasks": tasks,
        "heads": checked.heads,
        "left_out": checked.left_out,
    }


if __name__ == "__main__":
    run_command(main)
