"""What is known of a build without a GPU: registers, spills, shared memory, its hot loop, and how fast it can be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from kernels.attention.triton_launch import Launch
from kernels.index import TILE
from profiling.gpu.compiled import DESCRIBED, EIGHT_BITS, TARGETS, Build
from profiling.gpu.machine_code import hot_loops, whole
from profiling.gpu.steps import Rows, Setting
from profiling.gpu.time_model import DEVICES, predict, programs
from profiling.gpu.variants import (
    DECODE_VARIANTS,
    VARIANTS,
    compile_choice,
    compile_decode,
    compile_estimate,
    compile_fill,
    compile_for,
    compile_scores,
    compile_tables,
)

# Operations a second on computed tiles that head dim 128 is to reach, in units of the device's own.
GOAL = 450e12 / 989e12
# Of the sorts of calls those that differ most.
ATTENTION = (
    "diagonals, columns", "lists", "diagonals, lists, columns", "diagonals, columns, parts", "a serving engine",
    "a serving engine, fp8", "diagonals, columns, descriptors", "lists, descriptors",
)  # fmt: skip
# Those whose heads the sweep times, by its name for them.
SORTS = {"diagonals, columns": "paired", "lists": "lists"}
DECODE = ("all keys", "tokens, scores")


def names(targets: Sequence[str], dims: Sequence[int], *, every: bool = False) -> list[str]:
    """The builds of a table, such as "sm_90 128 attention: lists"; `every` sort of call, or those that differ most."""
    attention, decode = (tuple(VARIANTS), tuple(DECODE_VARIANTS)) if every else (ATTENTION, DECODE)
    kinds = [f"attention: {name}" for name in attention] + [f"decode: {name}" for name in decode] + ["builders:"]
    return [
        f"{target} {dim} {kind}"
        for target, dim, kind in itertools.product(targets, dims, kinds)
        if ("descriptors" not in kind or (target in DESCRIBED and dim <= 256 and not dim & (dim - 1)))
        and ("fp8" not in kind or target in EIGHT_BITS)
    ]


def pieces(step: str, setting: Setting) -> list[str]:
    """See profiling.gpu.steps: the builds of this device; in a rehearsal one of an H100's."""
    if setting.small:
        return ["sm_90 64 attention: lists"]
    if torch.version.hip is not None or not torch.cuda.is_available():
        return []
    target = "sm_{}{}".format(*torch.cuda.get_device_capability())
    return names([target], [128, 64, 256]) if target in TARGETS else []


def run(piece: str, setting: Setting | None = None) -> dict[str, Any]:
    """Compile what a name says; facts of each kernel by its name."""
    place, _, variant = piece.partition(":")
    target, dim, kind = place.split()
    how: dict[str, Any] = {"head_dim": int(dim), "dtype": torch.bfloat16}
    if kind == "attention":
        launch, build = compile_for(target, **how, **VARIANTS[variant.strip()])
        itemsize = VARIANTS[variant.strip()].get("cache", torch.bfloat16).itemsize
        return {"attention": _facts(build, target, launch, dim=int(dim), itemsize=itemsize)}
    if kind == "decode":
        built = compile_decode(target, **how, **DECODE_VARIANTS[variant.strip()])
    else:
        built = {
            name + (f", pages of {page}" if page else ""): build
            for page in (None, 64, 16)
            for name, build in compile_estimate(target, **how, page=page).items()
        }
        built |= {"choice": compile_choice(target, n=16_385)}
        built |= {"choice of a layer": compile_fill(target), "tables": compile_tables(target)}
        built |= {"scores of a prompt": compile_scores(target, **how)}
    return {name: _facts(build, target) for name, build in built.items()}


def _facts(build: Build, target: str, launch: Launch | None = None, **of: int) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "registers": build.registers, "spilled": build.spilled, "shared": build.shared, "warps": build.warps,
    }  # fmt: skip
    if not build.machine:
        return facts
    loops = hot_loops(build.machine)
    facts |= {"programs": programs(build, target), "local": whole(build.machine).local}
    facts |= {"loop": asdict(loops[0]) if loops else None, "wgmma": "wgmma" in build.assembly}
    if launch is not None:
        facts["launch"] = asdict(launch)
        if loops and target in DEVICES:
            sizes = {"queries": launch.rows * TILE, "keys": launch.keys, **of}
            best, *rest = (predict(loop, build, target, **sizes) for loop in loops)
            facts["predicted"] = asdict(best)
            # The loop of tiles that carry a mask comes next.
            facts["masked"] = asdict(rest[0]) if rest else None
    return facts


def beside_measured(predicted: Rows, swept: Rows, product: float | None = None) -> list[Sequence[str]]:
    """A line for each of the table's builds that was both compiled here and timed by the sweep; else only a header.

    product: operations a second of a matrix product on this device, to whose clock the limits are also scaled.
    """
    head = ("heads", "dim", "build", "at most TF/s", "bound by", "at the product's rate", "measured TF/s", "share")
    table: list[Sequence[str]] = [head]
    for piece, kernels in predicted.items():
        target, dim, *_ = piece.split()
        facts = kernels.get("attention", {})
        for row in swept.values():
            if row and facts.get("predicted") and (row["dim"], row["build"]) == (int(dim), facts["launch"]):
                most, found = facts["predicted"]["flops"], row["flops"] / row["seconds"]
                if SORTS.get(piece.partition(": ")[2].removesuffix(", descriptors")) == row["sort"]:
                    scaled = "-" if product is None else f"{most * product / DEVICES[target].flops / 1e12:.0f}"
                    numbers = (scaled, f"{found / 1e12:.0f}", f"{found / most:.0%}")
                    build = ", ".join(f"{name} {row['build'][name]}" for name in ("rows", "keys", "warps", "stages"))
                    build += ", descriptors" * row["build"]["descriptors"]
                    bound = facts["predicted"]["bound"]
                    table.append((row["sort"], dim, build, f"{most / 1e12:.0f}", bound, *numbers))
    return table


def lines(rows: Rows) -> list[Sequence[str]]:
    """A line for each kernel. TF/s are what the time model allows at most."""
    head = ("build", "kernel", "registers", "spilled", "local", "shared", "programs", "loop", "tensor", "copies")
    table: list[Sequence[str]] = [(*head, "at most TF/s", "with a mask", "bound by", "at a product's rate", "goal")]
    for piece, kernels in rows.items():
        for name, facts in kernels.items():
            loop, best = facts.get("loop") or {}, facts.get("predicted")
            copies = "TMA" if loop.get("bulk_copies") else "cp.async" if loop.get("async_copies") else "-"
            if copies == "cp.async" and not loop.get("under_way"):
                copies = "cp.async, waited for"
            masked, device = facts.get("masked"), DEVICES.get(piece.split()[0])
            goal = f"{GOAL * device.flops / 1e12:.0f}" if best and device else "-"
            scaled = "-"
            if best and device and device.product:
                scaled = f"{best['flops'] * device.product / device.flops / 1e12:.0f}"
            table.append(
                (
                    piece.rstrip(":"), name, str(facts["registers"]), str(facts["spilled"]),
                    str(facts.get("local", "-")), str(facts["shared"]), str(facts.get("programs", "-")),
                    str(loop.get("instructions", "-")), str(loop.get("tensor", "-")), copies if loop else "-",
                    f"{best['flops'] / 1e12:.0f}" if best else "-", f"{masked['flops'] / 1e12:.0f}" if masked else "-",
                    best["bound"] if best else "-", scaled, goal,
                )
            )  # fmt: skip
    return table


def parts_lines(found: Sequence[dict[str, Any]]) -> list[Sequence[str]]:
    """A line for each number of new tokens on a past."""
    head = ("device", "new tokens", "past", "programs", "parts", "at least, in one part", "at least, in parts")
    return [
        head,
        *(
            (
                row["target"], f"{row['new']:,}", f"{row['past']:,}", str(row["programs"]), str(row["parts"]),
                f"{1e3 * row['one']:.2f} ms", f"{1e3 * row['seconds']:.2f} ms",
            )
            for row in found
        ),
    ]  # fmt: skip
