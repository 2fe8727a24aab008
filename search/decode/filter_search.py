"""Which layers filter in decode: the similarity of layers is measured, the best choice found and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from artifacts import Artifact, Decode, HeadwiseError, OmniKV, Similarity
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel
from profiling.progress import phase
from profiling.prompts.prompt import Prompt, digest, parse_task
from profiling.similarities.budget_meter import Point, measure_budgets
from profiling.similarities.layer_similarity import SimilarityConfig, measure, prompt_length, prompts_of, resolve
from profiling.similarities.similarity_profile import Profile, load_profile
from runtime.layers import attention_layers, sliding_layers
from search.decode.coverage import GRID, coverage_of, least_coverage
from search.decode.decode_loss import decode_loss
from search.decode.filter_config import FilterSearch
from search.decode.filter_layers import (
    Choice,
    best_choice,
    by_hand,
    cheapest,
    evenly_spaced,
    kept,
    random_choices,
    total,
)
from search.decode.found import Found, Score, named
from search.decode.head_map import KINDS, allowed, head_map, of_heads, pair_costs, with_heads
from search.decode.rules import RULES, by_kascade, by_loss
from search.decode.section_search import SectionSearch, beyond_chance

if TYPE_CHECKING:
    from artifacts.sidecar import Array

RANDOM_CHOICES = 50


def run(config: FilterSearch) -> tuple[Artifact, Found]:
    """Measure, choose, compare, and write the artifact; a killed run goes on from what it finished.

    Raises:
        HeadwiseError: anything that the user has to put right; nothing is written then.
    """
    former = None if config.profile is None else load_profile(config.profile)
    how = {"dtype": config.measured.dtype, "device": config.measured.device}
    search = SectionSearch.begin("filters", config.config, config.out, config.model, **how)
    artifact, loaded = search.artifact, search.loaded
    if former is not None and former.about["weights_sha256"] != artifact.model.weights_sha256:
        raise HeadwiseError(f"profile {config.profile} is of another model: {former.about['model']}")
    _check_rules(config, loaded)
    measured = resolve(config.measured, loaded.name, artifact.model.max_positions)
    mine = prompts_of(_like(measured, former), loaded.tokenizer)
    search.seen.add(*chain.from_iterable(mine.values()))

    def held_out(number: int) -> dict[str, list[Prompt]]:
        tasks = {task: parse_task(task) for task in measured.tasks}
        lengths = {name: prompt_length(measured, task) for name, task in tasks.items()}
        found = search.held_out(lengths, number, samples=measured.samples, seed=measured.seed)
        return {tasks[name].name: prompts for name, prompts in found.items()}

    # Before any work: a text that is too short to hold prompts out is the user's to know of now.
    others = held_out(0)
    fixed = config.heads or config.layers is not None or config.rule != RULES[0]
    between = None if fixed else held_out(1)
    with search.ledger(measured, fresh=config.fresh) as ledger:
        if former is None:
            former = measure(measured, loaded, ledger)
        again = replace(measured, top_k=former.about["top_k"], sets=former.about["sets"])
        kinds = [kind for kind in KINDS if KINDS.index(kind) <= KINDS.index(again.sets)]
        if config.heads and config.heads not in kinds:
            raise HeadwiseError(f"--heads {config.heads} needs a profile measured with --sets {config.heads}")
        tried: list[Score] = []
        kind = config.heads or kinds[config.rule == "kascade" and len(kinds) > 1]
        if between is not None and len(former.choosers) > 1:
            deciding = measure(again, loaded, ledger, prompts=between)
            tried = [score(choose(config, former, kind), deciding) for kind in kinds]
            kind = kinds[best_kind(tried)]
        pooled = choose(config, former, "pooled")
        if config.rule == "loss":
            choice = _least_loss(config, again, search, [*chain.from_iterable(mine.values())], former.layers, ledger)
        else:
            choice = choose(config, former, kind)
        found = compare(choice, former, measure(again, loaded, ledger, prompts=others), pooled, tried)
        if config.target_error is not None or config.target_tokens is not None:
            found = _with_coverage(config, found, again, loaded, ledger, mine, others)
        section = Decode(omnikv=_section(config, found))
        written = search.write(lambda now: now.model_copy(update={"decode": section}), _measured(found))
        ledger.remove()
    return written, found


def _with_coverage(
    config: FilterSearch,
    found: Found,
    measured: SimilarityConfig,
    loaded: LoadedModel,
    ledger: Ledger,
    mine: Mapping[str, Sequence[Prompt]],
    others: Mapping[str, Sequence[Prompt]],
) -> Found:
    """What was found with the coverage that was asked for, chosen on its own prompts and compared on others."""
    assert measured.length is not None
    most = config.budget if isinstance(config.budget, int) else ceil(config.budget * measured.length)
    section = _section(config, found)

    def points(prompts: Mapping[str, Sequence[Prompt]], **sizes: Any) -> list[Point]:
        return measure_budgets(measured, loaded, section, chain.from_iterable(prompts.values()), **sizes, ledger=ledger)

    grid = points(mine, coverages=GRID, most=most)
    if config.target_tokens is not None:
        coverage, tokens = coverage_of(grid, config.target_tokens), config.target_tokens
    else:
        assert config.target_error is not None
        point = least_coverage(grid, config.target_error)
        coverage, tokens = point.coverage or 0.0, point.tokens
    # Beside a fixed budget of as many tokens, and the whole one.
    found_there = points(others, budgets=sorted({max(1, round(tokens)), most}), coverages=[coverage], most=most)
    return replace(found, coverage=coverage, points=tuple(found_there))


def _least_loss(
    config: FilterSearch,
    measured: SimilarityConfig,
    search: SectionSearch,
    prompts: Sequence[Prompt],
    layers: Sequence[int],
    ledger: Ledger,
) -> Choice:
    """What IndexCache's greedy search chooses, with its progress; each choice's loss is kept."""
    loss = decode_loss(measured, search.loaded, search.artifact, config.budget, prompts)
    depends = {"artifact": search.artifact.content_sha256, "prompts": digest(prompts), "budget": config.budget}
    depends["steps"] = measured.steps
    # Of the layers that are left each but the first is tried without.
    with phase("greedy by loss", sum(range(config.rules.full(len(layers)), len(layers))), "choices") as shown:

        def tried(choice: Choice) -> float:
            layers = {"filter_layers": choice.filter_layers, "dense_layers": choice.dense_layers}
            found: float = ledger.once(ledger.unit("loss", {**depends, **layers}), partial(loss, choice))
            shown.update()
            return found

        return by_loss(tried, layers, config.rules)


def _check_rules(config: FilterSearch, loaded: LoadedModel) -> None:
    """Raise HeadwiseError, before anything is measured, where the model's layers leave no choice."""
    modules = attention_layers(loaded.model)
    layers = sorted(set(modules) - sliding_layers(modules))
    if config.layers is not None:
        by_hand(layers, config.rules, config.layers, config.dense_layers or ())
    elif layers:
        best_choice(np.zeros((max(layers) + 1,) * 2), layers, config.rules)


def _like(measured: SimilarityConfig, former: Profile | None) -> SimilarityConfig:
    """The configuration by which the choice's own prompts were made: a profile's, where one is given."""
    if former is None:
        return measured
    return replace(measured, **{name: former.about[name] for name in ("length", "samples", "steps", "seed")})


def choose(config: FilterSearch, profile: Profile, kind: str) -> Choice:
    """The choice that the configuration asks for, by the mean over all tasks, with a kind of head map."""
    layers, rules, may = profile.layers, config.rules, allowed(profile.choosers, kind)
    if config.rule == "kascade" and kind != "pooled":
        return by_kascade(profile.least(), profile.turn(), profile.choosers, layers, rules)
    errors = profile.error(worst=config.worst)
    if config.layers is not None:
        return with_heads(by_hand(layers, rules, config.layers, config.dense_layers or ()), errors, layers, may)
    if config.max_error is None:
        return with_heads(best_choice(pair_costs(errors, may), layers, rules), errors, layers, may)
    means = profile.error()
    cost = pair_costs(means, may)
    choice = cheapest(cost, layers, rules, config.max_error)
    if choice is None:
        best = score(with_heads(best_choice(cost, layers, rules), means, layers, may), profile)
        raise HeadwiseError(
            f"no {rules.filters} filter layers and {rules.full(len(layers))} layers in all that attend to everything "
            f"meet --max-error: {named(best.choice.filter_layers)} with {named(best.choice.dense_layers)} dense keep "
            f"{best.kept:.3f} of the mass at an error of {best.error:.4f}; allow more filter layers, a lower --sparse "
            "or a larger budget"
        )
    return with_heads(choice, means, layers, may)


def score(choice: Choice, profile: Profile) -> Score:
    """What a choice keeps and changes on the prompts of a profile."""
    layers = profile.layers
    mass = of_heads(profile.share(), choice).mean(-1)
    error, *by_task = (
        total(of_heads(profile.error(task), choice).sum(-1), layers, choice) for task in (None, *profile.tasks)
    )
    return Score(choice=choice, kept=kept(mass, layers, choice), error=error, by_task=tuple(by_task))


def best_kind(tried: Sequence[Score]) -> int:
    """Which choice has the least error of those that beat the first beyond chance over the tasks; else the first."""
    better = [beyond_chance(each.by_task, tried[0].by_task) for each in tried]
    return min((at for at in range(len(tried)) if better[at] or at == 0), key=lambda at: tried[at].error)


def compare(choice: Choice, profile: Profile, held_out: Profile, pooled: Choice, tried: Sequence[Score] = ()) -> Found:
    """The choice on held-out prompts beside evenly spaced and random filter layers: as many, with as many dense."""
    layers, count, dense = held_out.layers, len(choice.filter_layers), choice.dense_layers
    drawn = random_choices(layers, count, dense, samples=RANDOM_CHOICES, seed=0)
    return Found(
        made_by=score(choice, profile),
        held_out=score(choice, held_out),
        even=score(evenly_spaced(layers, count, dense), held_out),
        random=tuple(score(other, held_out) for other in drawn),
        profile=profile,
        pooled=score(pooled, held_out),
        tried=tuple(tried),
    )


def _section(config: FilterSearch, found: Found) -> OmniKV:
    return OmniKV(
        filter_layers=found.choice.filter_layers,
        dense_layers=found.choice.dense_layers,
        selector=config.selector,  # type: ignore[arg-type]
        window=config.window,
        budget=config.budget,
        coverage=config.coverage if found.coverage is None else found.coverage,
        head_map=head_map(found.choice, found.profile.choosers, found.profile.layers),
        prefill_ratio=config.prefill_ratio,
        similarity=Similarity(
            kept=found.held_out.kept,
            evenly_spaced=found.even.kept,
            random=found.random_kept,
            random_samples=len(found.random),
            error=found.held_out.error,
            pooled_error=found.pooled.error,
            top_k=found.profile.about["top_k"],
            tasks=tuple(found.profile.tasks),
        ),
    )


def _measured(found: Found) -> dict[str, Array]:
    measured = {"similarity.mass": found.profile.mass(), "similarity.error": found.profile.error()[:, -1].sum(-1)}
    if found.choice.takes is not None:
        measured["similarity.head_error"] = found.profile.error()
    return measured
