"""python -m search.gate: what an artifact loses on prompts that its search did not see, before anyone serves with it.

Tasks are judged one by one and the worst decides: KL to dense attention, perplexity on text, and on answers how much
less likely the right one becomes and how many that dense attention gets right are lost.

    python -m search.gate cfg.yaml --model MODEL --max-kl 0.05 --max-lost 0.1
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from artifacts.command_line import ArgumentParser, natural, run_command
from profiling.prompts.prompt import DEFAULT_TASKS
from search.common.check import Gate, run
from search.common.limits import add_limits, limits_of


def parser() -> argparse.ArgumentParser:
    """The command line of python -m search.gate."""
    p = ArgumentParser(
        prog="python -m search.gate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("config", type=Path, help="artifact, such as cfg.yaml")
    p.add_argument("--model", required=True, help="hub id, local folder, GGUF file, smollm2 or gemma3")
    add_limits(p)
    p.add_argument("--tasks", nargs="+", help=f"default: {' '.join(DEFAULT_TASKS)}")
    p.add_argument("--length", type=int, help="tokens of a prompt (default: what was searched)")
    p.add_argument("--samples", type=int, default=1, help="prompts of each task (default 1)")
    p.add_argument("--seed", type=natural, default=0)
    p.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    p.add_argument("--device", default="cpu")
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point: 0 where the artifact passes, 1 where it does not."""
    options = vars(parser().parse_args(argv))
    limits, tasks = limits_of(options), options.pop("tasks")
    verdict = run(Gate(**options, limits=limits, tasks=tuple(tasks) if tasks else None))
    lines = "\n".join(f"  {task.line()}" for task in verdict.tasks)
    if verdict.fault is None:
        print(f"passes\n{lines}")
        return 0
    print(f"fails: {verdict.fault}\n{lines}", file=sys.stderr)
    for layer, head, error, before in verdict.heads:
        print(f"  head {layer}.{head}: error {error:.3f}, its search measured {before:.3f}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    run_command(main)
