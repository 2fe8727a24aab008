"""Takes an artifact over to a fine-tune: drift on the prompts of its search, then a new search of what moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from artifacts import Artifact, HeadwiseError, ModelInfo, SearchInfo, arguments, load_pair
from artifacts.files import check_writable
from artifacts.options import at_least, check_ranges, option, shared
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.prompt import Prompt, digest, make_prompts, parse_task
from profiling.quality.contexts import by_context
from profiling.ranks import one_process
from runtime.fingerprint import fingerprint
from runtime.layers import attention_layers, sliding_layers
from search.model.prompts import whole_contexts
from search.transferring.drift import Drift, measure_drift
from search.transferring.record import write_transferred
from search.transferring.rules import rule_of, search_again

if TYPE_CHECKING:
    from artifacts.sidecar import Array

# Between prompts of one model the errors of most heads differ by less: docs/search.md, "A fine-tune".
MAX_DRIFT = 0.25
# What makes another shape, from what a person recognises first. Not the hash of the configuration: a fine-tune may have
# more words, and how far its heads have moved is measured anyway.
_SHAPE = ("architecture", "num_layers", "num_heads", "num_kv_heads", "head_dim", "rope")


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What to take over to which model; None takes what the search had."""

    source: Path = shared(arguments.add_artifact, "artifact with its sidecar", dest="source", old="--from")
    model: str = shared(arguments.add_model, "the fine-tune: hub id, local folder or GGUF file")
    out: Path = shared(arguments.add_out, "artifact to write")
    max_drift: float = option("how much a head's error may grow", default=MAX_DRIFT, within=at_least(0))
    calibration: tuple[str, ...] = shared(
        arguments.add_task,
        "a task of the search that has a file: text:FILE",
        dest="calibration",
        old="--calibration",
        default=(),
    )
    dtype: str | None = shared(partial(arguments.add_dtype, default=None), "(default: as searched)", default=None)
    device: str = shared(arguments.add_device, default="cpu")
    backend: str = shared(arguments.add_backend, default="auto")
    revision: str | None = shared(arguments.add_revision, default=None)
    fresh: bool = shared(arguments.add_fresh, default=False)
    picture: bool = shared(arguments.add_picture, default=True)
    command: str = ""

    def __post_init__(self) -> None:
        check_ranges(self)
        for task in self.calibration:
            parse_task(task)


def run(config: Transfer) -> tuple[Artifact, Artifact, Drift, np.ndarray]:
    """Measure, search again, and write `config.out`; a killed run goes on from the layers it finished.

    Returns:
        The artifact that was written, the one it was taken from, the drift, and which heads moved, (L, H).

    Raises:
        HeadwiseError: the artifact was not searched, the model is of another shape or reads the prompts otherwise.
    """
    one_process("search.transfer")
    check_writable(config.out)
    artifact, arrays = load_pair(config.source)
    _check_searched(config.source, artifact, arrays)
    rule = rule_of(artifact, arrays, backend=config.backend)
    assert artifact.search is not None
    loaded = load_model(
        config.model, dtype=config.dtype or artifact.search.dtype, device=config.device, revision=config.revision
    )
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    _check_shape(artifact, model, loaded)
    prompts = _prompts(config, artifact, loaded)
    with Ledger(config.out, "transfer", settings=_depends(config, artifact, model), fresh=config.fresh) as ledger:
        drift = measure_drift(loaded, artifact, arrays, prompts, ledger, backend=config.backend)
        moved = drift.moved(config.max_drift)
        heads = [(int(layer), int(head)) for layer, head in np.argwhere(moved)]
        found = search_again(loaded, rule, prompts, heads, ledger)
        written = write_transferred(config.out, config.command, artifact, arrays, model, drift, found)
        if config.picture:
            from profiling.pattern_map import draw_pattern_map

            draw_pattern_map(config.out, config.out.with_suffix(""))
        ledger.remove()
    return written, artifact, drift, moved


def _check_searched(file: Path, artifact: Artifact, arrays: dict[str, Array]) -> None:
    if artifact.search is None:
        raise HeadwiseError(f"{file} was not searched here: there is nothing that its heads could have drifted from")
    wanted = (artifact.model.num_layers, artifact.model.num_heads)
    if "chosen.error" not in arrays or arrays["chosen.error"].shape != wanted:
        raise HeadwiseError(f"{file} has no errors of its heads in its sidecar (chosen.error), which drift counts from")


def _check_shape(artifact: Artifact, actual: ModelInfo, loaded: LoadedModel) -> None:
    expected = artifact.model
    for field in _SHAPE:
        wanted, found = getattr(expected, field), getattr(actual, field)
        if wanted != found:
            raise HeadwiseError(
                f"{actual.name} is no fine-tune of {expected.name}: {field} is {wanted} in the artifact, {found} in it"
            )
    modules = attention_layers(loaded.model)
    free = modules.keys() - sliding_layers(modules)
    for layer, row in enumerate(artifact.prefill.layers):
        if row is not None and layer not in free:
            why = "slides over a window" if layer in modules else "has no attention"
            raise HeadwiseError(f"layer {layer} has patterns in the artifact, but {why} in {actual.name}")


def _prompts(config: Transfer, artifact: Artifact, loaded: LoadedModel) -> list[Prompt]:
    """The search's own prompts of its longest length, as this model's tokenizer writes them: the very same tokens."""
    search = artifact.search
    assert search is not None
    calibration = search.calibration
    given = {parse_task(task).name: task for task in config.calibration}
    for name in given:
        if name not in calibration.tasks:
            raise HeadwiseError(f"--task {name}: the search looked at {', '.join(calibration.tasks)}")
    tasks = [given.get(name, name) for name in calibration.tasks]
    for task in tasks:
        if ":" in task and task not in given.values():
            raise HeadwiseError(f"the search looked at {task}, whose file is not in the artifact: give --task")
    by_length = {length: _made(search, tasks, length, loaded) for length in calibration.lengths}
    prompts = [prompt for made in by_length.values() for prompt in made]
    if digest(prompts) != calibration.sha256:
        raise HeadwiseError(
            f"calibration.sha256 is {calibration.sha256[:12]}... in the artifact, {digest(prompts)[:12]}... by the "
            f"tokenizer of {loaded.name}: it writes the same prompts otherwise, or a task's file was changed"
        )
    # The sidecar's errors are those at the longest; shorter ones only say how sizes grow.
    longest = by_length[max(calibration.lengths)]
    if search.allocation == "heads":
        return longest
    # What was scored: contexts, each once, without later turns.
    firsts = [longest[numbers[0]] for numbers in by_context(longest)]
    return [replace(prompt, input_ids=prompt.context, turn=0) for prompt in firsts]


def _made(search: SearchInfo, tasks: Sequence[str], length: int, loaded: LoadedModel) -> list[Prompt]:
    """The search's prompts of one length."""
    how: dict[str, Any] = {"length": length, "samples": search.calibration.samples, "seed": search.seed}
    if search.allocation == "model":
        return whole_contexts(tasks, loaded, **how)
    return [prompt for task in tasks for prompt in make_prompts(task, loaded.tokenizer, **how)]


def _depends(config: Transfer, artifact: Artifact, model: ModelInfo) -> dict[str, Any]:
    """All that drift and scores depend on."""
    return {
        "artifact": artifact.content_sha256,
        "model": model.name,
        "weights": model.weights_sha256,
        "dtype": config.dtype,
        "device": config.device,
        "backend": config.backend,
    }


def report(written: Artifact, source: Artifact, drift: Drift, moved: np.ndarray, config: Transfer) -> str:
    """What the transfer found, as text."""
    by_head = drift.by_head
    known = np.isfinite(by_head)
    heads, again = int(known.sum()), int(moved.sum())
    worst = np.unravel_index(np.nanargmax(by_head), by_head.shape)
    lines = [
        f"{written.model.name} with the patterns of {source.model.name}: {again} of {heads} heads drifted by more than "
        f"{config.max_drift:g} and were searched again",
        f"drift    median {np.median(by_head[known]):+.3f}, 95% {np.quantile(by_head[known], 0.95):+.3f}, largest "
        f"{by_head[worst]:+.3f} (head {worst[0]}.{worst[1]}: error {drift.before[worst]:.4f} -> "
        f"{drift.here.error[worst]:.4f})",
    ]
    assert written.search is not None and source.search is not None
    taken, now = float(np.nanmean(drift.here.error)), written.search.summary
    lines.append(f"error    {source.search.summary.error:.4f} there, {taken:.4f} as taken over, {now.error:.4f} now")
    lines.append(f"density  {source.search.summary.density:.4f} there, {now.density:.4f} now")
    if again:
        counts = [(int(layer), int(count)) for layer, count in enumerate(moved.sum(1)) if count]
        lines.append("layers   " + ", ".join(f"{layer} ({count})" for layer, count in counts))
    left = [
        name for name in ("decode", "kv_cache") if getattr(source, name) is not None and getattr(written, name) is None
    ]
    if left:
        lines.append(f"not taken over: {' and '.join(left)}, which were found on {source.model.name}")
    lines.append(f"wrote {config.out}, {written.sidecar.file if written.sidecar else ''}")
    lines.append(f"next: python -m search.gate {config.out} --model {config.model} --task text:FILE")
    return "\n".join(lines)
