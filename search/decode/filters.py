"""headwise filters: choose the layers that filter in decode and those that stay dense.

The similarity of layers is measured on a few prompts (or read with --profile). The filter and dense
layers with the least change of the sparse layers' part of the residual stream are found exactly. On
other prompts the choice is compared with evenly spaced filter layers. The artifact's other sections
stay as they are.

    headwise filters cfg.yaml --model smollm2 --out cfg.yaml --task kv_retrieval
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from artifacts import Artifact, Decode, HeadwiseError, OmniKV, Similarity
from artifacts.cli.arguments import ArtifactFile, Fresh, Json, Out, deliver
from artifacts.cli.options import ADVANCED, POSITIVE, Arg
from profiling.models.device import settled
from profiling.models.identity import identity_of
from profiling.models.loading import LoadedModel
from profiling.prompts.prompt import Prompt
from profiling.similarities.config import Decoded, SimilarityConfig
from profiling.similarities.layer_similarity import measure, prompt_length, prompts_of, resolve
from profiling.similarities.similarity_profile import Profile, load_profile
from runtime.fingerprint import fingerprint
from runtime.layers import attention_layers, check_section, full_layers
from search.decode.filter_layers import Choice, Rules, best_choice, evenly_spaced, kept, total
from search.decode.section_search import SectionSearch
from search.study import STORAGE_HELP, Study, check_storage, study_name


def _budget(value: Any) -> Any:
    """Read a number of tokens or a fraction.

    Raises:
        HeadwiseError: it is neither.
    """
    budget: int | float = 0
    try:
        budget = float(value)
        if "." not in str(value):
            budget = int(value)
    except ValueError:
        budget = 0
    if budget <= 0 or (isinstance(budget, float) and budget >= 1):
        raise HeadwiseError(
            f"--budget must be a number of tokens or a share between 0 and 1, got {value!r}"
        )
    return budget


class Config(Decoded):
    """Config of a search for filter layers.

    Attributes:
        profile: measured if None.
        worst: weight of the worst steps, of 1 in all.
    """

    artifact: Annotated[ArtifactFile, Arg("artifact to start from, as headwise search writes it")]
    out: Annotated[Out, Arg("artifact to write; may be the same file")]
    profile: Annotated[
        Path | None, Arg("folder of headwise similarity, instead of measuring", group=ADVANCED)
    ] = None
    worst: Annotated[float, Arg("weight of the worst steps", group=ADVANCED), Field(ge=0, le=1)] = (
        0.25
    )
    budget: Annotated[
        int | float,
        Arg("tokens of a sparse layer, or a share such as 0.125"),
        BeforeValidator(_budget),
    ] = 2048
    selector: Annotated[
        Literal["last", "uniform", "exponential"],
        Arg("which queries choose, and how they are weighted", group=ADVANCED),
    ] = "last"
    window: Annotated[int, Arg("queries of the selector", group=ADVANCED), Field(ge=1)] = 16
    prefill_ratio: Annotated[
        float | None,
        Arg("in chunked prefill, tokens of the past for each of the chunk", group=ADVANCED),
        POSITIVE,
    ] = None
    storage: Annotated[str | None, Arg(STORAGE_HELP, group=ADVANCED, metavar="URL")] = None
    rules: Rules = Field(default_factory=Rules)
    fresh: Fresh = False
    as_json: Json = None

    @property
    def measured(self) -> SimilarityConfig:
        """The measurement of the similarity of layers."""
        top_k = None
        if isinstance(self.budget, float) and self.length:
            top_k = ceil(self.budget * self.length)
        return SimilarityConfig(
            **{name: getattr(self, name) for name in Decoded.model_fields}, top_k=top_k
        )


@dataclass(frozen=True, kw_only=True)
class Score:
    """A choice on some prompts: mean attention mass kept, and summed errors, also by task."""

    choice: Choice
    kept: float
    error: float
    tasks: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class FilterResult:
    """A choice on its own prompts and on held-out ones, with an evenly spaced choice to compare.

    Attributes:
        even: as many filter layers at even distances, on the held-out prompts.
    """

    made_by: Score
    held_out: Score
    even: Score
    profile: Profile

    @property
    def choice(self) -> Choice:
        """The filter layers and dense layers."""
        return self.made_by.choice


def run(config: Config) -> int:
    """Search, and print the report."""
    _, result = choose_filters(config)
    then = f"next: headwise decode {config.out} --model {config.model}"
    text = f"{report(result)}\nwrote {config.out}\n{then}"
    deliver(text, {"command": config.command, **record(result)}, config.as_json)
    return 0


def choose_filters(config: Config) -> tuple[Artifact, FilterResult]:
    """Measure, choose, compare, and write the artifact. A killed run resumes.

    Raises:
        HeadwiseError: a user's mistake; nothing is written then.
    """
    profile = None
    if config.profile is not None:
        profile = load_profile(config.profile)
    check_storage(config.storage)
    config = settled(config)
    search = SectionSearch.begin(
        "filters",
        config.artifact,
        config.out,
        config.model,
        dtype=config.dtype,
        device=config.device,
    )
    model = search.artifact.model
    loaded = search.loaded
    if profile is not None:
        _check_profile(config, profile, loaded)
    _check_rules(config, loaded)
    measured = resolve(config.measured, loaded.name, model.max_positions)
    own = prompts_of(_like(measured, profile), loaded.tokenizer)
    search.seen.add(*chain.from_iterable(own.values()))
    # Before any work, to refuse a text that is too short to hold prompts out.
    held_out = _held_out(search, measured)
    with search.ledger(measured, fresh=config.fresh) as ledger:
        if profile is None:
            profile = measure(measured, loaded, ledger)
        error = profile.error(worst=config.worst).sum(-1)
        choice = best_choice(error, profile.layers, config.rules)
        again = measured.replace(top_k=profile.about["top_k"])
        result = compare(choice, profile, measure(again, loaded, ledger, prompts=held_out))
        _record(config, result)
        section = Decode(omnikv=_section(config, result))
        arrays = {"similarity.mass": profile.mass(), "similarity.error": profile.error().sum(-1)}
        written = search.write(lambda now: now.model_copy(update={"decode": section}), arrays)
        ledger.remove()
    return written, result


def _check_profile(config: Config, profile: Profile, loaded: LoadedModel) -> None:
    """Raise HeadwiseError unless a profile was measured on this model.

    Weights without a fingerprint must be the same ones in the same dtype.
    """
    about = profile.about
    model = fingerprint(loaded.model, name=loaded.name)
    same = about["weights_sha256"] == model.weights_sha256
    if model.weights_sha256 is None:
        same = about["identity"] == identity_of(loaded.model, loaded.name).key
    if not same:
        raise HeadwiseError(f"profile {config.profile} is of another model: {about['model']}")


def _held_out(search: SectionSearch, measured: SimilarityConfig) -> dict[str, list[Prompt]]:
    """Held-out prompts by the name of their task."""
    lengths = {task: prompt_length(measured, task) for task in measured.tasks}
    by_task = search.held_out(lengths, 0, samples=measured.samples, seed=measured.seed)
    return {task.name: prompts for task, prompts in by_task.items()}


def _check_rules(config: Config, loaded: LoadedModel) -> None:
    """Raise HeadwiseError, before any measurement, where the model's layers leave no choice."""
    modules = attention_layers(loaded.model)
    check_section("decode", modules)
    layers = full_layers(modules)
    if layers:
        best_choice(np.zeros((max(layers) + 1,) * 2), layers, config.rules)


def _like(measured: SimilarityConfig, profile: Profile | None) -> SimilarityConfig:
    """The configuration of the choice's own prompts; a profile's if there is one."""
    if profile is None:
        return measured
    names = ("length", "samples", "steps", "seed")
    return measured.replace(**{name: profile.about[name] for name in names})


def score(choice: Choice, profile: Profile) -> Score:
    """Mass kept and error of a choice on the prompts of a profile."""
    layers = profile.layers
    error = total(profile.error().sum(-1), layers, choice)
    tasks = {task: total(profile.error(task).sum(-1), layers, choice) for task in profile.tasks}
    return Score(choice=choice, kept=kept(profile.mass(), layers, choice), error=error, tasks=tasks)


def compare(choice: Choice, profile: Profile, held_out: Profile) -> FilterResult:
    """Score the choice, and as many evenly spaced filter layers with as many dense ones."""
    even = evenly_spaced(held_out.layers, len(choice.filter_layers), choice.dense_layers)
    return FilterResult(
        made_by=score(choice, profile),
        held_out=score(choice, held_out),
        even=score(even, held_out),
        profile=profile,
    )


def _record(config: Config, result: FilterResult) -> None:
    """Add each scored choice to a study: its error by task, and its dense layers' fraction."""
    space = {"choice": ["searched", "evenly spaced"], "prompts": ["chosen on", "held out"]}
    tasks = result.held_out.tasks
    name = study_name("filters", config.out)
    study = Study(config.storage, name, space, (*tasks, "density"))
    for choice, prompts, score in (
        ("searched", "chosen on", result.made_by),
        ("searched", "held out", result.held_out),
        ("evenly spaced", "held out", result.even),
    ):
        density = score.choice.full / len(result.profile.layers)
        study.add(
            {"choice": choice, "prompts": prompts},
            {**score.tasks, "density": density},
            error=score.error,
            missed_mass=1 - score.kept,
            filter_layers=list(score.choice.filter_layers),
            dense_layers=list(score.choice.dense_layers),
        )


def _section(config: Config, result: FilterResult) -> OmniKV:
    return OmniKV(
        filter_layers=result.choice.filter_layers,
        dense_layers=result.choice.dense_layers,
        selector=config.selector,
        window=config.window,
        budget=config.budget,
        prefill_ratio=config.prefill_ratio,
        similarity=Similarity(
            kept=result.held_out.kept,
            evenly_spaced=result.even.kept,
            error=result.held_out.error,
            top_k=result.profile.about["top_k"],
            tasks=tuple(result.profile.tasks),
        ),
    )


def record(result: FilterResult) -> dict[str, Any]:
    """The figures of the report as plain data, with the settings that they hold for."""
    about = result.profile.about
    scores = {"chosen_on": result.made_by, "held_out": result.held_out}
    scores["evenly_spaced"] = result.even
    figures = {}
    for name, score in scores.items():
        figures[name] = {
            "kept": score.kept,
            "error": score.error,
            "filter_layers": score.choice.filter_layers,
            "dense_layers": score.choice.dense_layers,
        }
    settings = ("model", "length", "steps", "samples", "top_k", "dtype")
    return {
        "scores": figures,
        "settings": {name: about[name] for name in settings},
        "tasks": about["tasks"],
        "versions": about["versions"],
    }


def report(result: FilterResult) -> str:
    """The choice, its mass kept and error, next to evenly spaced filter layers."""
    choice = result.choice
    n = len(result.profile.layers)
    even = named(result.even.choice.filter_layers)
    rows = (
        ("chosen on", result.made_by, ""),
        ("held-out prompts", result.held_out, ""),
        ("evenly spaced", result.even, f"  ({even})"),
    )
    lines = [
        f"filter layers {named(choice.filter_layers)}; dense {named(choice.dense_layers)}; "
        f"{n - choice.full} of {n} full-attention layers are sparse",
        f"with the top {result.profile.about['top_k']} tokens of all heads together",
        f"{'':<27}kept       error",
    ]
    for name, score, note in rows:
        lines.append(f"  {name:<21}{score.kept:8.4f}{score.error:12.5f}{note}")
    lines.append(
        "kept: attention mass, mean over the layers; error: squared change of the sparse layers' "
        "outputs relative to the residual stream, summed"
    )
    return "\n".join(lines)


def named(layers: Sequence[int]) -> str:
    """Layers with commas between."""
    return ", ".join(map(str, layers)) or "none"
