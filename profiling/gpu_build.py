"""python -m profiling.gpu_build: what is known of the Triton kernels without a GPU, as a table.

Compiles the builds of the launch table for each architecture and reads what became of them: registers, spills, shared
memory, programs on a multiprocessor, loads and stores of local memory, the instructions of the hot loop and whether it
copies ahead; and how fast attention can be at most by a simple model of the A100 and the H100, over tiles without and
with a mask, beside the goal, and at the rate that a product of matrices was measured to reach. What the published
prefills and a token's attention take at least at 8K to 1M tokens follows from it.

    python -m profiling.gpu_build --target sm_90 --head-dims 128
    python -m profiling.gpu_build --json docs/results/gpu_builds.json

The exit status is 3 where a build fails, spills, uses local memory, does not fit, is to copy ahead and waits for each
copy, or, for Hopper, multiplies otherwise than by wgmma with weights from registers and all else from shared memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from artifacts import HeadwiseError, arguments
from artifacts.command_line import FOUND, ArgumentParser, run_command
from profiling.gpu import builds, shapes, sources
from profiling.gpu.compiled import TARGETS
from profiling.gpu.page import markdown
from profiling.gpu.time_model import DEVICES, short_queries
from profiling.progress import phase


def faults(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A line for each kernel with something that it must not have."""
    for piece, kernels in rows.items():
        limit = TARGETS[piece.split()[0]][1]
        for name, facts in kernels.items():
            if facts["spilled"]:
                yield f"{piece} {name}: {facts['spilled']} bytes spilled at {facts['registers']} registers"
            if (facts.get("loop") or {}).get("local"):
                yield f"{piece} {name}: its hot loop reads or writes local memory"
            loop = facts.get("loop") or {}
            if "launch" in facts and facts.get("loop", True) is None:
                yield f"{piece} {name}: no loop multiplies, the compiler gave up"
            elif piece.startswith("sm_90") and "launch" in facts and not 0 < loop["both_shared"] < loop["tensor"]:
                yield f"{piece} {name}: not wgmma of queries and keys in shared memory, and of weights in registers"
            # Of two stages nothing else is wanted.
            ahead = (facts.get("launch") or {}).get("stages", 0) > 2
            if ahead and loop.get("async_copies") and not loop["under_way"]:
                yield f"{piece} {name}: its hot loop waits for each copy that it starts"
            if facts["shared"] > limit:
                yield f"{piece} {name}: {facts['shared']} bytes of shared memory, the device has {limit}"


def _short_queries(rows: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What new tokens on a long past take by the builds for diagonals at head dim 128, where they were compiled."""
    for target, device in DEVICES.items():
        facts = rows.get(f"{target} 128 attention: diagonals, columns, parts", {}).get("attention", {})
        if "predicted" in facts:
            launch, resident = facts["launch"], facts["programs"]
            cycles = max(facts["predicted"]["cycles"].values()) * resident * 128 / launch["keys"]
            how = {"at_once": resident * device.multiprocessors, "rows": launch["rows"]}
            yield from ({"target": target, **each} for each in short_queries(cycles, **how, dim=128, target=target))


def parser() -> ArgumentParser:
    """The command line of python -m profiling.gpu_build."""
    p = ArgumentParser(prog="python -m profiling.gpu_build", description=__doc__)
    p.add_argument("--target", nargs="+", choices=list(TARGETS), default=list(TARGETS), help="(default: all of them)")
    p.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256], metavar="N", help="(default 64 128 256)")
    p.add_argument("--every", action="store_true", help="every sort of call, not only those that differ most")
    arguments.add_json(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point: 0, or 3 where a build is not as it should be."""
    options = parser().parse_args(argv)
    for dim in options.head_dims:
        if not 16 <= dim <= 512:
            raise HeadwiseError(f"--head-dims must be from 16 to 512, got {dim}")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise HeadwiseError("TRITON_INTERPRET is 1: kernels are interpreted in this process, not compiled; unset it")
    names = builds.names(options.target, options.head_dims, every=options.every)
    rows: dict[str, dict[str, Any]] = {}
    failed = []
    with phase("builds", len(names), "builds") as shown:
        for name in names:
            try:
                rows[name] = builds.run(name)
            except Exception as error:
                # A compiler fails in many ways, and the other builds are worth knowing all the same.
                failed.append(f"{name.rstrip(':')}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            shown.update()
    wrong = [*failed, *faults(rows)]
    table = builds.lines(rows)
    parts = list(_short_queries(rows))
    record: dict[str, Any] = {
        "command": arguments.as_typed("profiling.gpu_build", argv),
        "environment": {"triton": version("triton"), "kernels": sources.digest(), "device": None},
        "rows": rows,
        "short queries": parts,
        "shapes": (layers := shapes.of_builds(rows)),
        "wrong": wrong,
    }
    made_from = record["environment"]
    text = [
        f"Triton {made_from['triton']}, kernels {made_from['kernels']}\n",
        *markdown(table),
        *(line for each in shapes.lines(layers) for line in markdown(each)),
        *(markdown(builds.parts_lines(parts)) if parts else []),
        *(f"WRONG  {line}" for line in wrong),
    ]
    arguments.deliver("\n".join(text), record, options.json)
    return FOUND if wrong else 0


if __name__ == "__main__":
    run_command(main)
