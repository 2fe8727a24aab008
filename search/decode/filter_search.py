"""Which layers filter in decode: the similarity of layers is measured, the best choice found and
compared."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np

from artifacts import Artifact, Decode, HeadwiseError, OmniKV, Similarity
from profiling.models.loading import LoadedModel, settled
from profiling.prompts.prompt import Prompt, parse_task
from profiling.similarities.config import SimilarityConfig
from profiling.similarities.layer_similarity import measure, prompt_length, prompts_of, resolve
from profiling.similarities.similarity_profile import Profile, load_profile
from runtime.layers import attention_layers, sliding_layers
from search.decode.filter_config import FilterSearch
from search.decode.filter_layers import Choice, best_choice, evenly_spaced, kept, total
from search.decode.found import Found, Score
from search.decode.section_search import SectionSearch


def run(config: FilterSearch) -> tuple[Artifact, Found]:
    """Measure, choose, compare, and write the artifact; a killed run goes on from what it finished.

    Raises:
        HeadwiseError: anything that the user has to put right; nothing is written then.
    """
    former = None if config.profile is None else load_profile(config.profile)
    config = replace(config, measured=settled(config.measured))
    how = {"dtype": config.measured.dtype, "device": config.measured.device}
    search = SectionSearch.begin("filters", config.config, config.out, config.model, **how)
    artifact = search.artifact
    loaded = search.loaded
    if former is not None and former.about["weights_sha256"] != artifact.model.weights_sha256:
        raise HeadwiseError(
            f"profile {config.profile} is of another model: {former.about['model']}"
        )
    _check_rules(config, loaded)
    measured = resolve(config.measured, loaded.name, artifact.model.max_positions)
    mine = prompts_of(_like(measured, former), loaded.tokenizer)
    search.seen.add(*chain.from_iterable(mine.values()))

    def held_out() -> dict[str, list[Prompt]]:
        tasks = {task: parse_task(task) for task in measured.tasks}
        lengths = {name: prompt_length(measured, task) for name, task in tasks.items()}
        found = search.held_out(lengths, 0, samples=measured.samples, seed=measured.seed)
        return {tasks[name].name: prompts for name, prompts in found.items()}

    # Before any work: a text that is too short to hold prompts out is the user's to know of now.
    others = held_out()
    with search.ledger(measured, fresh=config.fresh) as ledger:
        if former is None:
            former = measure(measured, loaded, ledger)
        again = replace(measured, top_k=former.about["top_k"])
        choice = best_choice(former.error(worst=config.worst).sum(-1), former.layers, config.rules)
        found = compare(choice, former, measure(again, loaded, ledger, prompts=others))
        section = Decode(omnikv=_section(config, found))
        arrays = {"similarity.mass": former.mass(), "similarity.error": former.error().sum(-1)}
        written = search.write(lambda now: now.model_copy(update={"decode": section}), arrays)
        ledger.remove()
    return written, found


def _check_rules(config: FilterSearch, loaded: LoadedModel) -> None:
    """Raise HeadwiseError, before anything is measured, where the model's layers leave no
    choice."""
    modules = attention_layers(loaded.model)
    layers = sorted(set(modules) - sliding_layers(modules))
    if layers:
        best_choice(np.zeros((max(layers) + 1,) * 2), layers, config.rules)


def _like(measured: SimilarityConfig, former: Profile | None) -> SimilarityConfig:
    """The configuration by which the choice's own prompts were made: a profile's, where one is
    given."""
    if former is None:
        return measured
    return replace(
        measured, **{name: former.about[name] for name in ("length", "samples", "steps", "seed")}
    )


def score(choice: Choice, profile: Profile) -> Score:
    """What a choice keeps and changes on the prompts of a profile."""
    layers = profile.layers
    error = total(profile.error().sum(-1), layers, choice)
    return Score(choice=choice, kept=kept(profile.mass(), layers, choice), error=error)


def compare(choice: Choice, profile: Profile, held_out: Profile) -> Found:
    """The choice on held-out prompts, and as many evenly spaced filter layers there, with as many
    dense."""
    even = evenly_spaced(held_out.layers, len(choice.filter_layers), choice.dense_layers)
    return Found(
        made_by=score(choice, profile),
        held_out=score(choice, held_out),
        even=score(even, held_out),
        profile=profile,
    )


def _section(config: FilterSearch, found: Found) -> OmniKV:
    return OmniKV(
        filter_layers=found.choice.filter_layers,
        dense_layers=found.choice.dense_layers,
        selector=config.selector,  # type: ignore[arg-type]
        window=config.window,
        budget=config.budget,
        prefill_ratio=config.prefill_ratio,
        similarity=Similarity(
            kept=found.held_out.kept,
            evenly_spaced=found.even.kept,
            error=found.held_out.error,
            top_k=found.profile.about["top_k"],
            tasks=tuple(found.profile.tasks),
        ),
    )
