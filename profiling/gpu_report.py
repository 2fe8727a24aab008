"""python -m profiling.gpu_report: everything that is worth knowing about Headwise on this GPU, in minutes.

Self-check, the tests that need a GPU, a sweep of the builds of the attention kernel, attention at 8K to 1M tokens
beside torch's kernels, FlexAttention, FlashInfer and vLLM, decode and offload, and an 8B shape from end to end; what is
worth most comes first. A piece has a time limit and runs outside of this process: a crash, a hang or a lack of memory
costs that piece alone.

    python -m profiling.gpu_report --out gpu/ --minutes 9

gpu/report.md is the page and gpu/report.json the figures, both written anew after each step. The same command again
does what is left and what failed. The fastest builds are kept in the cache folder and used from then on.
--rehearse runs the same on the CPU in Triton's interpreter, at tiny sizes: its times mean nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from artifacts import HeadwiseError, arguments
from artifacts.command_line import FOUND, ArgumentParser, run_command
from artifacts.files import atomic_write
from kernels.native.build import cache_folder
from profiling.gpu import builds_kept, sources, sweep
from profiling.gpu.page import page
from profiling.gpu.steps import STEPS, Setting, Step
from profiling.gpu.supervisor import Idle, Outcome, end_all, run_pieces
from profiling.ledger import Ledger, Unit
from profiling.progress import phase

# What workers are started with in a rehearsal.
_REHEARSAL = {
    "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
}  # fmt: skip
_SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float16", "small": True}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Where the report goes, how long it may take, and which steps it has; all of them without names."""

    out: Path
    minutes: float
    setting: Setting
    steps: tuple[str, ...] = ()
    fresh: bool = False
    command: str = ""

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise HeadwiseError(f"--minutes must be above 0, got {self.minutes}")
        if (self.setting.model is None) != (self.setting.artifact is None):
            raise HeadwiseError("--model and --artifact go together: an artifact is made for one model")

    @property
    def chosen(self) -> list[Step]:
        """The steps to do, in their order."""
        return [step for step in STEPS if not self.steps or step.name in self.steps]


def run(config: Config) -> dict[str, Any]:
    """Do what is left of the report until the time is up, and write it; the record.

    Raises:
        HeadwiseError: torch finds no such device, the folder cannot be written, or it holds a report of another device
            or of other kernels.
    """
    deadline = time.monotonic() + 60 * config.minutes
    # One cache of compiled kernels for all steps, which is the tests' own.
    environment = {"TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR") or str(cache_folder().parent / "triton")}
    environment |= _REHEARSAL if config.setting.small else {}
    _make(config.out / "logs")
    idle: Idle | None = [] if config.setting.small else None
    try:
        return _all_steps(config, deadline, environment, idle)
    finally:
        end_all(idle or [])


def _all_steps(config: Config, deadline: float, environment: dict[str, str], idle: Idle | None) -> dict[str, Any]:
    facts = _facts(config, environment, idle)
    record: dict[str, Any] = {
        "command": config.command, "environment": facts, "setting": asdict(config.setting), "steps": {},
    }  # fmt: skip
    settings = {"environment": facts, "setting": asdict(config.setting), "kernels": sources.digest()}
    with Ledger(config.out / "report", "gpu", settings=settings, fresh=config.fresh) as ledger:
        for step in config.chosen:
            if not (pieces := step.load().pieces(step.name, config.setting)):
                continue
            record["steps"][step.name] = _step(step, pieces, config, ledger, deadline, environment, idle)
            if step.name in sweep.SWEEPS:
                timed = sweep.timed(record["steps"])
                record["table"] = builds_kept.keep(timed, facts, config.out, config.setting)
            _write(record, config.out)
    return record


def _step(
    step: Step,
    pieces: Sequence[str],
    config: Config,
    ledger: Ledger,
    deadline: float,
    environment: dict[str, str],
    idle: Idle | None,
) -> dict[str, Any]:
    """One step's record: the rows of its pieces, what failed, and what there was no time for."""
    units = {piece: ledger.unit(f"{step.name}: {piece}") for piece in pieces}
    failures = {piece: ledger.unit(f"{step.name}: {piece}", {"failed": True}) for piece in pieces}
    rows = {piece: found["row"] for piece in pieces if (found := ledger.get(units[piece])) is not None}
    # What has failed before has its turn when nothing else is left.
    todo = sorted((piece for piece in pieces if piece not in rows), key=lambda piece: failures[piece] in ledger)
    failed: dict[str, str] = {}
    seconds = 0.0
    with phase(step.name, len(pieces), "pieces") as shown:
        for _ in rows:
            shown.skip()

        def done(outcome: Outcome) -> None:
            nonlocal seconds
            seconds += outcome.seconds
            if outcome.error is not None:
                failed[outcome.piece] = outcome.error
                ledger.put(failures[outcome.piece], {"error": outcome.error})
            else:
                rows[outcome.piece] = _kept(ledger, units[outcome.piece], outcome)
            shown.update()

        left = todo
        if step.compiles:
            environment, idle = environment | {"TRITON_INTERPRET": "0"}, None
        if todo and time.monotonic() < deadline:
            log = config.out / "logs" / f"{step.name.replace(' ', '_')}.log"
            left = run_pieces(
                step, todo, config.setting, done, deadline=deadline, log=log, environment=environment, idle=idle
            )
    ordered = {piece: rows[piece] for piece in pieces if piece in rows}
    table = [list(line) for line in step.load().lines(ordered)] if ordered else []
    return {
        "title": step.title, "seconds": seconds, "rows": ordered, "failed": failed, "not_run": left, "table": table,
    }  # fmt: skip


def _kept(ledger: Ledger, unit: Unit, outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = ledger.put(unit, {"row": outcome.found})["row"]
    return found


def _facts(config: Config, environment: dict[str, str], idle: Idle | None) -> dict[str, Any]:
    """Device and versions, as a process of its own finds them."""
    outcomes: list[Outcome] = []
    log = config.out / "logs" / "facts.log"
    end = time.monotonic() + 180
    run_pieces(
        STEPS[0], ["facts"], config.setting, outcomes.append, deadline=end, log=log, environment=environment, idle=idle
    )
    if not outcomes or outcomes[0].found is None:
        why = outcomes[0].error if outcomes else "its process said nothing for three minutes"
        raise HeadwiseError(f"the device {config.setting.device} cannot be used: {why}")
    return outcomes[0].found


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise HeadwiseError(f"cannot make the folder {folder}: {why}") from None


def _write(record: dict[str, Any], out: Path) -> None:
    atomic_write(out / "report.json", json.dumps(record, indent=1).encode() + b"\n")
    atomic_write(out / "report.md", page(record).encode())


def unfinished(record: dict[str, Any]) -> Iterator[str]:
    """A line for each step of which something failed or is left."""
    for name, step in record["steps"].items():
        if step["failed"]:
            yield f"{name}: {len(step['failed'])} failed, the first is {next(iter(step['failed']))}"
        if step["not_run"]:
            yield f"{name}: {len(step['not_run'])} not run, for want of time"


def parser() -> ArgumentParser:
    """The command line of python -m profiling.gpu_report."""
    p = ArgumentParser(prog="python -m profiling.gpu_report", description=__doc__)
    p.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder of the report")
    p.add_argument("--minutes", type=float, default=9.0, help="when to stop (default %(default)g)")
    p.add_argument("--steps", nargs="+", choices=[step.name for step in STEPS], metavar="STEP", default=[],
                   help=f"some steps only: {', '.join(step.name for step in STEPS)}")  # fmt: skip
    arguments.add_device(p, "cuda")
    p.add_argument("--model", metavar="MODEL", help="also measure this model, with --artifact")
    p.add_argument("--artifact", metavar="CFG", help="its artifact, with a decode section")
    p.add_argument("--rehearse", action="store_true", help="on the CPU, interpreted, at tiny sizes")
    p.add_argument("--fresh", action="store_true", help="discard what the folder holds instead of going on with it")
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point: 0, or 3 where something failed."""
    options = parser().parse_args(argv)
    given = {"model": options.model, "artifact": options.artifact}
    how = _SMALL if options.rehearse else {"device": options.device}
    config = Config(
        out=options.out,
        minutes=options.minutes,
        setting=Setting(**how, **given),
        steps=tuple(options.steps),
        fresh=options.fresh,
        command=arguments.as_typed("profiling.gpu_report", argv),
    )
    record = run(config)
    print(page(record))
    lines = list(unfinished(record))
    for line in lines:
        print(f"LEFT  {line}")
    print(f"wrote {options.out / 'report.md'}" + ("; the same command again does what is left" if lines else ""))
    return FOUND if any(step["failed"] for step in record["steps"].values()) else 0


if __name__ == "__main__":
    run_command(main)
