"""The search with a budget for each head: MInference 1.0, Algorithm 1 (kernel-aware sparse pattern search).

Every candidate is brought to the same computed tiles, run through the kernels that will serve, and the one nearest to
dense attention's output wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from artifacts import Artifact, Calibration, HeadwiseError, ModelInfo, Prefill, SearchInfo, Summary, window_arrays
from artifacts.files import check_writable
from artifacts.sections import save_searched
from profiling.ledger import Ledger
from profiling.models.loading import load_model
from profiling.prompts.held_out import Seen
from profiling.prompts.prompt import digest, make_prompts, parse_task
from profiling.ranks import one_process
from runtime.fingerprint import fingerprint
from search.common.layers import score_layers, searched_layers, serving_backend
from search.common.measures import MEASURES
from search.common.scores import rows_of, score_arrays, winners
from search.model.prompts import check_positions
from search.published.score import FamilyScores, HeadBudget, best_single_kind, least_error, mean_scores
from search.published.space import PAPER_BUDGET, PAPER_LENGTH, Family, initial_space, target_tiles


@dataclass(frozen=True, kw_only=True)
class HeadSearch:
    """What a search is asked to do; the defaults are the paper's. dense_below: None is half of the length."""

    model: str
    out: Path
    calibration: str = "kv_retrieval"
    length: int = PAPER_LENGTH
    samples: int = 1
    budget: str = PAPER_BUDGET
    seed: int = 0
    dtype: str = "bfloat16"
    device: str = "cpu"
    backend: str = "auto"
    revision: str | None = None
    dense_below: int | None = None
    dense_tail: int = 0
    beyond_positions: bool = False
    fresh: bool = False
    picture: bool = True
    command: str = ""

    def __post_init__(self) -> None:
        for name in ("length", "samples", "dense_below"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise HeadwiseError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.dense_tail < 0:
            raise HeadwiseError(f"--dense-tail must be at least 0, got {self.dense_tail}")


def run(config: HeadSearch) -> Artifact:
    """Search and write `config.out` with its sidecar; a killed run goes on from the layers it finished.

    Raises:
        HeadwiseError: anything the user has to put right; no file is written then.
    """
    one_process("headwise search --preset paper")
    check_writable(config.out)
    parse_task(config.calibration)
    target = target_tiles(config.budget, config.length, config.dense_tail)
    loaded = load_model(config.model, dtype=config.dtype, device=config.device, revision=config.revision)
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    if not config.beyond_positions:
        check_positions(config.length, model)
    layers = searched_layers(loaded)
    backend = serving_backend(config.backend, model, config.dtype, config.device)
    how: dict[str, Any] = {"length": config.length, "samples": config.samples, "seed": config.seed}
    prompts = make_prompts(config.calibration, loaded.tokenizer, **how)
    families = initial_space()
    windows = Seen(prompts).digests
    calibration = Calibration(
        tasks=(parse_task(config.calibration).name,),
        lengths=(config.length,),
        samples=config.samples,
        sha256=digest(prompts),
        seen_windows=len(windows),
    )
    # All that a layer's scores depend on.
    settings = {
        "allocation": "heads",
        "model": model.name,
        "weights": model.weights_sha256,
        "budget": config.budget,
        "calibration": calibration.tasks[0],
        **how,
        "prompts": calibration.sha256,
        "dtype": config.dtype,
        "device": config.device,
        "backend": backend,
        "dense tail": config.dense_tail,
        "target tiles": target,
        "space": [family.name for family in families],
    }

    rule = HeadBudget(families=families, target=target, dense_tail=config.dense_tail, backend=backend)
    with Ledger(config.out, "heads", settings=settings, fresh=config.fresh) as ledger:
        scores = score_layers(
            loaded, prompts, {layer: {} for layer in layers}, rule.score, ledger, "scoring candidates"
        )
        artifact = _write(
            config,
            model,
            calibration,
            families,
            [mean_scores(scores[layer]) if layer in scores else None for layer in range(model.num_layers)],
            target_density=target / target_tiles("1", config.length, 0),
            kernel_backend=backend,
            windows=windows,
        )
        if config.picture:
            from profiling.pattern_map import draw_pattern_map

            draw_pattern_map(config.out, config.out.with_suffix(""))
        ledger.remove()
    return artifact


def _write(
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
        preset="paper",
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
        # Sizes are token counts: at half the length they cover about twice the share, and there sparsity stops paying.
        prefill=Prefill(
            dense_below=config.length // 2 if config.dense_below is None else config.dense_below,
            dense_tail=config.dense_tail,
            layers=rows,
        ),
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
