r"""headwise similarity: which layers rank first the tokens that the layers after them attend to.

Prompts of several tasks are decoded step by step. At each step every layer that sees the whole
prompt ranks the tokens by its own attention, and S[i, j] is the fraction of layer j's attention on
layer i's top-k tokens: OmniKV, section 3.1 and Figures 1c, 6 and 8, with what it does to each KV
head's output. Sliding-window layers are marked and left out.

headwise similarity --model smollm2 --out profile/ --task multi_hop:novel.txt --task kv_retrieval \
    --task text:novel.txt --length 4096 --steps 32
"""

from __future__ import annotations

import time
from typing import Annotated

import numpy as np

from artifacts.cli.arguments import Out
from artifacts.cli.interrupt import while_importing
from artifacts.cli.options import Arg
from artifacts.files import check_writable, out_folder
from profiling.similarities.config import SimilarityConfig
from profiling.similarities.similarity_profile import FILE, Profile, save_profile


class Config(SimilarityConfig):
    """The measurement, and the folder of its profile."""

    out: Annotated[Out, Arg(f"folder for {FILE} and a CSV for each array", metavar="FOLDER")]


def run(config: Config) -> int:
    """Measure, write the profile, and print a line for each task."""
    start = time.perf_counter()
    with while_importing():
        from profiling.models.device import settled
        from profiling.models.loading import load_model
        from profiling.similarities.layer_similarity import measure
    config = settled(config)
    with out_folder(config.out):
        check_writable(config.out / FILE)
        loaded = load_model(
            config.model, dtype=config.dtype, device=config.device, revision=config.revision
        )
        profile = measure(config, loaded)
        save_profile(profile, config.out)
    print(report(profile))
    seconds = time.perf_counter() - start
    print(f"wrote {config.out / FILE} and a CSV for each array in {seconds:.0f} s")
    return 0


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
