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

from artifacts import arguments
from artifacts.command_line import FOUND, ArgumentParser, run_command
from artifacts.options import add_arguments, config_of
from search.model.check import Check, run
from search.model.limits import Limits
from search.model.task_losses import line


def parser() -> ArgumentParser:
    """The command line of headwise gate."""
    p = ArgumentParser(prog="headwise gate", description=__doc__)
    add_arguments(p, Check)
    add_arguments(p, Limits)
    arguments.add_json(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point: 0 where the artifact passes, 3 where it does not."""
    options = vars(parser().parse_args(argv))
    config = config_of(Check, options, limits=config_of(Limits, options))
    verdict = run(config)
    lines = [f"  {line(task)}" for task in verdict.tasks]
    if verdict.fault is None:
        text = ["passes", *lines]
        if config.out is not None:
            text.append(f"wrote {config.out}, for {config.model}")
        if verdict.left_out:
            left_out = ", ".join(verdict.left_out)
            text.append(f"left out, for they were measured on other weights: {left_out}")
    else:
        heads = (
            f"head {layer}.{head}: error {error:.3f}, its search measured {before:.3f}"
            for layer, head, error, before in verdict.heads
        )
        text = [f"fails: {verdict.fault}", *lines, *(f"  {head}" for head in heads)]
        if config.out is not None:
            again = f"headwise search --model {config.model}"
            text.append(f"nothing was written: search again, {again}")
    record = {"passes": verdict.fault is None, **asdict(verdict)}
    arguments.deliver("\n".join(text), record, options["json"])
    return 0 if verdict.fault is None else FOUND


if __name__ == "__main__":
    run_command(main)
