"""python -m profiling.scaling: how much attention a fixed loss takes as the context grows: loss, density, and length.

Long prompts are run densely, and with tiles chosen by their exact attention mass at several densities: the upper limit
of choosing tiles. A token at position n attends to that share of the n tiles before it, so one prompt has the loss at
every length up to its own. The density at which KL stays fixed is read off at octaves of the position; the tokens that
it comes to grow with a power of the length, which is fitted for each prompt: their mean, and from 4 prompts on its 95%
interval by Student's t. Below 1 the budget grows slower than the length (Sparse Frontier, Nawrot et al. 2025). Every
run is a unit of a ledger beside the output.

python -m profiling.scaling --model gemma3 --length 16384 --samples 4 --out scaling.json
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from artifacts import HeadwiseError, arguments, load
from artifacts.command_line import ArgumentParser, run_command
from artifacts.files import atomic_write
from artifacts.page_layout import aligned
from kernels.index import TILE
from profiling.environment import environment
from profiling.evaluation.record import as_json
from profiling.inside.chosen_tiles import attend_to, mass_scores
from profiling.inside.oracle import choosing
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel, load_model
from profiling.pictures.drawing import line_style, new_figure, save
from profiling.progress import bar
from profiling.prompts.prompt import digest, make_prompts, parse_task
from profiling.quality.intervals import student
from profiling.quality.logits import DenseLogits
from runtime import apply_dense
from runtime.fingerprint import fingerprint

# The shortest octave of positions that is read ends here at the earliest.
_FIRST = 2048
# Prompts whose powers have an interval: of two or three it says nothing.
_LEAST = 4


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """One run of the command. densities: of the causal tiles of each row. places: tokens of a prompt looked at."""

    model: str
    out: Path
    length: int = 16384
    task: str = "prose"
    densities: tuple[float, ...] = (0.03, 0.06, 0.12, 0.25)
    samples: int = 4
    places: int = 256
    seed: int = 6000
    dtype: str = "bfloat16"
    device: str = "cpu"
    artifact: Path | None = None
    fresh: bool = False
    command: str = ""

    def __post_init__(self) -> None:
        parse_task(self.task)
        if self.length < 2 * _FIRST:
            raise HeadwiseError(f"--length must be at least {2 * _FIRST}, got {self.length}")
        if self.samples < 2:
            raise HeadwiseError(f"--samples must be at least 2, got {self.samples}")
        if len(set(self.densities)) < 2 or any(not 0 < density < 1 for density in self.densities):
            told = " ".join(f"{density:g}" for density in self.densities)
            raise HeadwiseError(f"--density must be at least two values between 0 and 1, got {told}")


def run(config: Scaling) -> dict[str, Any]:
    """Measure what the ledger lacks; write the figures as JSON and the picture beside it as PNG and SVG.

    Returns:
        What the JSON holds.

    Raises:
        HeadwiseError: anything that the user has to put right.
    """
    growth = None if config.artifact is None else load(config.artifact).prefill.growth
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    weights = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision).weights_sha256
    settings = {"scaling": 1, "weights": weights, "dtype": config.dtype, "device": config.device}
    densities = tuple(sorted(set(config.densities)))
    with Ledger(config.out, "scaling", settings=settings, fresh=config.fresh) as ledger:
        kl = _measured(config, loaded, densities, ledger)
    places = np.linspace(0, config.length - 1, kl.shape[2])
    parts = [(places >= first) & (places < last) for first, last in octaves(config.length)]
    means = np.stack([kl[:, :, part].mean(2) for part in parts], axis=2)
    # The mean of an octave's positions on a scale on which their powers are straight lines.
    lengths = [round(float(np.exp(np.log(places[part]).mean()))) for part in parts]
    record = {
        "command": config.command,
        "model": loaded.name,
        "settings": {**settings, "task": parse_task(config.task).name, "length": config.length, "seed": config.seed},
        "environment": environment(config.device),
        "densities": list(densities),
        "lengths": lengths,
        "kl": means.tolist(),
        **asdict(fitted(means, densities, lengths)),
        "growth": None if growth is None else growth.model_dump(mode="json"),
    }
    atomic_write(config.out, as_json(record))
    save(_figure(record), config.out.with_suffix(""))
    return record


def octaves(length: int) -> list[tuple[int, int]]:
    """The positions that are read off together, from the first one to the one after the last: half the length each."""
    count = int(np.log2(length / _FIRST)) + 1
    return [(length >> at + 1, length >> at) for at in reversed(range(count))]


def _measured(config: Scaling, loaded: LoadedModel, densities: Sequence[float], ledger: Ledger) -> np.ndarray:
    """KL to dense attention in nats, (prompts, densities, places)."""
    how: dict[str, Any] = {"length": config.length, "samples": config.samples, "seed": config.seed}
    prompts = make_prompts(config.task, loaded.tokenizer, **how)
    found: list[list[Any]] = []
    for prompt in bar(prompts, desc="prompts"):
        units = [ledger.unit(f"{density:g}/{config.places}/{digest([prompt])}") for density in densities]
        logits = DenseLogits(loaded.model, [prompt], places=config.places, at_once=False)
        for density, unit in zip(densities, units, strict=True):
            if unit not in ledger:
                with apply_dense(loaded.model):
                    logits.learn()
                attend = partial(attend_to, scores=mass_scores, share=density, by_mass=False, tail=0)
                with choosing(loaded.model, attend):
                    ledger.put(unit, logits.drift().kl.tolist())
        found.append([ledger.get(unit) for unit in units])
    return np.array(found)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """target: the KL that is kept. budgets: tokens that a query attends to for it, at each length, by the mean KL.

    exponents: of the length, which the budget of each prompt grows with: at that KL, or the nearest that this prompt
        had at every length; prompts that had none have no exponent. exponent: their mean. low, high: its 95% interval
        by Student's t; None of fewer than 4 prompts.
    """

    target: float
    budgets: list[float]
    exponents: list[float]
    exponent: float
    low: float | None
    high: float | None


def fitted(kl: np.ndarray, densities: Sequence[float], lengths: Sequence[int]) -> Fit:
    """The power of the length by which the budget of a fixed KL grows.

    Args:
        kl: (prompts, densities, lengths) in nats.
        densities: ascending.
        lengths: ascending.

    Raises:
        HeadwiseError: no KL is within what was measured at every length.
    """
    mean = kl.mean(0)
    least, most = _reached(mean)
    if least >= most:
        raise HeadwiseError("no loss was reached at every length: measure more densities, further apart (--density)")
    target = float(np.sqrt(max(least, 1e-9) * most))
    reached = [(one, _reached(one)) for one in kl]
    slopes = [
        _slope(_budgets(one, float(np.clip(target, least, most)), densities, lengths), lengths)
        for one, (least, most) in reached
        if least < most
    ]
    if not slopes:
        raise HeadwiseError("no prompt reached a loss at every length: measure more densities (--density)")
    found, known = student(slopes), len(slopes) >= _LEAST
    return Fit(
        target=target,
        budgets=_budgets(mean, target, densities, lengths).tolist(),
        exponents=slopes,
        exponent=found.value,
        low=found.low if known else None,
        high=found.high if known else None,
    )


def _reached(kl: np.ndarray) -> tuple[float, float]:
    """The least and the most KL (densities, lengths) that were measured at every length."""
    return float(kl.min(0).max()), float(kl.max(0).min())


def _budgets(kl: np.ndarray, target: float, densities: Sequence[float], lengths: Sequence[int]) -> np.ndarray:
    """Tokens a query for the target at each length, log KL over their logarithm between what was measured, or its ends.

    A row has two tiles at least, its own and the first, whatever the density.
    """
    x = np.log(np.maximum(np.outer(densities, lengths), 2 * TILE))
    y = np.log(np.maximum(kl, 1e-9))
    # np.interp wants what it looks up to ascend: KL falls with density.
    found = [np.interp(-np.log(target), np.maximum.accumulate(-y[:, at]), x[:, at]) for at in range(len(lengths))]
    return np.array(np.exp(found))


def _slope(budgets: np.ndarray, lengths: Sequence[int]) -> float:
    return float(np.polyfit(np.log(lengths), np.log(budgets), 1)[0])


def _figure(record: Mapping[str, Any]) -> Any:
    """KL over density at each length, and the budget over the length with its fit."""
    caption = f"{record['model']}, {record['settings']['task']}; drawn: {record['command']}"
    figure = new_figure(8.0, 3.4, caption)
    left, right = figure.subplots(1, 2)
    means = np.array(record["kl"]).mean(0)
    for at, length in enumerate(record["lengths"]):
        left.plot(record["densities"], means[:, at], marker="o", label=f"{length:,} tokens", **line_style(at))
    left.axhline(record["target"], color="#808080", linewidth=0.8)
    left.set_xlabel("share of the tiles before a token")
    left.set_ylabel("KL to dense attention, nats a token")
    left.legend(fontsize=7, frameon=False)
    lengths, budgets = np.array(record["lengths"]), np.array(record["budgets"])
    right.plot(lengths, budgets, marker="o", **line_style(0))
    middle = np.exp(np.log(budgets).mean()) * (lengths / np.exp(np.log(lengths).mean())) ** record["exponent"]
    told = f"length to the {record['exponent']:.2f}{_bounds(record)}"
    right.plot(lengths, middle, label=told, **line_style(1))
    right.set_xlabel("tokens before")
    right.set_ylabel(f"tokens attended to at KL {record['target']:.3g}")
    right.legend(fontsize=7, frameon=False)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=10 if axes is left else 2)
        axes.grid(color="#E0E0E0", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def table(record: Mapping[str, Any]) -> str:
    """KL by density and length, the budgets, and the exponent."""
    means = np.array(record["kl"]).mean(0)
    lines = [["density", *(f"{length:,}" for length in record["lengths"])]]
    lines += [
        [f"{density:g}", *(f"{value:.4f}" for value in row)]
        for density, row in zip(record["densities"], means, strict=True)
    ]
    lines.append([f"tokens at KL {record['target']:.3g}", *(f"{budget:,.0f}" for budget in record["budgets"])])
    bounds = _bounds(record) or f" ({len(record['exponents'])} prompts, too few for an interval)"
    told = f"the budget grows with the length to the {record['exponent']:.2f}{bounds}"
    growth = record["growth"]
    if growth is not None:
        powers = [
            f"{kind}.{name} {value:.2f}" for kind, some in growth["powers"].items() for name, value in some.items()
        ]
        told += f"\nthe artifact's sizes grow with: {', '.join(powers)}"
    return "\n".join([*aligned(lines), told])


def _bounds(record: Mapping[str, Any]) -> str:
    return "" if record["low"] is None else f" ({record['low']:.2f} to {record['high']:.2f})"


def parser() -> ArgumentParser:
    """The command line of python -m profiling.scaling."""
    p = ArgumentParser(prog="python -m profiling.scaling", description=__doc__)
    arguments.add_model(p)
    arguments.add_length(p, f"prompt length (default {Scaling.length})", default=Scaling.length)
    arguments.add_task(p, "what prompts are made of (default prose)", several=False, default=Scaling.task)
    p.add_argument("--density", dest="densities", nargs="+", type=float, default=list(Scaling.densities))
    p.add_argument("--samples", type=int, default=Scaling.samples, help="prompts (default 4)")
    p.add_argument("--places", type=int, default=Scaling.places, help="tokens of a prompt looked at (default 256)")
    p.add_argument("--artifact", type=Path, help="whose growth of sizes is named beside")
    arguments.add_out(p, "JSON file; PNG and SVG of the same name, and the ledger, are kept beside it")
    arguments.add_seed(p, Scaling.seed)
    p.add_argument("--fresh", action="store_true", help="discard what an interrupted run left")
    arguments.add_dtype(p)
    arguments.add_device(p)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point."""
    given = vars(parser().parse_args(argv))
    densities = tuple(given.pop("densities"))
    record = run(Scaling(**given, densities=densities, command=arguments.as_typed("profiling.scaling", argv)))
    print(f"{table(record)}\n\nwrote {given['out']} and its picture")
    return 0


if __name__ == "__main__":
    run_command(main)
