"""Runs headwise similarity: measures a profile, writes it into a folder, and reports it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from artifacts.files import check_writable, out_folder
from profiling.models.device import settled
from profiling.models.loading import load_model
from profiling.similarities.config import SimilarityConfig
from profiling.similarities.layer_similarity import measure
from profiling.similarities.similarity_profile import FILE, Profile, save_profile


def run(config: SimilarityConfig, out: Path) -> Profile:
    """Load the model, measure, and write similarity.safetensors and CSV files into `out`.

    Raises:
        HeadwiseError: any error that the user has to correct; no file is written then.
    """
    config = settled(config)
    with out_folder(out):
        check_writable(out / FILE)
        loaded = load_model(
            config.model, dtype=config.dtype, device=config.device, revision=config.revision
        )
        profile = measure(config, loaded)
        save_profile(profile, out)
    return profile


def report(profile: Profile) -> str:
    """Make a line for each task: mass kept, best layers, best hit rate, mass missed when frozen."""
    about = profile.about
    size = max(map(len, profile.tasks))
    lines = [
        f"{about['model']}: {len(profile.layers)} of {profile.num_layers} layers see the whole "
        f"prompt; "
        f"{about['length']} tokens, top {about['top_k']}, {about['steps']} steps of "
        f"{about['samples']} prompts a task",
        f"{'':<{size}}  {'kept':>6}  {'best over the next 8 layers':<32}{'best hit':>14}  "
        f"{'missed when frozen':>18}",
    ]
    for task in profile.tasks:
        later = profile.mass(task)[np.triu_indices(profile.num_layers, 1)]
        if np.isfinite(later).any():
            ability = f"{np.nanmean(later):.3f}"
        else:
            ability = "-"
        reach = profile.ability(task)
        hit = profile.hit(task)
        best = [
            int(at)
            for at in np.argsort(-np.nan_to_num(reach, nan=-1.0))[:3]
            if np.isfinite(reach[at])
        ]
        shown = ", ".join(f"{reach[at]:.3f} ({at})" for at in best)
        if hit is None:
            best_hit = "-"
        else:
            best_hit = f"{np.nanmax(hit):.2f} ({int(np.nanargmax(hit))})"
        missed = f"{np.nanmean(profile.variability(task)):.3f}"
        lines.append(f"{task:<{size}}  {ability:>6}  {shown:<32}{best_hit:>14}  {missed:>18}")
    apart = profile.agreement[np.triu_indices(len(profile.tasks), 1)]
    if np.isfinite(apart).any():
        lines.append(f"agreement of the tasks: correlation {np.nanmin(apart):.3f} or more")
    return "\n".join(lines)
