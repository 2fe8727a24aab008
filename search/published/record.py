"""From findings to the artifact: patterns by name, a row for each layer, every candidate's scores in the sidecar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from artifacts import Artifact, Calibration, ModelInfo, Prefill, SearchInfo, Summary, pattern_name, window_arrays
from artifacts.sections import save_searched
from search.common.recording import as_artifact_pattern, tool_version
from search.explaining.findings import MEASURES
from search.published.choose import Choice, best_single_kind, choose_layer, winners
from search.published.config import HeadSearch
from search.published.score import Score
from search.published.space import Family


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A layer's scores [head][candidate] averaged over the prompts; no heads where the layer is left alone."""

    layer: int
    heads: tuple[Sequence[Score], ...]


def build_artifact(
    config: HeadSearch,
    model: ModelInfo,
    calibration: Calibration,
    families: Sequence[Family],
    findings: Sequence[Finding],
    *,
    target_density: float,
    kernel_backend: str,
    windows: Sequence[str],
) -> Artifact:
    """Choose a pattern for every head and write the artifact with its sidecar to `config.out`.

    windows: digests of what was looked at, as profiling.prompts.held_out.Seen has them.
    """
    assert config.budget is not None and config.dense_below is not None and config.dense_tail is not None
    rows: list[tuple[str, ...] | None] = []
    chosen: list[Choice] = []
    patterns = {}
    for finding in findings:
        if not finding.heads:
            rows.append(None)
            continue
        layer = choose_layer(finding.layer, finding.heads, families)
        chosen += layer
        named = [as_artifact_pattern(choice.pattern) for choice in layer]
        patterns.update({pattern_name(pattern): pattern for pattern in named})
        rows.append(tuple(pattern_name(pattern) for pattern in named))
    searched = [scores for finding in findings for scores in finding.heads]
    kind, recall = best_single_kind(searched, families)
    search = SearchInfo(
        tool_version=tool_version(),
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
            recall=fmean(choice.score.recall for choice in chosen),
            error=fmean(choice.score.error for choice in chosen),
            density=fmean(choice.score.density for choice in chosen),
            winners=winners(chosen),
            best_single_kind=kind,
            best_single_kind_recall=recall,
        ),
    )
    artifact = Artifact(
        model=model,
        search=search,
        patterns=patterns,
        prefill=Prefill(dense_below=config.dense_below, dense_tail=config.dense_tail, layers=tuple(rows)),
    )
    return save_searched(artifact, config.out, {**_arrays(families, findings, chosen), **window_arrays(windows)})


def _arrays(families: Sequence[Family], findings: Sequence[Finding], chosen: Sequence[Choice]) -> dict[str, np.ndarray]:
    """What each head got and every candidate's scores, (layers, heads) each; NaN, 0 or -1 in layers left alone."""
    layers = np.array([finding.layer for finding in findings for _ in finding.heads])
    heads = np.array([head for finding in findings for head in range(len(finding.heads))])
    scores = [head for finding in findings for head in finding.heads]
    shape = (len(findings), int(heads.max()) + 1)

    def table(values: Sequence[float], missing: float, dtype: type) -> np.ndarray:
        filled: np.ndarray = np.full(shape, missing, dtype=dtype)
        filled[layers, heads] = values
        return filled

    arrays = {"chosen.candidate": table([choice.candidate for choice in chosen], -1, np.int32)}
    for measure in MEASURES:
        arrays[f"chosen.{measure}"] = table([getattr(choice.score, measure) for choice in chosen], np.nan, np.float32)
    for c, family in enumerate(families):
        prefix = f"candidates.{c}.{family.name}"
        for measure in MEASURES:
            arrays[f"{prefix}.{measure}"] = table([getattr(s[c], measure) for s in scores], np.nan, np.float32)
        for size, _ in family.start:
            arrays[f"{prefix}.{size}"] = table([s[c].sizes[size] for s in scores], 0, np.int32)
    return arrays
