"""headwise gate: prove the losses of an artifact on prompts that its search did not see.

At 95% confidence at most --max-lost fewer correct answers and --max-perplexity more perplexity.
4, 8 and 16 contexts of each task are measured, until both are proven or one is exceeded.

    headwise gate cfg.yaml --model MODEL --max-lost 0.03
    headwise gate cfg.yaml --model FINE_TUNE --out new.yaml

The exit status is 3 where a limit is exceeded, or nothing is proven.

With --out an artifact that passes is written for the model that it was checked on: a fine-tune, or
the model of an import, which does not say which it is for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from artifacts import Artifact, Evidence, HeadwiseError, TaskFigures, Verdict, load_pair
from artifacts.cli.arguments import (
    ArtifactFile,
    Device,
    Dtype,
    Json,
    Length,
    ModelName,
    Out,
    Seed,
    deliver,
)
from artifacts.cli.command import FOUND, one_process
from artifacts.cli.options import ADVANCED, Arg, CommandConfig
from artifacts.files import check_writable
from kernels.patterns import LayerPlan
from profiling.inside.head_fidelity import fidelity
from profiling.models.device import settled
from profiling.models.loading import LoadedModel, load_model
from profiling.progress import phase
from profiling.prompts.held_out import GATE_SET, Seen
from profiling.prompts.options import LISTED, Tasks, words
from profiling.prompts.prompt import GATE_TASKS, Prompt
from profiling.quality.sequences import Reference, TokenSequence, sequences
from runtime.fingerprint import check
from runtime.layers import make_plans
from search.model.evidence import HELD_OUT, prompt_set, validated
from search.model.limits import Limits
from search.model.losses import ContextLoss, context_losses, format_row, task_figures
from search.model.prompts import HeldOut, check_positions
from search.model.proof import ERROR, Kind, prove
from search.model.transfer import check_shape, info_of, write_for

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

# Heads that are named where the gate fails.
_NAMED = 10
Worst = tuple[int, int, float, float | None]


class Config(CommandConfig):
    """An artifact to check, and the prompts to check it on.

    Attributes:
        tasks, length: None for the default tasks and the length that was searched.
        out: where an artifact that passes is written for this model, whose weights may be other
            ones.
    """

    artifact: ArtifactFile
    model: ModelName
    limits: Limits = Field(default_factory=Limits)
    out: Annotated[
        Out | None, Arg("write the artifact for this model, with its fingerprint and evidence")
    ] = None
    tasks: Annotated[
        Tasks | None, Arg(f"what is asked (default {words(GATE_TASKS)}); {LISTED}; repeatable")
    ] = None
    length: Annotated[Length | None, Arg("tokens of a prompt (default: the searched length)")] = (
        None
    )
    samples: Annotated[
        int,
        Arg(
            "factor of the 4, 8 and 16 contexts of each task and windows of each text",
            group=ADVANCED,
        ),
        Field(ge=1),
    ] = 1
    seed: Seed = 0
    dtype: Dtype = "auto"
    device: Device = "auto"
    beyond_positions: Annotated[
        bool, Arg("allow a --length over the model's positions", group=ADVANCED)
    ] = False
    as_json: Json = None


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """Losses of an artifact on held-out prompts, and their verdict.

    Attributes:
        tasks: figures of each, and of all answers together.
        verdict: bounds of the losses, and their limits.
        heads: where a limit is exceeded, the ten whose error exceeds the searched one most, as
            (layer, head, error, error that the search measured; None where none did).
        left_out: sections that were measured on the former weights, of an artifact that was written
            for others.
    """

    tasks: tuple[TaskFigures, ...]
    verdict: Verdict
    heads: tuple[Worst, ...]
    left_out: tuple[str, ...] = ()

    @property
    def passes(self) -> bool:
        """True if the artifact is proven to be within the limits."""
        return self.verdict.proven


def measure(config: Config, loaded: LoadedModel | None = None) -> GateResult:
    """Check an artifact against its limits; one that passes is written to `out` if that is set.

    Args:
        config: of the check.
        loaded: the model; None loads the one that the config names.

    Raises:
        HeadwiseError: the model is another one, without `out` of other weights, with it of another
            shape; or the length is beyond its positions.
    """
    one_process("headwise gate")
    if config.out is not None:
        check_writable(config.out)
    artifact, arrays = load_pair(config.artifact)
    length = _length(config, artifact)
    if loaded is None:
        config = settled(config)
        loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    if config.out is None:
        check(artifact.model, loaded.model)
    else:
        check_shape(artifact, loaded)
    if not config.beyond_positions:
        check_positions(length, info_of(loaded))
    held_out = HeldOut(
        config.tasks or GATE_TASKS,
        loaded,
        length=length,
        samples=config.samples,
        seed=config.seed,
        seen=Seen.by([arrays]),
        # No search has as many batches: its own may have chosen the budget.
        first=GATE_SET,
    )
    held_out.announce()
    plans = plans_of(artifact, length)
    used: list[Prompt] = []
    measured: list[TokenSequence] = []

    def measure(kind: Kind, contexts: int) -> Sequence[ContextLoss]:
        prompts = held_out.take(kind, contexts)
        reference = Reference(loaded.model, sequences(prompts, loaded.tokenizer))
        losses = []
        with phase(f"held-out {kind}s", len(reference.sequences), "prompts") as shown:
            for number in range(len(reference.sequences)):
                losses.append(reference.losses(number, plans))
                shown.update()
        used.extend(prompts)
        measured.extend(reference.sequences)
        return context_losses(reference.sequences, losses)

    proof = prove(measure, config.limits, kinds=held_out.kinds, error=ERROR)
    tasks = task_figures(proof.losses, length)
    heads: tuple[Worst, ...] = ()
    if proof.fault is not None:
        heads = _worst(loaded, artifact, arrays, used)
    result = GateResult(tasks=tasks, verdict=proof.verdict, heads=heads)
    if config.out is None or not result.passes:
        return result
    evidence = Evidence(
        verdict=result.verdict,
        reported_on=prompt_set(HELD_OUT, measured),
        tasks=validated(tasks),
    )
    left_out = write_for(loaded, config.artifact, config.out, artifact, arrays, evidence)
    return replace(result, left_out=left_out)


def plans_of(artifact: Artifact, length: int) -> dict[int, LayerPlan]:
    """The layer plans that an artifact serves a prompt of this length with."""
    if length < artifact.prefill.dense_below:
        return {}
    return make_plans(artifact)


def _length(config: Config, artifact: Artifact) -> int:
    """The prompts' length: --length, or the searched length.

    Raises:
        HeadwiseError: none is known, or all would be dense.
    """
    if config.length is not None:
        length = config.length
    elif artifact.search is not None:
        length = artifact.search.calibration.length
    else:
        raise HeadwiseError(f"{config.artifact} has no search section, so --length is required")
    dense_below = artifact.prefill.dense_below
    if length < dense_below:
        raise HeadwiseError(
            f"--length {length} is below the artifact's dense_below of {dense_below}: all would be "
            "dense; ask for longer prompts"
        )
    return length


def _worst(
    loaded: LoadedModel, artifact: Artifact, arrays: Mapping[str, Array], prompts: Sequence[Prompt]
) -> tuple[Worst, ...]:
    """(layer, head, error, error the search measured) of the heads furthest beyond their search."""
    errors = np.mean([fidelity(loaded.model, artifact, prompt).error for prompt in prompts], axis=0)
    before = np.full_like(errors, np.nan)
    if "chosen.error" in arrays:
        before = np.asarray(arrays["chosen.error"])
    excess = np.where(np.isfinite(errors), errors - np.nan_to_num(before), -np.inf)
    worst: list[Worst] = []
    for at in np.argsort(-excess, axis=None)[:_NAMED]:
        layer, head = divmod(int(at), excess.shape[1])
        if np.isfinite(excess[layer, head]):
            searched = float(before[layer, head])
            known = searched if np.isfinite(searched) else None
            worst.append((layer, head, float(errors[layer, head]), known))
    return tuple(worst)


def run(config: Config) -> int:
    """Run the gate: 0 where the artifact is proven, else 3."""
    result = measure(config)
    deliver(report(config, result), record(result), config.as_json)
    if result.passes:
        return 0
    return FOUND


def report(config: Config, result: GateResult) -> str:
    """The verdict, then a line for each task, then the file that was written."""
    if result.passes:
        headline = f"proven: {result.verdict.losses}"
    else:
        headline = f"not proven: {result.verdict.why}"
    lines = [headline, *(f"  {format_row(task)}" for task in result.tasks)]
    for layer, head, error, before in result.heads:
        line = f"  head {layer}.{head}: error {error:.3f}"
        if before is not None:
            line += f", its search measured {before:.3f}"
        lines.append(line)
    if config.out is None:
        return "\n".join(lines)
    if result.passes:
        lines.append(f"wrote {config.out}, for {config.model}")
    else:
        lines.append(f"nothing was written; headwise search --model {config.model} searches anew")
    if result.left_out:
        sections = ", ".join(result.left_out)
        lines.append(f"left out, for they were measured on other weights: {sections}")
    return "\n".join(lines)


def record(result: GateResult) -> dict[str, Any]:
    """The same as JSON."""
    return {
        "passes": result.passes,
        "verdict": result.verdict.model_dump(),
        "tasks": [task.model_dump() for task in result.tasks],
        "heads": result.heads,
        "left_out": result.left_out,
    }
