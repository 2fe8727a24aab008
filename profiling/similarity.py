"""headwise similarity: which layers rank first the tokens that the layers after them attend to.

Prompts of several tasks are decoded step by step. At each step every layer that sees the whole
prompt ranks the tokens by its own attention, and S[i, j] is the share of layer j's attention on
layer i's top-k tokens: OmniKV, section 3.1 and Figures 1c, 6 and 8, with what it does to each KV
head's output. Layers that slide over a window are marked and left out.

headwise similarity --model smollm2 --out profile/ --task multi_hop:novel.txt --task kv_retrieval \\
    --task text:novel.txt --length 4096 --steps 32
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from artifacts import HeadwiseError
from artifacts.cli import arguments
from artifacts.cli.command import ArgumentParser, run_command
from artifacts.cli.options import add_arguments, config_of
from artifacts.files import check_writable
from profiling.models.loading import load_model, settled
from profiling.similarities.layer_similarity import SimilarityConfig, measure
from profiling.similarities.similarity_profile import FILE, Profile, load_profile, save_profile

__all__ = ["Profile", "SimilarityConfig", "load", "measure", "run"]

load = load_profile


def run(config: SimilarityConfig, out: Path) -> Profile:
    """Load the model, measure, and write similarity.safetensors and the CSV files into the folder
    `out`.

    Raises:
        HeadwiseError: anything that the user has to put right; no file is written then.
    """
    config = settled(config)
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HeadwiseError(
            f"cannot make the folder {out}: {(error.strerror or str(error)).lower()}"
        ) from None
    try:
        check_writable(out / FILE)
        loaded = load_model(
            config.model, dtype=config.dtype, device=config.device, revision=config.revision
        )
        profile = measure(config, loaded)
        save_profile(profile, out)
    except BaseException:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise
    return profile


def report(profile: Profile) -> str:
    """A line for each task: what is kept, by which layers best, the best hit rate, what freezing
    misses."""
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
        kept = f"{np.nanmean(later):.3f}" if np.isfinite(later).any() else "-"
        reach = profile.ability(task)
        hit = profile.hit(task)
        best = [
            int(at)
            for at in np.argsort(-np.nan_to_num(reach, nan=-1.0))[:3]
            if np.isfinite(reach[at])
        ]
        shown = ", ".join(f"{reach[at]:.3f} ({at})" for at in best)
        found = "-" if hit is None else f"{np.nanmax(hit):.2f} ({int(np.nanargmax(hit))})"
        missed = f"{np.nanmean(profile.variability(task)):.3f}"
        lines.append(f"{task:<{size}}  {kept:>6}  {shown:<32}{found:>14}  {missed:>18}")
    apart = profile.agreement[np.triu_indices(len(profile.tasks), 1)]
    if np.isfinite(apart).any():
        lines.append(f"agreement of the tasks: correlation {np.nanmin(apart):.3f} or more")
    return "\n".join(lines)


def parser() -> ArgumentParser:
    """The command line of headwise similarity."""
    p = ArgumentParser(prog="headwise similarity", description=__doc__)
    arguments.add_out(p, f"folder for {FILE} and a CSV for each array", metavar="FOLDER")
    add_arguments(p, SimilarityConfig)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    out = options.pop("out")
    start = time.perf_counter()
    command = arguments.as_typed("similarity", argv)
    config = config_of(SimilarityConfig, options, command=command)
    profile = run(config, out)
    print(report(profile))
    print(f"wrote {out / FILE} and a CSV for each array in {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    run_command(main)
