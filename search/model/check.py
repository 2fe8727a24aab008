"""Checks what an artifact loses on prompts that no search has seen, against limits, task by task.

One that passes can be written for the model that it was checked on, such as a fine-tune of the one
that was searched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from artifacts import Artifact, Evidence, HeadwiseError, Verdict, load_pair, save
from artifacts.analysis.merging import section_of
from artifacts.cli import arguments
from artifacts.cli.options import option, shared
from artifacts.files import check_writable
from artifacts.store.front_rows import FRONT_ROWS
from kernels.patterns import LayerPlan
from profiling.inside.head_fidelity import fidelity
from profiling.models.loading import LoadedModel, load_model
from profiling.progress import phase
from profiling.prompts.held_out import GATE_SET, Seen
from profiling.prompts.prompt import GATE_TASKS, Prompt, parse_task
from profiling.quality.sequences import Reference, sequences
from runtime.fingerprint import check, config_info, fingerprint
from runtime.layers import attention_layers, layer_plans, sliding_layers, text_config
from search.model.evidence import HELD_OUT, prompt_set
from search.model.limits import Limits
from search.model.prompts import held_out_prompts
from search.model.task_losses import TaskLoss, by_task, pooled, verdict

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

_NAMED = 10
# What makes another shape, from what a person recognises first. Not the hash of the configuration:
# a fine-tune may have more words.
_SHAPE = ("architecture", "num_layers", "num_heads", "num_kv_heads", "head_dim", "rope")


@dataclass(frozen=True, kw_only=True)
class Check:
    """What to check and on what; None for the default tasks and the artifact's own length.

    out: where an artifact that passes is written for this model, whose weights may be others than
    those it is for."""

    config: Path = shared(arguments.add_artifact)
    model: str = shared(arguments.add_model)
    limits: Limits
    out: Path | None = option(
        "write the artifact for this model, with its fingerprint and evidence",
        default=None,
        metavar="FILE",
    )
    tasks: tuple[str, ...] | None = shared(
        arguments.add_task,
        f"what is asked (default {' '.join(GATE_TASKS)})",
        default=None,
    )
    length: int | None = shared(
        arguments.add_length,
        "tokens of a prompt (default: what was searched)",
        default=None,
    )
    samples: int = option(
        "four times as many contexts of each task, twice as many windows of a text",
        default=1,
        advanced=True,
    )
    seed: int = shared(arguments.add_seed, default=0)
    dtype: str = shared(arguments.add_dtype, default="auto")
    device: str = shared(arguments.add_device, default="cpu")


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What an artifact loses on the prompts of a gate.

    fault: the limit that it is beyond; None where there is none. verdict: whether the prompts would
    have shown a loss. heads: where there is a fault, those with the most error beyond what was
    searched, as (layer, head, error found, error that the search measured). left_out: sections
    measured on the former weights, of an artifact that was written for others."""

    tasks: tuple[TaskLoss, ...]
    fault: str | None
    verdict: Verdict
    heads: tuple[tuple[int, int, float, float], ...]
    left_out: tuple[str, ...] = ()

    @property
    def passes(self) -> bool:
        """Whether nothing is lost, on prompts that would have shown it."""
        return self.fault is None and self.verdict.proven


def run(config: Check) -> Checked:
    """Check an artifact against its limits; one that passes is written to `out`, if there is one.

    Raises:
        HeadwiseError: the model is another one, without `out` of other weights, with it of another
        shape.
    """
    if config.out is not None:
        check_writable(config.out)
    artifact, arrays = load_pair(config.config)
    for task in config.tasks or ():
        parse_task(task)
    if config.length is None and artifact.search is None:
        raise HeadwiseError(
            f"{config.config} says of no search at which length it holds: give --length"
        )
    length = (
        max(artifact.search.calibration.lengths)
        if config.length is None and artifact.search
        else config.length
    )
    assert length is not None
    if length < artifact.prefill.dense_below:
        raise HeadwiseError(
            f"--length {length} is below the artifact's dense_below of "
            f"{artifact.prefill.dense_below}: all would be "
            "dense; ask for longer prompts"
        )
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    if config.out is None:
        check(artifact.model, loaded.model)
    else:
        _check_shape(artifact, loaded)
    how: dict[str, Any] = {"length": length, "samples": config.samples, "seed": config.seed}
    # A set that no search uses: its own may have decided.
    prompts = held_out_prompts(
        config.tasks or GATE_TASKS, loaded, **how, seen=Seen.by([arrays]), number=GATE_SET
    )
    reference = Reference(loaded.model, sequences(prompts, loaded.tokenizer))
    plans = plans_of(artifact, arrays, length)
    with phase("held-out prompts", len(reference.sequences), "prompts") as shown:
        losses = []
        for number in range(len(reference.sequences)):
            losses.append(reference.losses(number, plans))
            shown.update()
    tasks = by_task(reference.sequences, losses)
    fault = config.limits.fault(tasks)
    checked = Checked(
        tasks=tuple(tasks),
        fault=fault,
        verdict=verdict(tasks),
        heads=_worst(loaded, artifact, arrays, prompts) if fault else (),
    )
    if config.out is None or not checked.passes:
        return checked
    evidence = Evidence(
        verdict=checked.verdict,
        reported_on=prompt_set(HELD_OUT, reference.sequences),
        tasks=tuple(task.figures(length) for task in (*tasks, *pooled(tasks))),
    )
    return replace(checked, left_out=_write(config.out, artifact, arrays, loaded, evidence))


def _check_shape(artifact: Artifact, loaded: LoadedModel) -> None:
    """Raise HeadwiseError where the model is no fine-tune of the artifact's: other heads, layers or
    positions."""
    expected = artifact.model
    actual = config_info(text_config(loaded.model), type(loaded.model).__name__, loaded.name)
    for field in _SHAPE:
        wanted = getattr(expected, field)
        found = getattr(actual, field)
        if None not in (wanted, found) and wanted != found:
            raise HeadwiseError(
                f"{loaded.name} is no fine-tune of {expected.name}: {field} is {wanted} in the "
                f"artifact, {found} in it"
            )
    modules = attention_layers(loaded.model)
    free = modules.keys() - sliding_layers(modules)
    for layer, row in enumerate(artifact.prefill.layers):
        if row is not None and layer not in free:
            raise HeadwiseError(
                f"layer {layer} has patterns in the artifact, but slides or has no attention in "
                f"the model"
            )


def _write(
    out: Path,
    artifact: Artifact,
    arrays: Mapping[str, Array],
    loaded: LoadedModel,
    evidence: Evidence,
) -> tuple[str, ...]:
    """Write the artifact for the loaded model with what was measured on it; the names of what is
    left out.

    What is open in an imported artifact's fingerprint is filled in. Of other weights the front, the
    sections decode and kv_cache, and times stay behind: they were measured on the former ones, and
    nothing here has measured them again."""
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    former = artifact.model
    same = former.weights_sha256 in (None, model.weights_sha256)
    if same:
        evidence = artifact.evidence.model_copy(
            update={
                "verdict": evidence.verdict,
                "chosen_on": None,
                "reported_on": evidence.reported_on,
                "tasks": evidence.tasks,
            }
        )
        save(artifact.model_copy(update={"model": model, "evidence": evidence}), out, dict(arrays))
        return ()
    prefill = artifact.prefill.model_copy(update={"front": None})
    used = {name for row in prefill.layers for name in row or ()}
    changes: dict[str, Any] = {
        "model": model,
        "evidence": evidence,
        "prefill": prefill,
        "patterns": {name: pattern for name, pattern in artifact.patterns.items() if name in used},
        "decode": None,
        "kv_cache": None,
    }
    kept = {
        name: np.asarray(array)
        for name, array in arrays.items()
        if section_of(name) == "prefill" and name != FRONT_ROWS
    }
    save(artifact.model_copy(update=changes), out, kept)
    there = {
        "front": artifact.prefill.front,
        "decode": artifact.decode,
        "kv_cache": artifact.kv_cache,
    }
    return tuple(name for name, section in there.items() if section is not None)


def plans_of(artifact: Artifact, arrays: Mapping[str, Array], length: int) -> dict[int, LayerPlan]:
    """The plans that an artifact serves a prompt of this length with."""
    return {} if length < artifact.prefill.dense_below else layer_plans(artifact, arrays)


def _worst(
    loaded: LoadedModel, artifact: Artifact, arrays: Mapping[str, Array], prompts: Sequence[Prompt]
) -> Any:
    """(layer, head, error found, error the search measured) of the heads furthest beyond what was
    measured."""
    found = np.mean(
        [fidelity(loaded.model, artifact, prompt, arrays).error for prompt in prompts], axis=0
    )
    before = (
        np.asarray(arrays["chosen.error"]) if "chosen.error" in arrays else np.zeros_like(found)
    )
    excess = np.where(np.isfinite(found), found - np.nan_to_num(before), -np.inf)
    order = np.argsort(-excess, axis=None)[:_NAMED]
    at = (divmod(int(flat), excess.shape[1]) for flat in order if np.isfinite(excess.flat[flat]))
    return tuple(
        (layer, head, float(found[layer, head]), float(before[layer, head])) for layer, head in at
    )
