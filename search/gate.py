"""The gate: what an artifact loses on prompts that its search did not see, before anyone serves with it.

python -m search.gate cfg.yaml --model MODEL --max-kl 0.05 --max-drop 0.03
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from artifacts import HeadwiseError, load_pair
from artifacts.command_line import ArgumentParser, run_command
from profiling.inside.head_fidelity import fidelity
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.held_out import SETS, held_out, seen_by_searches
from profiling.prompts.prompt import Prompt, parse_task
from profiling.quality.logits import DenseLogits, Drift
from runtime import Headwise

MAX_KL, MAX_DROP = 0.05, 0.03
DEFAULT_TASKS = ("passkey", "kv_retrieval", "prose")
_NAMED = 10


@dataclass(frozen=True, kw_only=True)
class Limits:
    """kl: mean nats a token to dense attention. drop: perplexity over dense attention's, less 1. None: no limit."""

    kl: float | None = MAX_KL
    drop: float | None = MAX_DROP

    def __post_init__(self) -> None:
        for name, value in (("--max-kl", self.kl), ("--max-drop", self.drop)):
            if value is not None and not value > 0:
                raise HeadwiseError(f"{name} must be above 0, got {value}")

    def fault(self, drift: Drift) -> str | None:
        """Why that is too much, None where it is not."""
        if self.kl is not None and not drift.mean_kl <= self.kl:
            return f"KL to dense attention is {drift.mean_kl:.4f} nats a token, the limit (--max-kl) is {self.kl:g}"
        if self.drop is not None and not drift.perplexity_ratio - 1 <= self.drop:
            return f"perplexity is {drift.perplexity_ratio - 1:+.2%}, the limit (--max-drop) is {self.drop:+.2%}"
        return None


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What to check and on what; None for the default tasks and the artifact's own length."""

    config: Path
    model: str
    limits: Limits
    tasks: tuple[str, ...] | None = None
    length: int | None = None
    samples: int = 1
    seed: int = 0
    dtype: str = "bfloat16"
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """fault: None for one that passes. heads: where it fails, those with the most error beyond what was searched.

    heads: (layer, head, error found, error that the search measured).
    """

    drift: Drift
    fault: str | None
    heads: tuple[tuple[int, int, float, float], ...]


def run(config: Gate) -> Verdict:
    """Check an artifact against its limits."""
    artifact, arrays = load_pair(config.config)
    for task in config.tasks or ():
        parse_task(task)
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    if config.length is None and artifact.search is None:
        raise HeadwiseError(f"{config.config} says of no search at which length it holds: give --length")
    length = max(artifact.search.calibration.lengths) if config.length is None and artifact.search else config.length
    assert length is not None
    if length < artifact.prefill.dense_below:
        raise HeadwiseError(
            f"--length {length} is below the artifact's dense_below of {artifact.prefill.dense_below}: all would be "
            "dense; ask for longer prompts"
        )
    tasks = config.tasks or DEFAULT_TASKS
    seen = seen_by_searches([artifact], tasks, loaded.tokenizer)
    how: dict[str, Any] = {"length": length, "samples": config.samples, "seed": config.seed}
    # Of a number that no search uses: its own have judged already, and may have decided.
    prompts = held_out(tasks, loaded.tokenizer, **how, seen=seen, number=SETS)
    logits = DenseLogits(loaded.model, prompts)
    with Headwise(artifact, arrays).apply(loaded.model):
        drift = logits.drift()
    fault = config.limits.fault(drift)
    heads = _worst(loaded, artifact, arrays, prompts) if fault else ()
    return Verdict(drift=drift, fault=fault, heads=heads)


def _worst(loaded: LoadedModel, artifact: Any, arrays: Any, prompts: Sequence[Prompt]) -> Any:
    """(layer, head, error found, error the search measured) of the heads furthest beyond what was measured."""
    found = np.mean([fidelity(loaded.model, artifact, prompt, arrays).error for prompt in prompts], axis=0)
    told = np.asarray(arrays["chosen.error"]) if "chosen.error" in arrays else np.zeros_like(found)
    excess = np.where(np.isfinite(found), found - np.nan_to_num(told), -np.inf)
    order = np.argsort(-excess, axis=None)[:_NAMED]
    places = (divmod(int(at), excess.shape[1]) for at in order if np.isfinite(excess.flat[at]))
    return tuple((layer, head, float(found[layer, head]), float(told[layer, head])) for layer, head in places)


def parser() -> argparse.ArgumentParser:
    """The command line of python -m search.gate."""
    p = ArgumentParser(prog="python -m search.gate", description=__doc__)
    p.add_argument("config", type=Path, help="artifact, such as cfg.yaml")
    p.add_argument("--model", required=True, help="hub id, local folder, GGUF file, smollm2 or gemma3")
    p.add_argument("--max-kl", type=float, default=MAX_KL, help=f"nats a token to dense attention (default {MAX_KL})")
    p.add_argument("--max-drop", type=float, default=MAX_DROP, help=f"rise of perplexity (default {MAX_DROP})")
    p.add_argument("--tasks", nargs="+", help=f"default: {' '.join(DEFAULT_TASKS)}")
    p.add_argument("--length", type=int, help="tokens of a prompt (default: what was searched)")
    p.add_argument("--samples", type=int, default=1, help="prompts of each task (default 1)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    p.add_argument("--device", default="cpu")
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point: 0 where the artifact passes, 1 where it does not."""
    options = vars(parser().parse_args(argv))
    limits = Limits(kl=options.pop("max_kl"), drop=options.pop("max_drop"))
    tasks = options.pop("tasks")
    verdict = run(Gate(**options, limits=limits, tasks=tuple(tasks) if tasks else None))
    told = f"KL {verdict.drift.mean_kl:.4f} nats a token, perplexity {verdict.drift.perplexity_ratio - 1:+.2%}"
    if verdict.fault is None:
        print(f"passes: {told}")
        return 0
    print(f"fails: {verdict.fault} ({told})", file=sys.stderr)
    for layer, head, error, before in verdict.heads:
        print(f"  head {layer}.{head}: error {error:.3f}, its search measured {before:.3f}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    run_command(main)
