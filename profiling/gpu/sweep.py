"""Times every build of the attention kernel that fits, so that the launch table need not be guessed.

The step "builds" compiles them, several at a time, into Triton's cache on disk; the step "sweep" times one after the
other. A build whose result is wrong has no time. The published sizes' head dim comes first, "other" ones much later.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

import torch

from kernels.attention import triton
from kernels.attention.triton_launch import Launch, architecture, choose
from profiling.gpu.attention import make_index, size_of
from profiling.gpu.steps import Rows, Setting
from profiling.speed.attention_speed import check
from profiling.speed.latency import in_turn, medians

# What heads of a layer hold -> the patterns that stand for it. Lists are served one query tile a program.
SORTS = {"paired": ("vertical_slash", "a_shape"), "lists": ("block_sparse",)}
# The steps that time them.
SWEEPS = ("sweep", "other sweep")
_LENGTH, _SMALL_LENGTH = 32_768, 70


def pieces(step: str, setting: Setting) -> list[str]:
    """One for each build, such as "paired 128 rows=2 keys=64 warps=8 stages=3 registers=255"."""
    compiles, other = step.endswith("builds"), step.startswith("other")
    dims = ((64, 256), (32,)) if other else ((128,), (64,))
    found = [
        f"{'compile ' * compiles}{sort} {dim} {_words(build)}"
        for dim, sort in itertools.product(dims[setting.small], SORTS)
        for build in candidates(sort, dim, small=setting.small)
    ]
    # A rehearsal times every build of one head dim.
    return found if not setting.small or step == "sweep" else found[-1:]


def candidates(sort: str, dim: int, *, small: bool = False) -> list[Launch]:
    """Builds that may be the fastest for a sort of heads and a head dim, the most likely first."""
    if small:
        # Small steps are all that an interpreted build can differ in, and descriptors.
        own = Launch(rows=2 if sort == "paired" else 1, keys=32, warps=4, stages=1)
        return [replace(own, descriptors=sort == "paired")]
    one = [
        Launch(rows=1, keys=keys, warps=warps, stages=stages)
        for keys, warps, stages in ((64, 4, 3), (64, 4, 2), (64, 4, 4), (32, 4, 3), (32, 4, 4), (64, 8, 3))
    ]
    # Of 128 registers a thread two programs fit a multiprocessor, of more one.
    two = [
        Launch(rows=2, keys=keys, warps=8, stages=stages, registers=registers)
        for keys, stages, registers in (
            (128, 3, 255), (32, 3, 128), (64, 3, 255), (32, 4, 128), (128, 2, 255), (64, 4, 255), (32, 4, 255),
        )
    ]  # fmt: skip
    if dim > 128:
        one = [Launch(rows=1, keys=keys, warps=8, stages=stages) for keys, stages in ((32, 3), (64, 2), (32, 2))]
        two = [Launch(rows=2, keys=32, warps=8, stages=stages, registers=255) for stages in (3, 2)]
    found = one if sort == "lists" else two + one
    return found + [replace(each, descriptors=True) for each in found[:3]] if _describes() else found


def _describes() -> bool:
    """Whether the device has a copy engine that reads by descriptors; where there is no device, as if it had."""
    if not torch.cuda.is_available():
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability() >= (9, 0)


def timed(steps: Mapping[str, Any]) -> Rows:
    """The rows of both sweeps of a record's steps."""
    return {piece: row for name in SWEEPS if name in steps for piece, row in steps[name]["rows"].items()}


def run(piece: str, setting: Setting) -> dict[str, Any]:
    """Seconds of a launch by this build and by the table's, in turn; where it only compiles, whether it is right."""
    words = piece.split()
    only = words[0] == "compile"
    sort, dim, *words = words[only:]
    return (_right if only else _timed)(sort, int(dim), build_of(words), setting)


def build_of(words: Sequence[str]) -> Launch:
    """The build that a piece's words say."""
    values = {name: int(value) for name, value in (word.split("=") for word in words)}
    return Launch(**values | {"descriptors": "descriptors" in values})  # type: ignore[arg-type]


def _words(build: Launch) -> str:
    return " ".join(f"{name}={value}" for name, value in asdict(build).items() if type(value) is int) + (
        " descriptors=1" if build.descriptors else ""
    )


@cache
def _problem(sort: str, dim: int, setting: Setting) -> tuple[Any, Any, Any, Any]:
    size = replace(size_of(_SMALL_LENGTH if setting.small else _LENGTH, setting), head_dim=dim)
    return make_index(size, SORTS[sort], setting)


def _right(sort: str, dim: int, build: Launch, setting: Setting) -> dict[str, Any]:
    q, k, v, index = _problem(sort, dim, setting)
    out, _ = triton.sparse_attention(q, k, v, index, scale=dim**-0.5, softcap=None, launch=build)
    check(out, q, k, v, index, "this build")
    return {}


def _timed(sort: str, dim: int, build: Launch, setting: Setting) -> dict[str, Any]:
    _right(sort, dim, build, setting)
    q, k, v, index = _problem(sort, dim, setting)
    target = architecture(q.device)
    own = choose(target, dim=dim, itemsize=q.element_size(), has_tiles=index.tiles.numel() > 0)
    runs = {
        name: partial(triton.sparse_attention, q, k, v, index, scale=dim**-0.5, softcap=None, launch=launch)
        for name, launch in (("this", build), ("table", own))
    }
    seconds = medians(in_turn(runs, repeats=0 if setting.small else 5, device=setting.device))
    return {
        "sort": sort, "dim": dim, "build": asdict(build), "target": target, "own": build == own,
        "seconds": seconds["this"], "table_seconds": seconds["table"], "flops": float(index.flops(dim).sum()),
    }  # fmt: skip


def fastest(rows: Rows) -> dict[str, dict[str, Any]]:
    """Of each sort and head dim the row of the fastest build, against the table's timed beside it.

    Where that one reads by descriptors, which not every call has, also the fastest that does not.
    """
    best: dict[str, dict[str, Any]] = {}
    for row in rows.values():
        key = f"{row['sort']} {row['dim']}" + " by descriptors" * row["build"]["descriptors"]
        if key not in best or row["seconds"] < best[key]["seconds"]:
            best[key] = dict(row)
    for key, row in list(best.items()):
        other = best.get(f"{row['sort']} {row['dim']}", row)
        if row["build"]["descriptors"] and other["seconds"] < row["seconds"]:
            del best[key]
    return best


def lines(rows: Rows) -> list[Sequence[str]]:
    """Every build; the fastest of its sort and head dim is marked."""
    measured = [row for row in rows.values() if row]
    if not measured:
        return [("builds that compile and are right",), (str(len(rows)),)]
    best = fastest(rows)
    table: list[Sequence[str]] = [("heads", "dim", "build", "ms", "TF/s", "x the table's", "")]
    for row in sorted(measured, key=lambda row: (-row["dim"], row["sort"], row["seconds"])):
        first = any(all(row[name] == each[name] for name in ("sort", "dim", "build")) for each in best.values())
        table.append(
            (
                row["sort"], str(row["dim"]), _words(Launch(**row["build"])), f"{1e3 * row['seconds']:.2f}",
                f"{row['flops'] / row['seconds'] / 1e12:.0f}", f"{row['table_seconds'] / row['seconds']:.2f}",
                "fastest" if first else "",
            )
        )  # fmt: skip
    return table
