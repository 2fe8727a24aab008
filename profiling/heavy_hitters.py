"""python -m profiling.heavy_hitters: how unevenly attention is spread over tokens, and what keeping few of them costs.

sparsity    share of negligible entries, by head (H2O, Figure 2a)
totals      accumulated attention of the tokens, the most attended first: a power law (H2O, Figure 2b)
kept        attention that later queries find in the heavy hitters and latest tokens so far, by KV head and budget

Each as PNG and SVG with the numbers beside it, and all arrays in heavy_hitters.safetensors:

    heavy.shares (N)            budgets as shares of the tokens: half heavy hitters, half the latest
    heavy.kept (L, G, N)        attention kept, a mean over the query heads of a KV head
    heavy.error (L, G, N)       squared error left in the residual stream, as a share of its square
    heavy.sparsity (L, H)       share of entries below 1% of their row's largest
    heavy.totals (L, S)         shares of all attention, sorted, of the first prompt

L layers, G KV heads, H query heads, S prompt length; NaN for layers that slide or do not attend.

python -m profiling.heavy_hitters --model smollm2 --task text:book.txt --length 4096 --out heavy/
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from artifacts import HeadwiseError, arguments
from artifacts.command_line import ArgumentParser, run_command
from artifacts.files import atomic_write, check_writable, out_folder
from profiling.caches.budget_curves import BudgetCurves, measure
from profiling.environment import environment
from profiling.models.loading import LoadedModel, load_model
from profiling.pictures.drawing import LINES, line_style, new_figure, save, save_table
from profiling.pictures.head_survey import survey
from profiling.pictures.model_pictures import draw_grid, draw_totals, spread
from profiling.prompts.prompt import TASKS, Prompt, digest, make_prompts, parse_task

FILE = "heavy_hitters.safetensors"
_LEAST = 64
# Layers of a picture.
_SHOWN = 6


@dataclass(frozen=True, kw_only=True)
class HeavyHitters:
    """What to measure on."""

    model: str
    out: Path
    task: str = "passkey"
    length: int = 2048
    samples: int = 2
    seed: int = 0
    dtype: str = "bfloat16"
    device: str = "cpu"
    revision: str | None = None
    command: str = ""

    def __post_init__(self) -> None:
        parse_task(self.task)
        for name, least in (("length", _LEAST), ("samples", 1)):
            if (value := getattr(self, name)) < least:
                raise HeadwiseError(f"--{name} must be at least {least}, got {value}")


def run(config: HeavyHitters, loaded: LoadedModel | None = None) -> tuple[dict[str, np.ndarray], list[Path]]:
    """Measure and draw into the folder `config.out`: the arrays by the names above, and the files.

    Raises:
        HeadwiseError: anything that the user has to put right.
    """
    with out_folder(config.out):
        check_writable(config.out / FILE)
        loaded = loaded or load_model(config.model, dtype=config.dtype, device=config.device, revision=config.revision)
        prompts = make_prompts(
            config.task, loaded.tokenizer, length=config.length, samples=config.samples, seed=config.seed
        )
        surveys = [survey(loaded, prompt) for prompt in prompts]
        curves = measure(loaded, prompts)
        sparsity, totals = np.mean([one.sparsity for one in surveys], axis=0), surveys[0].totals
        arrays = _arrays(curves, sparsity, totals)
        return arrays, _write(config, loaded, prompts, arrays, totals)


def _arrays(curves: BudgetCurves, sparsity: np.ndarray, totals: Mapping[int, np.ndarray]) -> dict[str, np.ndarray]:
    length = len(next(iter(totals.values())))
    ranked = np.full((len(curves.kept), length), np.nan)
    for layer, sums in totals.items():
        ranked[layer] = np.sort(sums)[::-1] / sums.sum()
    whole = np.full((len(curves.kept), sparsity.shape[1]), np.nan)
    whole[: len(sparsity)] = sparsity
    made = {
        "heavy.shares": np.array(curves.shares),
        "heavy.kept": curves.kept,
        "heavy.error": curves.error,
        "heavy.sparsity": whole,
        "heavy.totals": ranked,
    }
    return {name: np.ascontiguousarray(array, dtype=np.float32) for name, array in made.items()}


def _write(
    config: HeavyHitters,
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    arrays: Mapping[str, np.ndarray],
    totals: Mapping[int, np.ndarray],
) -> list[Path]:
    from safetensors.numpy import save as to_bytes

    task, out = parse_task(config.task).name, config.out
    about = {
        "model": loaded.name,
        "revision": loaded.revision,
        "task": task,
        "sha256": digest(prompts),
        **{name: getattr(config, name) for name in ("length", "samples", "seed", "dtype", "device", "command")},
        "environment": environment(config.device),
    }
    atomic_write(out / FILE, to_bytes(dict(arrays), metadata={"headwise": json.dumps(about)}))
    made = f"{config.samples} prompts: {task}, {config.length} tokens, seed {config.seed} ({about['sha256'][:8]})"
    caption = f"{loaded.name}, {config.dtype} on {config.device}; {made}\ndrawn: {config.command}"
    label = "share of entries below\n1% of the row's largest"
    shares, kept = arrays["heavy.shares"].astype(float), arrays["heavy.kept"].astype(float)
    header = ["layer", "kv_head", *(f"{share:.6g}" for share in shares)]
    rows = ([layer, head, *kept[layer, head].tolist()] for layer in range(len(kept)) for head in range(kept.shape[1]))
    return [
        out / FILE,
        *draw_grid(out, "sparsity", arrays["heavy.sparsity"], label, caption),
        *draw_totals(out, totals, caption),
        *save(_kept_figure(shares, kept, caption), out / "kept"),
        save_table(out / "kept", header, rows),
    ]


def _kept_figure(shares: np.ndarray, kept: np.ndarray, caption: str) -> Any:
    """Attention kept over the budget, (L, G, N): some layers' means, and from the least to the most of all heads."""
    figure = new_figure(6.4, 4.0, caption)
    axes = figure.subplots()
    heads = kept.reshape(-1, kept.shape[2])
    heads = heads[np.isfinite(heads).all(1)]
    axes.fill_between(
        shares, heads.min(0), heads.max(0), color=LINES[-1], alpha=0.12, linewidth=0, label="all KV heads"
    )
    measured = np.flatnonzero(np.isfinite(kept).all((1, 2))).tolist()
    for at, layer in enumerate(spread(measured, _SHOWN)):
        axes.plot(shares, kept[layer].mean(0), linewidth=1.3, label=f"layer {layer}", **line_style(at))
    axes.set_xscale("log", base=2)
    axes.set_xticks(shares, [f"{share:.3g}" for share in shares])
    axes.set_xlabel("budget as a share of the tokens: half heavy hitters, half the latest")
    axes.set_ylabel("attention kept of later queries")
    axes.grid(color="#E0E0E0", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc="lower right")
    return figure


def report(arrays: Mapping[str, np.ndarray]) -> str:
    """How sparse attention is, where least, and what budgets keep: the mean and the worst KV head."""
    sparsity, kept, ranked = arrays["heavy.sparsity"], arrays["heavy.kept"], arrays["heavy.totals"]
    by_layer = np.array([row.mean() if np.isfinite(row).all() else np.nan for row in sparsity])
    least = int(np.nanargmin(by_layer))
    tenth = max(1, ranked.shape[1] // 10)
    lines = [
        f"negligible entries: {np.nanmean(by_layer):.3f} of all, least in layer {least} ({by_layer[least]:.3f})",
        f"the most attended tenth of the tokens gets {np.nanmean(ranked[:, :tenth].sum(1)):.3f} of all attention",
        "budget  kept  by the worst KV head",
    ]
    for at, share in enumerate(arrays["heavy.shares"].tolist()):
        layer, head = np.unravel_index(int(np.nanargmin(kept[:, :, at])), kept.shape[:2])
        lines.append(f"{share:6.4f}  {np.nanmean(kept[:, :, at]):.3f}  {kept[layer, head, at]:.3f} ({layer}.{head})")
    return "\n".join(lines)


def parser() -> ArgumentParser:
    """The command line of python -m profiling.heavy_hitters."""
    p = ArgumentParser(prog="python -m profiling.heavy_hitters", description=__doc__)
    arguments.add_model(p)
    arguments.add_out(p, f"folder for {FILE} and the pictures", metavar="FOLDER")
    arguments.add_task(p, f"prompts (default passkey); known: {TASKS}", several=False, default=HeavyHitters.task)
    arguments.add_length(p, "their length in tokens (default 2048)", default=HeavyHitters.length)
    p.add_argument("--samples", type=int, default=HeavyHitters.samples, help="how many (default 2)")
    arguments.add_seed(p, HeavyHitters.seed)
    arguments.add_dtype(p)
    arguments.add_device(p)
    arguments.add_revision(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    config = HeavyHitters(**options, command=arguments.as_typed("profiling.heavy_hitters", argv))
    arrays, _ = run(config)
    print(report(arrays))
    print(f"wrote {config.out / FILE} and the pictures")
    return 0


if __name__ == "__main__":
    run_command(main)
