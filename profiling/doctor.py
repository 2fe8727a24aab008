"""headwise doctor: what this machine can do, and how long a search of a model takes on it.

It reports processor, kernels, GPUs and packages, and compares the kernels with the fp32 reference.
Then it times one layer of the model with random weights, and estimates seconds to the first token
and the time of a default search. Of the model only the configuration is read. The exit status is 3
where something is wrong, such as kernels that cannot be compiled.

    headwise doctor --model MODEL
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from artifacts import HeadwiseError
from artifacts.cli import arguments
from artifacts.cli.command import FOUND, ArgumentParser, run_command
from artifacts.cli.interrupt import while_importing
from artifacts.cli.options import add_arguments, config_of, shared

_USUAL = "smollm2"


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """The model to estimate times for, None for SmolLM2, and where it is to run."""

    model: str | None = shared(
        arguments.add_model, f"{arguments.MODEL} (default {_USUAL})", required=False, default=None
    )
    revision: str | None = shared(arguments.add_revision, default=None)
    device: str = shared(arguments.add_device, default="auto")
    dtype: str = shared(arguments.add_dtype, default="auto")


def parser() -> ArgumentParser:
    """The command line of headwise doctor."""
    p = ArgumentParser(prog="headwise doctor", description=__doc__)
    add_arguments(p, Doctor)
    arguments.add_json(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point: 0 where all is well, 3 where something is wrong."""
    options = parser().parse_args(argv)
    # Before this process works itself.
    load = os.getloadavg()[0]
    with while_importing():
        from profiling import machine
        from profiling.models.device import settled
        from profiling.models.loading import load_config, name_of
    config = settled(config_of(Doctor, vars(options)))
    spec = config.model or _USUAL
    model = None
    try:
        model = load_config(spec, revision=config.revision)
        name = name_of(spec, revision=config.revision)
    except HeadwiseError as error:
        if config.model is not None:
            raise
        no_estimate = str(error)
    wrong: list[str] = []
    report: dict[str, Any] = {"wrong": wrong}

    def show(part: str, text: str) -> None:
        report[part] = text
        if options.json != arguments.STDOUT:
            print(f"{part:<12}{text}", flush=True)

    for part, text, fault in machine.facts():
        show(part, text)
        if fault is not None:
            wrong.append(f"{part}: {fault}")
    show("faults", "; ".join(wrong) or "none, all is well")
    if model is None:
        show("times", f"no estimates: {no_estimate}")
    elif machine.check(config.device) is None:
        timing = machine.time_layer(model, dtype=config.dtype, device=config.device, load=load)
        show("one layer", timing.described())
        report["estimates"] = timing.estimates()
        show("times", timing.table(name))
    arguments.deliver_json(report, options.json)
    if wrong:
        return FOUND
    return 0


if __name__ == "__main__":
    run_command(main)
