"""python -m profiling.separation: which tasks tell sparse patterns apart, by what each method loses on each of them.

Dense attention, an artifact, A-shape and vertical-slash for all heads at one density and with one dense tail, and
oracle top-k: a task earns its place where A-shape is clearly worse than dense and oracle is not. Every context under
every method is a unit of a ledger beside the output: a killed run goes on where it was.

python -m profiling.separation cfg.yaml --model smollm2 --length 4096 --out separation.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from artifacts import HeadwiseError, arguments, load_pair
from artifacts.command_line import ArgumentParser, run_command
from artifacts.files import atomic_write
from profiling.environment import environment
from profiling.evaluation.methods import Methods
from profiling.evaluation.separation import DENSE, Row, Unit, earns, records_of, rows_of, text_table
from profiling.inside.oracle import oracle
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel, load_model
from profiling.progress import bar
from profiling.prompts.prompt import Prompt, digest, make_prompts, parse_task, per_context
from profiling.quality.contexts import by_context
from profiling.speed.baselines import KERNEL
from runtime.fingerprint import check

TASKS = (
    "line_retrieval",
    "line_retrieval@question_first=1",
    "needle@question_first=1",
    "line_turns@questions=16",
    "kv_turns@questions=16",
    "chain_turns@questions=16",
    "line_asked",
    "chain",
    "label_map",
    "repeats",
    "prose",
)
METHODS = (DENSE, "headwise", "a_shape", "vertical_slash", "a_shape-tail")
_TAIL = 64


@dataclass(frozen=True, kw_only=True)
class Separation:
    """One run of the command.

    density: what A-shape and vertical-slash are fitted to, and the oracle's that a task is judged by.
    oracles: all densities of oracle top-k.
    contexts: of a task with many answers each, the units of what is claimed. prompts: of one with a single answer.
    """

    model: str
    config: Path
    out: Path
    length: int = 4096
    tasks: tuple[str, ...] = TASKS
    density: float = 0.2
    oracles: tuple[float, ...] = (0.2,)
    contexts: int = 6
    prompts: int = 8
    windows: int = 6
    seed: int = 1000
    dtype: str = "bfloat16"
    device: str = "cpu"
    fresh: bool = False
    command: str = ""


def run(config: Separation) -> dict[str, Any]:
    """Measure and write the figures as JSON.

    Returns:
        What the file holds.

    Raises:
        HeadwiseError: anything that the user has to put right.
    """
    artifact, arrays = load_pair(config.config)
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    check(artifact.model, loaded.model)
    prompts = {task: _prompts(config, loaded, task) for task in config.tasks}
    settings = {
        "separation": 2,
        "weights": artifact.model.weights_sha256,
        "length": config.length,
        "density": config.density,
        "dtype": config.dtype,
        "device": config.device,
        "version": version("headwise"),
    }
    densities: dict[str, float | None] = {}
    units: dict[str, dict[str, list[Unit]]] = {task: {} for task in config.tasks}
    judged = f"oracle {config.density:g}"
    with Ledger(config.out, "separation", settings=settings, fresh=config.fresh) as ledger:
        methods = Methods(loaded, artifact, arrays, density=config.density, ledger=ledger)
        for name in METHODS:
            made = methods.make(KERNEL if name == DENSE else name, config.length)
            densities[name] = made.density
            _measure(loaded, made.apply(loaded.model), name, made.identity, prompts, ledger, units)
        for density in dict.fromkeys((config.density, *config.oracles)):
            name = f"oracle {density:g}"
            densities[name] = density
            _measure(loaded, oracle(loaded.model, density, tail=_TAIL), name, name, prompts, ledger, units)
    rows = rows_of(units)
    record = {
        "command": config.command,
        "artifact": artifact.content_sha256,
        "settings": {**settings, "seed": config.seed, "prompts": {task: len(p) for task, p in prompts.items()}},
        "environment": environment(loaded.model.device),
        "densities": densities,
        "rows": [asdict(row) for row in rows],
        "earn_their_place": [task for task in config.tasks if earns(rows, task, "a_shape", judged)],
    }
    atomic_write(config.out, (json.dumps(record, indent=1) + "\n").encode())
    return record


def _prompts(config: Separation, loaded: LoadedModel, name: str) -> list[Prompt]:
    """As many prompts of a task as there are to be: whole contexts, where several share one."""
    task = parse_task(name)
    questions = per_context(task)
    how: dict[str, Any] = {"length": config.length, "seed": config.seed}
    first = make_prompts(task, loaded.tokenizer, samples=1, **how)[0]
    count = config.windows if first.answer is None else config.prompts
    count = config.contexts * questions if questions > 1 or first.scored else count
    return make_prompts(task, loaded.tokenizer, samples=count, **how)


def _measure(
    loaded: LoadedModel,
    applied: AbstractContextManager[object],
    name: str,
    identity: str,
    prompts: dict[str, list[Prompt]],
    ledger: Ledger,
    units: dict[str, dict[str, list[Unit]]],
) -> None:
    """Every context under a method that the ledger lacks; the units of all of them, by task.

    identity: of what the units depend on besides the ledger's settings; another artifact changes its own alone.
    """
    groups = [(task, [own[at] for at in group]) for task, own in prompts.items() for group in by_context(own)]
    with applied:
        for task, group in bar(groups, desc=name):
            unit = ledger.unit(f"{identity}/{task}/{digest(group)[:16]}")
            found = ledger.once(unit, partial(records_of, loaded.model, loaded.tokenizer, group))
            units[task].setdefault(name, []).extend(Unit(**record) for record in found)


def parser() -> ArgumentParser:
    """The command line of python -m profiling.separation."""
    p = ArgumentParser(prog="python -m profiling.separation", description=__doc__)
    arguments.add_model(p)
    arguments.add_artifact(p, "a searched artifact of that model", old="--config")
    arguments.add_out(p, "JSON file; its ledger is kept beside it")
    arguments.add_length(p, "tokens of a prompt (default 4096)", default=Separation.length)
    arguments.add_task(p, f"what is compared (default: {' '.join(TASKS)})", old="--tasks")
    p.add_argument("--density", type=float, default=Separation.density, help="of A-shape and vertical-slash (0.2)")
    p.add_argument("--oracles", nargs="+", type=float, default=list(Separation.oracles), help="densities (0.2)")
    p.add_argument("--contexts", type=int, default=Separation.contexts, help="of tasks with many answers each (6)")
    p.add_argument("--prompts", type=int, default=Separation.prompts, help="of tasks with one answer each (8)")
    p.add_argument("--windows", type=int, default=Separation.windows, help="of a text (6)")
    arguments.add_seed(p, Separation.seed)
    p.add_argument("--fresh", action="store_true", help="discard what an interrupted run left")
    arguments.add_dtype(p)
    arguments.add_device(p)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point."""
    given = vars(parser().parse_args(argv))
    for name in ("length", "contexts", "prompts", "windows"):
        if given[name] < 1:
            raise HeadwiseError(f"--{name} must be at least 1, got {given[name]}")
    for density in (given["density"], *given["oracles"]):
        if not 0 < density <= 1:
            raise HeadwiseError(f"--density and --oracles must be above 0 and at most 1, got {density}")
    lists = {"tasks": tuple(given["tasks"] or TASKS), "oracles": tuple(given["oracles"])}
    command = arguments.as_typed("profiling.separation", argv)
    record = run(Separation(**{**given, **lists}, command=command))
    print(text_table([Row(**row) for row in record["rows"]], record["densities"]))
    print(f"\nearn their place: {', '.join(record['earn_their_place']) or 'none'}\nwrote {given['out']}")
    return 0


if __name__ == "__main__":
    run_command(main)
