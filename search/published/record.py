"""From scores to the artifact: patterns by name, a row for each layer, every candidate's scores in the sidecar."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

import numpy as np

from artifacts import Artifact, Calibration, HeadwiseError, ModelInfo, Prefill, SearchInfo, Summary, window_arrays
from artifacts.sections import save_searched
from search.common.measures import MEASURES
from search.common.scores import rows_of, score_arrays, winners
from search.published.config import HeadSearch
from search.published.score import FamilyScores, best_single_kind, least_error
from search.published.space import Family


def build_artifact(
    config: HeadSearch,
    model: ModelInfo,
    calibration: Calibration,
    families: Sequence[Family],
    layers: Sequence[FamilyScores | None],
    *,
    target_density: float,
    kernel_backend: str,
    windows: Sequence[str],
) -> Artifact:
    """Choose a pattern for every head and write the artifact with its sidecar to `config.out`.

    layers: scores (H, C) averaged over the prompts, None for a layer left alone.
    windows: digests of what was looked at, as profiling.prompts.held_out.Seen has them.
    """
    assert config.budget is not None and config.dense_below is not None
    by_head = [None if scores is None else _by_head(scores) for scores in layers]
    searched = [scores for heads in by_head for scores in heads or ()]
    chosen = choose_all(by_head)
    rows, patterns = rows_of(
        None if heads is None else [families[c].sized(one["sizes"][c]) for c, one in zip(row, heads, strict=True)]
        for row, heads in zip(chosen, by_head, strict=True)
    )
    arrays = _candidate_arrays(families, layers, chosen)
    kind, recall = best_single_kind(searched, families)
    search = SearchInfo(
        tool_version=version("headwise"),
        command=config.command,
        preset=config.preset,
        seed=config.seed,
        calibration=calibration,
        budget=config.budget,
        target_density=target_density,
        device=config.device,
        dtype=config.dtype,
        kernel_backend=kernel_backend,
        summary=Summary(
            **{name: float(np.nanmean(arrays[f"chosen.{name}"])) for name in MEASURES},
            winners=winners(rows, patterns),
            best_single_kind=kind,
            best_single_kind_recall=recall,
        ),
    )
    artifact = Artifact(
        model=model,
        search=search,
        patterns=patterns,
        prefill=Prefill(dense_below=config.dense_below, dense_tail=config.tail, layers=rows),
    )
    return save_searched(artifact, config.out, {**arrays, **window_arrays(windows)})


def choose_all(by_head: Sequence[Sequence[FamilyScores] | None]) -> np.ndarray:
    """(L, H) the candidate of each head by its scores, -1 in layers left alone.

    Raises:
        HeadwiseError: a head has none within the budget.
    """
    chosen = np.full((len(by_head), max(len(heads) for heads in by_head if heads)), -1)
    for layer, heads in enumerate(by_head):
        for head, scores in enumerate(heads or ()):
            best = least_error(scores)
            if best is None:
                raise HeadwiseError(
                    f"no candidate keeps to the budget for head {layer}.{head}: the cheapest computes "
                    f"{scores['density'].min():.3f} of dense attention; ask for a larger --budget"
                )
            chosen[layer, head] = best
    return chosen


def _by_head(scores: FamilyScores) -> list[FamilyScores]:
    return [{name: values[head] for name, values in scores.items()} for head in range(len(scores["error"]))]


def _candidate_arrays(
    families: Sequence[Family], layers: Sequence[FamilyScores | None], chosen: np.ndarray
) -> dict[str, np.ndarray]:
    """What each head got and every candidate's scores; NaN, 0 or -1 in layers left alone."""
    shape = (*chosen.shape, len(families))
    measures = {name: np.full(shape, np.nan) for name in MEASURES}
    sizes = np.zeros((*shape, 2), dtype=int)
    for layer, scores in enumerate(layers):
        if scores is not None:
            sizes[layer] = scores["sizes"]
            for name, values in measures.items():
                values[layer] = scores[name]
    by_name = [
        {name: sizes[..., c, at] for at, (name, _) in enumerate(family.start)} for c, family in enumerate(families)
    ]
    return score_arrays(chosen, [family.name for family in families], measures, by_name)
