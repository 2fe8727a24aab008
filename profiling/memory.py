"""Peak memory of a prefill by length, without an artifact and with one: measured, and predicted.

    headwise memory cfg.yaml --model smollm2 --length 8192 16384 32768 --dense
    headwise memory --plan config.json --length 131072 524288 1048576 --memory 139GB

Each figure comes from a process of its own (profiling.memory_use.peak_memory). `passing` is what is
there at most next to weights and the cache, `predicted` the same from the model's configuration.
Prompts are random tokens, so lengths may go beyond the model's positions. --plan only predicts,
from a config.json, the folder of one, or such JSON on the command line: no weights are read."""

from __future__ import annotations

from dataclasses import asdict

from artifacts.cli import arguments
from artifacts.cli.command import ArgumentParser, run_command
from artifacts.cli.interrupt import while_importing
from artifacts.cli.options import add_arguments, config_of
from profiling.memory_use.config import Memory


def parser() -> ArgumentParser:
    """The command line of headwise memory."""
    p = ArgumentParser(prog="headwise memory", description=__doc__)
    add_arguments(p, Memory)
    arguments.add_json(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = parser().parse_args(argv)
    config = config_of(Memory, vars(options))
    with while_importing():
        from profiling.environment import environment
        from profiling.memory_use.plan import table as plan_table
        from profiling.memory_use.run import predicted, run, table
        from profiling.models.device import settled
    if config.plan is not None:
        plans = predicted(config)
        lengths = [
            {"tokens": length, "device": plan.device, **asdict(plan)}
            for length, plan in plans.items()
        ]
        plan_record = {"command": arguments.as_typed("memory", argv), "rows": lengths}
        arguments.deliver(plan_table(plans, config.memory), plan_record, options.json)
        return 0
    config = settled(config)
    rows = run(config)
    record = {
        "command": arguments.as_typed("memory", argv),
        "rows": [asdict(row) for row in rows],
        "settings": {**asdict(config), "config": config.config and config.config.name},
        "environment": environment(config.device),
    }
    arguments.deliver(table(rows), record, options.json)
    return 0


if __name__ == "__main__":
    run_command(main)
