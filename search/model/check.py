"""Checks what an artifact loses on prompts that no search has seen, against limits, task by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from artifacts import Artifact, HeadwiseError, load_pair
from kernels.patterns import LayerPlan
from profiling.inside.head_fidelity import fidelity
from profiling.models.loading import LoadedModel, load_model
from profiling.progress import phase
from profiling.prompts.held_out import GATE_SET, Seen
from profiling.prompts.prompt import GATE_TASKS, Prompt, parse_task
from profiling.quality.sequences import Reference, sequences
from runtime.fingerprint import check
from runtime.plans import layer_plans
from search.model.limits import Limits
from search.model.prompts import held_out_prompts
from search.model.task_losses import TaskLoss, by_task, pooled

if TYPE_CHECKING:
    from artifacts.sidecar import Array

_NAMED = 10


@dataclass(frozen=True, kw_only=True)
class Check:
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

    tasks: tuple[TaskLoss, ...]
    fault: str | None
    heads: tuple[tuple[int, int, float, float], ...]


def run(config: Check) -> Verdict:
    """Check an artifact against its limits."""
    artifact, arrays = load_pair(config.config)
    for task in config.tasks or ():
        parse_task(task)
    if config.length is None and artifact.search is None:
        raise HeadwiseError(f"{config.config} says of no search at which length it holds: give --length")
    length = max(artifact.search.calibration.lengths) if config.length is None and artifact.search else config.length
    assert length is not None
    if length < artifact.prefill.dense_below:
        raise HeadwiseError(
            f"--length {length} is below the artifact's dense_below of {artifact.prefill.dense_below}: all would be "
            "dense; ask for longer prompts"
        )
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    check(artifact.model, loaded.model)
    return verdict(config, artifact, arrays, loaded, length)


def verdict(
    config: Check, artifact: Artifact, arrays: Mapping[str, Array], loaded: LoadedModel, length: int
) -> Verdict:
    """The same of an artifact and a model that are loaded."""
    how: dict[str, Any] = {"length": length, "samples": config.samples, "seed": config.seed}
    # A set that no search uses: its own may have decided.
    prompts = held_out_prompts(config.tasks or GATE_TASKS, loaded, **how, seen=Seen.by([arrays]), number=GATE_SET)
    reference = Reference(loaded.model, sequences(prompts, loaded.tokenizer))
    plans = plans_of(artifact, arrays, length)
    with phase("held-out prompts", len(reference.sequences), "prompts") as shown:
        losses = []
        for number in range(len(reference.sequences)):
            losses.append(reference.losses(number, plans))
            shown.update()
    found = by_task(reference.sequences, losses)
    fault = config.limits.fault(found)
    heads = _worst(loaded, artifact, arrays, prompts) if fault else ()
    tasks = tuple(replace(task, contexts=()) for task in (*found, *pooled(found)))
    return Verdict(tasks=tasks, fault=fault, heads=heads)


def plans_of(artifact: Artifact, arrays: Mapping[str, Array], length: int) -> dict[int, LayerPlan]:
    """The plans that an artifact serves a prompt of this length with."""
    return {} if length < artifact.prefill.dense_below else layer_plans(artifact, arrays)


def _worst(loaded: LoadedModel, artifact: Artifact, arrays: Mapping[str, Array], prompts: Sequence[Prompt]) -> Any:
    """(layer, head, error found, error the search measured) of the heads furthest beyond what was measured."""
    found = np.mean([fidelity(loaded.model, artifact, prompt, arrays).error for prompt in prompts], axis=0)
    before = np.asarray(arrays["chosen.error"]) if "chosen.error" in arrays else np.zeros_like(found)
    excess = np.where(np.isfinite(found), found - np.nan_to_num(before), -np.inf)
    order = np.argsort(-excess, axis=None)[:_NAMED]
    at = (divmod(int(flat), excess.shape[1]) for flat in order if np.isfinite(excess.flat[flat]))
    return tuple((layer, head, float(found[layer, head]), float(before[layer, head])) for layer, head in at)
