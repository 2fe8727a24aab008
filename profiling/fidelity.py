"""python -m profiling.fidelity: how near each head's sparse attention comes to dense attention, by any artifact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from artifacts import Artifact, HeadwiseError, Measurement, ModelInfo, arguments, load_pair, update
from artifacts.command_line import ArgumentParser, run_command
from profiling.environment import environment
from profiling.inside.head_fidelity import Fidelity, fidelity
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.prompt import TASKS, Prompt, make_prompts
from profiling.quality.earlier_choices import Earlier, compared
from profiling.quality.earlier_choices import report as report_earlier
from runtime.fingerprint import check, fingerprint

if TYPE_CHECKING:
    from artifacts.sidecar import Array

_EPILOG = """\
It measures on prompts of your own choosing what the search measured on its own: how much of each head's attention the
patterns keep (recall), how far the head's output is off (relative L2), and what is computed (density). So it says what
patterns are worth that were imported from another tool, and with --against what a conversion cost.

examples:
  python -m profiling.fidelity cfg.yaml --model smollm2
  python -m profiling.fidelity cfg.yaml --model smollm2 --task text:novel.txt --length 8192 --samples 3
  python -m profiling.fidelity cfg.yaml --model smollm2 --against back.yaml     what does back.yaml lose?
  python -m profiling.fidelity cfg.yaml --model smollm2 --update                keep the figures as evidence
"""
_MEASURES = ("recall", "error", "density")
_SHORTEST = 1024


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What to measure on which prompts. length: None takes the longest searched, or what is served sparsely at all."""

    file: Path
    model: str
    against: Path | None = None
    task: str = "passkey"
    length: int | None = None
    samples: int = 1
    seed: int = 1000
    dtype: str = "bfloat16"
    device: str = "cpu"
    update: bool = False
    earlier: bool = False
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Means over heads and prompts of the file and, where it was asked for, of the one it is held against.

    changed: heads whose pattern differs between the two, and their mean recall in each; None for one file. earlier:
    what choices of heads of earlier layers are worth, where that was asked for.
    """

    length: int
    dense_below: int
    mean: dict[str, float]
    against: dict[str, float] | None
    changed: tuple[int, float, float] | None
    layers: tuple[float, ...]
    earlier: tuple[Earlier, ...] = ()


def run(config: Measured) -> tuple[Result, Fidelity]:
    """Measure, and with `update` write what was found into the artifact.

    Raises:
        HeadwiseError: a file cannot be read or is for another model, or the prompts cannot be made.
    """
    artifact, arrays = load_pair(config.file)
    other = None if config.against is None else load_pair(config.against)
    if not artifact.patterns:
        raise HeadwiseError(f"{config.file} has no patterns: nothing of it is prefill attention")
    if config.samples < 1:
        raise HeadwiseError(f"--samples must be at least 1, got {config.samples}")
    if config.earlier and config.samples < 3:
        raise HeadwiseError(f"--earlier fits on one prompt and needs two to measure on: --samples is {config.samples}")
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    for known in (artifact, *(() if other is None else other[:1])):
        check(known.model, loaded.model)
    length = config.length or _length(artifact)
    prompts = make_prompts(config.task, loaded.tokenizer, length=length, samples=config.samples, seed=config.seed)
    found = _mean(loaded, artifact, arrays, prompts)
    result = _result(length, artifact, found)
    if other is not None:
        result = _compared(result, artifact, found, other[0], _mean(loaded, other[0], other[1], prompts))
    if config.earlier:
        result = replace(result, earlier=tuple(compared(loaded.model, artifact, arrays, prompts)))
    if config.update:
        _keep(config, length, found, fingerprint(loaded.model, name=loaded.name, revision=loaded.revision))
    return result, found


def _length(artifact: Artifact) -> int:
    searched = () if artifact.search is None else artifact.search.calibration.lengths
    return min(max(*searched, artifact.prefill.dense_below, _SHORTEST), artifact.model.max_positions)


def _mean(loaded: LoadedModel, artifact: Artifact, arrays: Mapping[str, Array], prompts: Sequence[Prompt]) -> Fidelity:
    """Each head's mean over the prompts."""
    measured = [fidelity(loaded.model, artifact, prompt, arrays) for prompt in prompts]

    def mean(name: str) -> np.ndarray:
        return np.stack([getattr(each, name) for each in measured]).mean(axis=0, dtype=np.float32)

    return Fidelity(error=mean("error"), recall=mean("recall"), density=mean("density"))


def _result(length: int, artifact: Artifact, found: Fidelity) -> Result:
    layers = [float(np.mean(row)) for row in found.recall if not np.isnan(row).any()]
    mean = {name: float(np.nanmean(getattr(found, name))) for name in _MEASURES}
    below = artifact.prefill.dense_below
    return Result(length=length, dense_below=below, mean=mean, against=None, changed=None, layers=tuple(layers))


def _compared(result: Result, artifact: Artifact, found: Fidelity, other: Artifact, kept: Fidelity) -> Result:
    rows = zip(artifact.prefill.layers, other.prefill.layers, strict=True)
    differ = np.zeros_like(found.recall, dtype=bool)
    for layer, (ours, theirs) in enumerate(rows):
        if ours is not None and theirs is not None:
            pairs = zip(ours, theirs, strict=True)
            differ[layer] = [artifact.patterns[a] != other.patterns[b] for a, b in pairs]
    changed = (0, 0.0, 0.0)
    if differ.any():
        changed = (int(differ.sum()), float(found.recall[differ].mean()), float(kept.recall[differ].mean()))
    mean = {name: float(np.nanmean(getattr(kept, name))) for name in _MEASURES}
    return Result(**{**vars(result), "against": mean, "changed": changed})


def _keep(config: Measured, length: int, found: Fidelity, model: ModelInfo) -> None:
    """Into the artifact: the model where an import left it open, the means as evidence, and the heads' own figures."""

    def change(artifact: Artifact, arrays: dict[str, Array]) -> tuple[Artifact, Mapping[str, Array]]:
        entries = tuple(
            Measurement(
                name=f"{name} on {config.task.partition(':')[0]}",
                value=float(np.nanmean(getattr(found, name))),
                unit="" if name == "error" else "share",
                baseline=0.0 if name == "error" else 1.0,
                baseline_name="dense attention",
                length=length,
                samples=config.samples,
                command=config.command,
                device=config.device,
                versions=environment(config.device),
            )
            for name in _MEASURES
        )
        evidence = artifact.evidence.with_measurements(entries, command=config.command)
        whole = model if artifact.model.weights_sha256 is None else artifact.model
        # A search has scores of its own, on the prompts that it chose by.
        own = {} if artifact.search else {f"chosen.{name}": getattr(found, name) for name in _MEASURES}
        return artifact.model_copy(update={"model": whole, "evidence": evidence}), {**arrays, **own}

    update(config.file, change)


def report(result: Result) -> str:
    """The figures as text."""
    lines = [f"{'':10}{'recall':>9}{'error':>9}{'density':>9}"]
    for name, mean in (("this file", result.mean), ("against", result.against)):
        if mean is not None:
            lines.append(f"{name:10}" + "".join(f"{mean[measure]:9.4f}" for measure in _MEASURES))
    if result.against is not None and result.changed is not None:
        heads, ours, theirs = result.changed
        lost = result.mean["recall"] - result.against["recall"]
        lines.append(
            f"the second file {'loses' if lost >= 0 else 'gains'} {abs(lost):.4f} of recall, mean of all heads; "
            + (
                f"{heads} heads have another pattern: {ours:.4f} -> {theirs:.4f}"
                if heads
                else "no head has another pattern"
            )
        )
    worst = min(result.layers)
    lines.append(f"at {result.length:,} tokens; the layer that keeps least keeps {worst:.4f}")
    if result.length < result.dense_below:
        lines.append(f"prompts below {result.dense_below:,} tokens are served densely: longer ones are what counts")
    return "\n".join([*lines, *(report_earlier(result.earlier) if result.earlier else [])])


def parser() -> ArgumentParser:
    """The command line of python -m profiling.fidelity."""
    p = ArgumentParser(
        prog="python -m profiling.fidelity",
        description="Measure how near each head's sparse attention comes to dense attention.",
        epilog=_EPILOG,
    )
    arguments.add_artifact(p, dest="file")
    arguments.add_model(p)
    p.add_argument(
        "--against", metavar="FILE", type=Path, help="another artifact of the same model, measured beside it"
    )
    arguments.add_task(p, f"of the prompts: {TASKS} (default: %(default)s)", several=False, default=Measured.task)
    arguments.add_length(p, "tokens of a prompt (default: as searched, or dense_below)")
    p.add_argument("--samples", type=int, default=Measured.samples, help="prompts (default: %(default)s)")
    p.add_argument(
        "--earlier",
        action="store_true",
        help="also what heads lose when the best-fitting head of an earlier layer chooses for them, instead of an "
        "estimate of their own: fitted on the first prompt, measured on the others",
    )
    arguments.add_seed(p, Measured.seed)
    arguments.add_dtype(p, default=Measured.dtype)
    arguments.add_device(p, default=Measured.device)
    p.add_argument(
        "--update", action="store_true", help="write the means into ARTIFACT as evidence, and what an import left open"
    )
    arguments.add_json(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    to_json = options.pop("json")
    command = arguments.as_typed("profiling.fidelity", argv)
    result, found = run(Measured(**options, command=command))
    tables = {name: getattr(found, name).tolist() for name in _MEASURES}
    heads = {name: [[None if v != v else v for v in row] for row in table] for name, table in tables.items()}
    arguments.deliver(report(result), {"command": command, **asdict(result), "heads": heads}, to_json)
    return 0


if __name__ == "__main__":
    run_command(main)
