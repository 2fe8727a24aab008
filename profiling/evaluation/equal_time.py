"""Single kinds that are given as much time as the artifact takes, and what is left of dense attention under each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from profiling.environment import environment
from profiling.evaluation.method_table import METHODS
from profiling.evaluation.methods import Methods
from profiling.evaluation.side_by_side import compared, timed
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel
from profiling.pictures.page_parts import number, table
from profiling.prompts.held_out import seeded_prompts
from profiling.prompts.prompt import Prompt
from profiling.quality.method import Method
from profiling.quality.trials import VERSION
from profiling.speed.baselines import HEADWISE
from runtime import Headwise

TASKS = ("line_asked", "chain", "prose")
# Timings by which sizes are fitted, and the share of the artifact's time that is near enough to it.
_TRIES, _NEAR = 4, 0.03
# Of a prompt are compared: with prompts as the unit more of them tell more than more tokens of each.
_PLACES = 128


def equal_time(
    loaded: LoadedModel,
    methods: Methods,
    names: Sequence[str],
    ledger: Ledger,
    *,
    length: int,
    tasks: Sequence[str] = TASKS,
    samples: int = 6,
    seeds: Sequence[int],
    repeats: int = 3,
) -> dict[str, Any]:
    """Of the artifact, and of those of `names` that have one size for all heads, fitted to its time: KL and loss.

    The sizes follow from the attention of one prompt, index builds included, all in turn; the seconds that are
    reported are of the last timing, which may be a little apart. Kept in the ledger.

    samples: prompts of each task, in all; as many of each seed, and so a few more where they do not share out.
    """
    sized = [name for name in names if name in METHODS and METHODS[name].sizes]
    own = methods.make(HEADWISE, length)
    each = -(-samples // len(seeds))
    told_seeds = "+".join(map(str, seeds))
    asked = f"{own.identity}/{length}/{'+'.join((*sized, *tasks))}/{each}/{told_seeds}/{_PLACES}/{repeats}"
    where = "/".join(environment(loaded.model.device).values())

    how: dict[str, Any] = {"length": length, "samples": each, "seeds": seeds, "seen": methods.seen}
    prompts = {task: seeded_prompts(task, loaded.tokenizer, **how).prompts for task in tasks}

    def once(what: str, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return dict(ledger.once(ledger.unit(f"{what} in equal time/{VERSION}/{asked}/{where}"), find))

    fit = once("seconds", lambda: _fitted(loaded, methods, sized, prompts[tasks[0]][0], repeats=repeats))
    made = _made(methods, fit["densities"], length)
    seconds = fit["seconds"]

    def find() -> dict[str, Any]:
        densities = {name: each.density or 1.0 for name, each in made.items()}
        some = {name: _served(each) for name, each in made.items()}
        rows = compared(loaded, some, prompts, seconds, densities, places=_PLACES)
        return {"rows": [{**asdict(row), "sizes": made[row.name].sizes} for row in rows]}

    dense = {name: value for name, value in seconds.items() if name not in made}
    told = {"length": length, "samples": each * len(seeds), "tasks": list(tasks), "dense_seconds": dense}
    return {**told, **once("rows", find)}


def _served(method: Method) -> Headwise:
    assert method.headwise is not None
    return method.headwise


def _made(methods: Methods, densities: Mapping[str, float], length: int) -> dict[str, Method]:
    """The artifact and the others, each at its density."""
    others = {name: methods.at(density).make(name, length) for name, density in densities.items()}
    return {HEADWISE: methods.make(HEADWISE, length), **others}


def _fitted(
    loaded: LoadedModel, methods: Methods, names: Sequence[str], prompt: Prompt, *, repeats: int
) -> dict[str, Any]:
    """Densities at which attention takes about as long as the artifact's, and the seconds of all."""
    length = len(prompt.context)
    densities = dict.fromkeys(names, methods.make(HEADWISE, length).density or 1.0)
    for turn in range(_TRIES):
        made = _made(methods, densities, length)
        seconds = timed(loaded, {name: _served(each) for name, each in made.items()}, prompt, repeats=repeats)
        ratios = {name: seconds[HEADWISE] / seconds[name] for name in names}
        if turn == _TRIES - 1 or all(abs(ratio - 1) < _NEAR for ratio in ratios.values()):
            break
        densities = {
            name: min(1.0, max(0.01, (made[name].density or densities[name]) * ratios[name])) for name in names
        }
    return {"densities": densities, "seconds": seconds}


def section(record: Mapping[str, Any]) -> str:
    """The part of a page: a table for each length; empty where nothing was compared."""
    return "".join(_table(found) for found in record.get("equal_time", []))


def _table(found: Mapping[str, Any]) -> str:
    rows = [
        [
            ("text", escape(row["name"])),
            ("text", escape(row["sizes"])),
            ("", number(row["density"])),
            ("", f"{row['seconds']:.3f} s"),
            ("", f"{row['kl']:.4f}{_error(row['kl_error'])}"),
            ("", _apart(row)),
            ("", _chance(row)),
            ("", f"{row['loss']:+.4f}{_error(row['loss_error'])}"),
        ]
        for row in found["rows"]
    ]
    head = ["method", "sizes", "density", "attention", "KL", "less the artifact's", "p", "loss"]
    told = (
        f"Attention of one prefill, index builds included, and nats a token beside dense attention: {found['samples']} "
        f"prompts each of {', '.join(found['tasks'])}. Differences are of pairs of prompts, with 95% intervals; p by a "
        "randomisation test, after Holm's correction for all looks of this page."
    )
    return f"<h2>In the same time, {found['length']:,} tokens</h2>{table(head, rows, told)}"


def _apart(row: Mapping[str, Any]) -> str:
    if row["apart"] is None:
        return "-"
    return f"{row['apart']:+.4f}<small>{row['low']:+.4f} to {row['high']:+.4f}</small>"


def _chance(row: Mapping[str, Any]) -> str:
    """The corrected p-value; pages of earlier versions had none."""
    return "-" if row.get("corrected") is None else f"{row['corrected']:.3g}"


def _error(error: float | None) -> str:
    """Of one prompt alone there is none."""
    return "" if error is None else f" ± {error:.4f}"
