"""Artifacts of one model side by side: what their attention takes, and how far they lead it from dense attention.

python -m profiling.versus a.yaml b.yaml --model smollm2 --length 8192 --task passkey --task text:book.txt --samples 4
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from artifacts import HeadwiseError, arguments, load_pair
from artifacts.command_line import ArgumentParser, run_command
from artifacts.page_layout import aligned
from profiling.environment import environment
from profiling.evaluation.side_by_side import Row, compared, timed
from profiling.inside.head_fidelity import fidelity
from profiling.models.loading import load_model
from profiling.prompts.held_out import Seen, overlap_sentence, unseen_prompts
from profiling.prompts.prompt import Prompt, parse_task
from profiling.speed.baselines import COLUMNS, KERNEL, LABELS, MODEL, Speedup, cells, speedup
from runtime import Headwise


@dataclass(frozen=True, kw_only=True)
class Versus:
    """What to compare and on what; places: tokens of a prompt whose predictions are compared, None for up to 512."""

    configs: tuple[Path, ...]
    model: str
    length: int
    tasks: tuple[str, ...] = ("passkey", "kv_retrieval", "prose")
    samples: int = 2
    seed: int = 2000
    places: int | None = None
    repeats: int = 5
    dtype: str = "bfloat16"
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Rows in the order asked for, and seconds of both dense attentions in the layers that have patterns, by name."""

    rows: tuple[Row, ...]
    dense_seconds: dict[str, float]
    settings: dict[str, Any]
    environment: dict[str, str]


def run(config: Versus) -> Result:
    """Load the model and compare.

    Raises:
        HeadwiseError: a count that is none; an artifact of another model, or one that would serve all of it densely.
    """
    for name, value, least in (("places", config.places, 1), ("repeats", config.repeats, 0)):
        if value is not None and value < least:
            raise HeadwiseError(f"--{name} must be at least {least}, got {value}")
    pairs = [load_pair(path) for path in config.configs]
    for path, (artifact, _) in zip(config.configs, pairs, strict=True):
        if config.length < artifact.prefill.dense_below:
            raise HeadwiseError(
                f"--length {config.length} is below the dense_below of {artifact.prefill.dense_below} of {path.name}: "
                "all would be dense; ask for longer prompts"
            )
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    prompts = _prompts(config, loaded.tokenizer, Seen.by([arrays for _, arrays in pairs]))
    some = {str(path): Headwise(*pair) for path, pair in zip(config.configs, pairs, strict=True)}
    first = next(iter(prompts.values()))[0]
    seconds = timed(loaded, some, first, repeats=config.repeats, builds=True)
    densities = {
        name: float(np.nanmean(fidelity(loaded.model, each.artifact, first, each.arrays).density))
        for name, each in some.items()
    }
    rows = compared(loaded, some, prompts, seconds, densities, places=config.places)
    settings = asdict(config) | {"configs": [path.name for path in config.configs]}
    return Result(
        rows=tuple(replace(row, name=Path(row.name).name) for row in rows),
        dense_seconds={name: seconds[name] for name in (MODEL, KERNEL) if name in seconds},
        settings=settings,
        environment=environment(config.device),
    )


def _prompts(config: Versus, tokenizer: Any, seen: Seen) -> dict[str, list[Prompt]]:
    """Of each task those that none of the artifacts' searches looked at, as far as there are any."""
    found = {}
    for task in config.tasks:
        made = unseen_prompts(
            task, tokenizer, length=config.length, samples=config.samples, seed=config.seed, seen=seen
        )
        if made.overlapping:
            print(
                overlap_sentence(parse_task(task).name, config.length, made.overlapping, config.samples),
                file=sys.stderr,
            )
        found[task] = made.prompts
    return found


def table(result: Result) -> str:
    """The comparison as aligned text."""
    lines = [["", "density", "attention s", "index s", *COLUMNS, "KL", "loss"]]
    for name, seconds in result.dense_seconds.items():
        lines.append([LABELS[name], "1.000", f"{seconds:.3f}", "-", *cells(_speedup(seconds, result)), "-", "-"])
    for row in result.rows:
        lines.append(
            [
                row.name,
                f"{row.density:.3f}",
                *("-" if each is None else f"{each:.3f}" for each in (row.seconds, row.index_seconds)),
                *cells(None if row.seconds is None else _speedup(row.seconds, result)),
                f"{row.kl:.4f}{_error(row.kl_error)}",
                f"{row.loss:+.4f}{_error(row.loss_error)}",
            ]
        )
    return "\n".join(aligned(lines))


def _error(error: float | None) -> str:
    return "" if error is None else f" +- {error:.4f}"


def _speedup(seconds: float, result: Result) -> Speedup:
    return speedup([seconds], {name: [value] for name, value in result.dense_seconds.items()})


def parser() -> ArgumentParser:
    """The command line of python -m profiling.versus."""
    p = ArgumentParser(prog="python -m profiling.versus", description=__doc__)
    arguments.add_artifact(p, "artifacts of the model", dest="configs", nargs="+")
    arguments.add_model(p)
    arguments.add_length(p, required=True)
    arguments.add_task(p, f"what prompts are made of (default {' '.join(Versus.tasks)})", old="--tasks")
    p.add_argument("--samples", type=int, default=Versus.samples, help="prompts of each task (default 2)")
    p.add_argument("--places", type=int, help="tokens of a prompt that are compared (default: up to 512)")
    p.add_argument("--repeats", type=int, default=Versus.repeats, help="timed rounds, in turn (0: none)")
    arguments.add_seed(p, Versus.seed)
    arguments.add_dtype(p)
    arguments.add_device(p)
    arguments.add_json(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    to_json = options.pop("json")
    configs, tasks = tuple(options.pop("configs")), tuple(options.pop("tasks") or Versus.tasks)
    result = run(Versus(configs=configs, tasks=tasks, **options))
    record = {"command": arguments.as_typed("profiling.versus", argv), **asdict(result)}
    arguments.deliver(table(result), record, to_json)
    return 0


if __name__ == "__main__":
    run_command(main)
