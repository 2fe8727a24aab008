"""python -m search.filters: choose the layers that filter in decode and those that stay dense, for an artifact.

The similarity of layers is measured on a few prompts (or read with --profile), the filter and dense layers that change
what the sparse layers add to the residual stream least are found exactly, and the choice is compared with evenly spaced
and with random filter layers on other prompts. The artifact's other sections stay as they are.

python -m search.filters --model smollm2 --config cfg.yaml --out cfg.yaml --task multi_hop:novel.txt --task kv_retrieval
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from artifacts import Artifact, Decode, HeadwiseError, OmniKV, Similarity, load, update
from artifacts.command_line import ArgumentParser, run_command
from artifacts.files import check_writable
from profiling.ledger import Ledger
from profiling.models.loading import load_model
from profiling.prompts.prompt import TASKS
from profiling.similarities.layer_similarity import DEFAULT_TASKS, SimilarityConfig, measure, resolve
from profiling.similarities.similarity_profile import Profile, load_profile
from runtime.fingerprint import check
from search.filter_layers import (
    Choice,
    Rules,
    best_choice,
    by_hand,
    cheapest,
    evenly_spaced,
    kept,
    random_choices,
    total,
)

if TYPE_CHECKING:
    from artifacts.sidecar import Array

RANDOM_CHOICES = 50
# Held-out prompts are made with another seed.
_OTHER_SEED = 7919


@dataclass(frozen=True, kw_only=True)
class FilterSearch:
    """What to choose by. `profile` is measured if None; `layers` and `dense` are taken instead of the best."""

    model: str
    config: Path
    out: Path
    measured: SimilarityConfig
    profile: Path | None = None
    rules: Rules = field(default_factory=Rules)
    layers: tuple[int, ...] | None = None
    dense: tuple[int, ...] = ()
    min_kept: float | None = None
    max_error: float | None = None
    budget: int | float = 2048
    selector: str = "last"
    window: int = 16
    prefill_ratio: float | None = None
    fresh: bool = False


@dataclass(frozen=True, kw_only=True)
class Score:
    """A choice on some prompts: mean attention mass kept, and summed errors."""

    choice: Choice
    kept: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Found:
    """The choice on the prompts it was made by, and it and others like it on held-out ones."""

    made_by: Score
    held_out: Score
    even: Score
    random: tuple[Score, ...]
    profile: Profile

    @property
    def choice(self) -> Choice:
        return self.made_by.choice

    @property
    def random_kept(self) -> float:
        return float(np.mean([score.kept for score in self.random]))

    @property
    def random_error(self) -> float:
        return float(np.mean([score.error for score in self.random]))


def run(config: FilterSearch) -> tuple[Artifact, Found]:
    """Measure, choose, compare, and write the artifact; a killed run goes on from the prompts that it finished.

    Raises:
        HeadwiseError: anything that the user has to put right; nothing is written then.
    """
    check_writable(config.out)
    artifact = load(config.config)
    former = None if config.profile is None else load_profile(config.profile)
    loaded = load_model(config.model, dtype=config.measured.dtype, device=config.measured.device)
    check(artifact.model, loaded.model)
    if former is not None and former.about["weights_sha256"] != artifact.model.weights_sha256:
        raise HeadwiseError(f"profile {config.profile} is of another model: {former.about['model']}")
    measured = resolve(config.measured, loaded.name, artifact.model.max_positions)
    with Ledger(config.out, "filters", settings=_settings(measured, artifact), fresh=config.fresh) as ledger:
        if former is None:
            former = measure(measured, loaded, ledger)
        choice = choose(config, former)
        again = replace(config.measured, seed=config.measured.seed + _OTHER_SEED, top_k=former.about["top_k"])
        found = compare(choice, former, measure(again, loaded, ledger))
        written = _write(config, artifact, found)
        ledger.remove()
    return written, found


def _settings(measured: SimilarityConfig, artifact: Artifact) -> dict[str, Any]:
    """What all that is measured depends on; the rules are not among it, so that others reuse what is measured."""
    names = ("length", "steps", "seed", "dtype", "device")
    model = {"model": artifact.model.name, "weights": artifact.model.weights_sha256}
    return {**model, **{name: getattr(measured, name) for name in names}}


def _write(config: FilterSearch, artifact: Artifact, found: Found) -> Artifact:
    def change(now: Artifact, arrays: Mapping[str, Array]) -> tuple[Artifact, dict[str, Array]]:
        # Measuring took a while, and other commands write into the same file.
        if now.model != artifact.model:
            raise HeadwiseError(f"{config.config}: was replaced meanwhile by an artifact of another model: start again")
        return with_filters(now, config, found), _arrays(arrays, found)

    return update(config.config, change, out=config.out)


def choose(config: FilterSearch, profile: Profile) -> Choice:
    """The choice that the configuration asks for, by the mean over all tasks."""
    layers, rules = profile.layers, config.rules
    if config.layers is not None:
        return by_hand(layers, rules, config.layers, config.dense)
    if config.min_kept is None and config.max_error is None:
        return best_choice(profile.error(), layers, rules)
    if config.max_error is not None:
        cost, limit = profile.error(), config.max_error
    else:
        assert config.min_kept is not None
        cost, limit = 1 - profile.mass(), (1 - config.min_kept) * len(layers)
    choice = cheapest(cost, layers, rules, limit)
    if choice is None:
        best = score(best_choice(cost, layers, rules), profile)
        wanted = "--max-error" if config.max_error is not None else "--min-kept"
        raise HeadwiseError(
            f"no {rules.most} filter layers and {rules.full(len(layers))} layers in all that attend to everything meet "
            f"{wanted}: {_named(best.choice.filter_layers)} with {_named(best.choice.dense_layers)} dense keep "
            f"{best.kept:.3f} of the mass at an error of {best.error:.4f}; allow more filter layers, a lower --sparse "
            "or a larger budget"
        )
    return choice


def score(choice: Choice, profile: Profile) -> Score:
    """What a choice keeps and changes on the prompts of a profile."""
    layers = profile.layers
    return Score(choice=choice, kept=kept(profile.mass(), layers, choice), error=total(profile.error(), layers, choice))


def compare(choice: Choice, profile: Profile, held_out: Profile) -> Found:
    """The choice on held-out prompts beside evenly spaced and random filter layers: as many, with as many dense."""
    layers, count, dense = held_out.layers, len(choice.filter_layers), choice.dense_layers
    drawn = random_choices(layers, count, dense, samples=RANDOM_CHOICES, seed=0)
    return Found(
        made_by=score(choice, profile),
        held_out=score(choice, held_out),
        even=score(evenly_spaced(layers, count, dense), held_out),
        random=tuple(score(other, held_out) for other in drawn),
        profile=profile,
    )


def with_filters(artifact: Artifact, config: FilterSearch, found: Found) -> Artifact:
    """The artifact with the choice as its decode section."""
    section = OmniKV(
        filter_layers=found.choice.filter_layers,
        dense_layers=found.choice.dense_layers,
        selector=config.selector,  # type: ignore[arg-type]
        window=config.window,
        budget=config.budget,
        prefill_ratio=config.prefill_ratio,
        similarity=Similarity(
            kept=found.held_out.kept,
            evenly_spaced=found.even.kept,
            random=found.random_kept,
            random_samples=len(found.random),
            top_k=found.profile.about["top_k"],
            tasks=tuple(found.profile.tasks),
        ),
    )
    return artifact.model_copy(update={"decode": Decode(omnikv=section)})


def _arrays(arrays: Mapping[str, Array], found: Found) -> dict[str, Array]:
    measured = {"similarity.mass": found.profile.mass(), "similarity.error": found.profile.error()}
    return {**arrays, **{name: array.astype(np.float32) for name, array in measured.items()}}


def report(found: Found) -> str:
    """What was chosen, what it keeps of attention and changes, beside what it is compared with."""
    choice, n = found.choice, len(found.profile.layers)

    def line(what: str, mass: float, error: float, note: str = "") -> str:
        return f"  {what:<21}{mass:8.4f}{error:12.5f}  {note}".rstrip()

    lines = [
        f"filter layers {_named(choice.filter_layers)}; dense {_named(choice.dense_layers)}; "
        f"{n - choice.full} of {n} full-attention layers are sparse",
        f"with the top {found.profile.about['top_k']} tokens",
        f"{'':<27}kept       error",
        line("chosen on", found.made_by.kept, found.made_by.error),
        line("held-out prompts", found.held_out.kept, found.held_out.error),
        line("evenly spaced", found.even.kept, found.even.error, f"({_named(found.even.choice.filter_layers)})"),
        line(f"{len(found.random)} random, mean", found.random_kept, found.random_error),
        line(
            "best of these",
            max(other.kept for other in found.random),
            min(other.error for other in found.random),
        ),
        "kept: attention mass, mean over the layers; error: squared change of the sparse layers' outputs relative to "
        "the residual stream, summed",
    ]
    return "\n".join(lines)


def _named(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers)) or "none"


def parser() -> argparse.ArgumentParser:
    """The command line of python -m search.filters."""
    p = ArgumentParser(prog="python -m search.filters", description=__doc__)
    p.add_argument("--model", required=True, help="hub id, local folder, GGUF file, smollm2 or gemma3")
    p.add_argument("--config", required=True, type=Path, help="artifact to start from, as search.heads writes it")
    p.add_argument("--out", required=True, type=Path, help="artifact to write; may be the same file")
    p.add_argument("--profile", type=Path, help="folder of python -m profiling.similarity, instead of measuring")
    p.add_argument("--filters", type=int, default=Rules.most, help="at most so many filter layers (default 3)")
    p.add_argument("--sparse", type=float, default=Rules.sparse, help="least share of sparse layers (default 0.6)")
    p.add_argument("--dense-first", type=int, default=Rules.dense_first, help="first layers that are dense (default 0)")
    p.add_argument("--adjacent", action="store_true", help="keep the layer after each filter dense, to hide fetches")
    p.add_argument("--min-kept", type=float, help="the fewest full layers that keep this share, not the best")
    p.add_argument("--max-error", type=float, help="the fewest full layers within this error, not the best")
    p.add_argument("--layers", help="filter layers by hand, such as 2,8,18")
    p.add_argument("--dense-layers", help="with --layers: layers that stay dense besides those before the first")
    p.add_argument("--budget", default="2048", help="tokens of a sparse layer, or a share such as 0.125")
    p.add_argument("--selector", choices=("last", "uniform", "exponential"), default="last")
    p.add_argument("--window", type=int, default=16, help="queries of the selector (default 16)")
    p.add_argument("--prefill-ratio", type=float, help="in chunked prefill, tokens of the past for each of the chunk")
    p.add_argument("--task", dest="tasks", action="append", help=f"prompts to measure on, repeatable: {TASKS}")
    p.add_argument("--length", type=int, help="their length in tokens")
    p.add_argument("--samples", type=int, default=SimilarityConfig.samples, help="prompts of each task")
    p.add_argument("--steps", type=int, default=SimilarityConfig.steps, help="decode steps of each prompt")
    p.add_argument("--seed", type=int, default=SimilarityConfig.seed)
    p.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    p.add_argument("--device", default="cpu")
    p.add_argument("--fresh", action="store_true", help="discard what an interrupted run left")
    return p


def config_from(options: argparse.Namespace, command: str) -> FilterSearch:
    """The search of a command line.

    Raises:
        HeadwiseError: a value that cannot be.
    """
    budget = _budget(options.budget)
    if options.min_kept is not None and not 0 < options.min_kept <= 1:
        raise HeadwiseError(f"--min-kept must be above 0 and at most 1, got {options.min_kept}")
    if (limit := options.max_error) is not None and not 0 <= limit < inf:
        raise HeadwiseError(f"--max-error must not be negative, got {limit}")
    given = [name for name in ("layers", "min_kept", "max_error") if getattr(options, name) is not None]
    if len(given) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in given[:2])
        raise HeadwiseError(f"{first} and {second} exclude each other: choose by one of them")
    if options.dense_layers is not None and options.layers is None:
        raise HeadwiseError("--dense-layers goes with --layers: else the search chooses both")
    if not 0 < options.sparse < 1:
        raise HeadwiseError(f"--sparse must be between 0 and 1, got {options.sparse}")
    for name in ("filters", "window"):
        if getattr(options, name) < 1:
            raise HeadwiseError(f"--{name} must be at least 1, got {getattr(options, name)}")
    if (ratio := options.prefill_ratio) is not None and not 0 < ratio < inf:
        raise HeadwiseError(f"--prefill-ratio must be a positive number, got {ratio}")
    if options.dense_first < 0:
        raise HeadwiseError(f"--dense-first must not be negative, got {options.dense_first}")
    length = options.length
    measured = SimilarityConfig(
        model=options.model,
        tasks=tuple(options.tasks or DEFAULT_TASKS),
        length=length,
        samples=options.samples,
        steps=options.steps,
        top_k=ceil(budget * length) if isinstance(budget, float) and length else None,
        seed=options.seed,
        dtype=options.dtype,
        device=options.device,
        command=command,
    )
    return FilterSearch(
        model=options.model,
        config=options.config,
        out=options.out,
        measured=measured,
        profile=options.profile,
        rules=Rules(
            sparse=options.sparse, most=options.filters, dense_first=options.dense_first, adjacent=options.adjacent
        ),
        layers=None if options.layers is None else _layers("--layers", options.layers),
        dense=() if options.dense_layers is None else _layers("--dense-layers", options.dense_layers),
        min_kept=options.min_kept,
        max_error=options.max_error,
        budget=budget,
        selector=options.selector,
        window=options.window,
        prefill_ratio=options.prefill_ratio,
        fresh=options.fresh,
    )


def _budget(text: str) -> int | float:
    try:
        budget = float(text) if "." in text else int(text)
    except ValueError:
        budget = 0
    if budget <= 0 or (isinstance(budget, float) and budget >= 1):
        raise HeadwiseError(f"--budget must be a number of tokens or a share between 0 and 1, got {text!r}")
    return budget


def _layers(option: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise HeadwiseError(f"{option} must be layer numbers with commas between, such as 2,8,18, got {text!r}")
    return tuple(int(part) for part in parts)


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    argv = sys.argv[1:] if argv is None else argv
    config = config_from(parser().parse_args(argv), "python -m search.filters " + shlex.join(argv))
    _, found = run(config)
    print(report(found))
    print(f"wrote {config.out}")
    return 0


if __name__ == "__main__":
    run_command(main)
