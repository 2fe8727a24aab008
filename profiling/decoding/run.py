"""Runs headwise decode: times, losses and answers of each method, as rows and a table.

Shapes: T texts, F forced tokens of each.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from artifacts import Artifact, HeadwiseError, load, load_pair
from profiling.caches.parsing import parse_cache
from profiling.decoding.config import Comparison
from profiling.decoding.losses import apart, by_position, in_blocks
from profiling.decoding.steps import filled, methods, step_seconds
from profiling.decoding.table import Row
from profiling.environment import environment
from profiling.ledger import Ledger
from profiling.models.device import settled
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.held_out import Seen, unseen_prompts
from profiling.prompts.prompt import Prompt, digest, parse_task
from profiling.quality.answers import answers, is_right
from profiling.quality.forced_decode import Begun, begin, dense_losses, forced_losses
from profiling.quality.method import Method, of_policy
from profiling.speed.baselines import HEADWISE, KERNEL, MODEL, dense, of_rounds
from runtime import LoadedArtifact
from runtime import load as load_headwise
from runtime.caches.make import make_cache
from runtime.fingerprint import fingerprint
from runtime.memory import CacheBytes, cache_bytes


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Seconds of each round, cache bytes, largest batch and its seconds, by method."""

    seconds: dict[str, list[float]]
    held: dict[str, CacheBytes]
    batches: dict[str, int]
    batch_seconds: dict[str, list[float]]


def run(config: Comparison, ledger: Ledger | None = None) -> tuple[list[Row], dict[str, Any]]:
    """Load the model and compare the methods; return their rows, dense first, and the record.

    Args:
        ledger: keeps the quality of the methods that are done.

    Raises:
        HeadwiseError: the artifact has no decode section, or is for another model.
    """
    artifacts = _artifacts(config)
    config = settled(config)
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    compared = methods(artifacts, config.offload)
    compared += [of_policy(loaded, text, parse_cache(text)) for text in config.policies]
    timed = _timed(config, loaded, compared)
    files = [file for file in (config.config, *config.beside) if file is not None]
    seen = Seen.by(load_pair(file)[1] for file in files)
    overlaps: list[dict[str, Any]] = []
    prompts: list[Prompt] = []
    if config.trials:
        prompts, known = _prompts(
            config, loaded, seen, config.task, config.task_length, config.trials
        )
        overlaps += known
    texts: list[Prompt] = []
    if config.text:
        texts, known = _prompts(
            config, loaded, seen, f"text:{config.text}", config.text_length, config.texts
        )
        overlaps += known
    begun = cache(partial(_shared, config, loaded, texts))
    depends: dict[str, Any] = {}
    if ledger is not None:
        depends = _depends(config, loaded, prompts, texts)
    rows: list[Row] = []
    losses: dict[str, Tensor] = {}
    for method in compared:
        if method.name == KERNEL:
            # Quality is the model's own attention's; only its times are of interest.
            if timed.seconds:
                rows.append(Row(method=method.name, **_timed_fields(config, method.name, timed)))
            continue
        measure = partial(_quality, config, loaded, method, prompts, texts, begun)
        if ledger is None:
            quality = measure()
        else:
            unit = ledger.unit(f"{method.name} {method.identity}", depends)
            quality = ledger.once(unit, measure)
        if texts:
            losses[method.name] = torch.as_tensor(quality["losses"], dtype=torch.float32)
        rows.append(_row(config, method.name, timed, prompts, quality, losses))
    hashes = {name: each.artifact.content_sha256 for name, each in artifacts.items()}
    record = _record(config, hashes, rows, timed, losses)
    return rows, {**record, "seen_by_search": overlaps}


def _artifacts(config: Comparison) -> dict[str, LoadedArtifact]:
    """Load the artifacts by the names of their rows: the first is `headwise`."""
    if config.config is None:
        return {}
    artifacts: dict[str, LoadedArtifact] = {}
    for file in (config.config, *config.beside):
        if artifacts:
            name = file.stem
        else:
            name = HEADWISE
        artifact = load(file)
        if artifact.decode is None:
            raise HeadwiseError(f"{file} has no decode section: headwise filters writes one")
        if name in artifacts:
            raise HeadwiseError(f"artifacts of one name cannot be told apart: {name}")
        if config.dense_prefill:
            _check_shared(artifact)
        artifacts[name] = load_headwise(file)
    return artifacts


def _timed(config: Comparison, loaded: LoadedModel, compared: Sequence[Method]) -> Timed:
    """Time one sequence by each method, and with --memory the largest batch."""
    if not config.repeats:
        return Timed(seconds={}, held={}, batches={}, batch_seconds={})
    settings: dict[str, Any] = {
        "context": config.context,
        "steps": config.steps,
        "repeats": config.repeats,
    }
    caches = filled(loaded, compared, context=config.context, seed=config.seed)
    held = {name: cache_bytes(cache) for name, cache in caches.items()}
    seconds = step_seconds(loaded, compared, caches, **settings)
    if config.memory is None:
        return Timed(seconds=seconds, held=held, batches={}, batch_seconds={})
    fitting = [method for method in compared if not _chooses(method)]
    batches = {method.name: config.memory // held[method.name].device for method in fitting}
    for name, batch in batches.items():
        if batch < 1:
            raise HeadwiseError(
                f"--memory {config.memory} is too small for one sequence of {config.context} "
                f"tokens under {name}, "
                f"which takes {held[name].device}"
            )
        caches[name].batch_repeat_interleave(batch)
    batch_seconds = step_seconds(loaded, fitting, caches, **settings, batches=batches)
    return Timed(seconds=seconds, held=held, batches=batches, batch_seconds=batch_seconds)


def _chooses(method: Method) -> bool:
    """Tell an artifact whose filter layers choose keys for other layers."""
    return method.headwise is not None and not method.evicts


def _depends(
    config: Comparison, loaded: LoadedModel, prompts: Sequence[Prompt], texts: Sequence[Prompt]
) -> dict[str, Any]:
    """Collect all that a method's quality depends on besides the method."""
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    settings = ("dtype", "device", "forced", "dense_prefill", "prefill_chunk")
    return {
        "weights": model.weights_sha256,
        "prompts": digest(prompts),
        "texts": digest(texts),
        **{name: getattr(config, name) for name in settings},
    }


def _quality(
    config: Comparison,
    loaded: LoadedModel,
    method: Method,
    prompts: Sequence[Prompt],
    texts: Sequence[Prompt],
    shared: Callable[[], Sequence[Begun]],
) -> dict[str, Any]:
    """Measure a method's answers, losses (T, F) of texts, and tokens read in a step."""
    # Before the method is applied: it is a prefill of another one.
    sharing = None
    if texts and config.dense_prefill and _chooses(method):
        sharing = shared()
    losses = None
    tokens = None
    new_cache = partial(method.cache, loaded.model)
    with method.apply(loaded.model) as applied:
        label = f"{method.name}: {config.task}"
        given = answers(
            loaded.model,
            loaded.tokenizer,
            prompts,
            label=label,
            cache=new_cache,
            chunk=config.prefill_chunk,
        )
        if texts and method.name == MODEL:
            losses = dense_losses(loaded.model, texts, config.forced).cpu().numpy()
        elif texts:
            begun = sharing or begin(loaded.model, new_cache, texts, config.forced)
            losses = forced_losses(loaded.model, begun, config.forced).cpu().numpy()
        if _chooses(method):
            tokens = applied.stats().get("tokens")
    return {"answers": given, "losses": losses, "tokens": tokens}


def _check_shared(artifact: Artifact) -> None:
    """Raise HeadwiseError where an artifact cannot go on from a cache of another prefill."""
    if artifact.decode:
        selector = artifact.decode.omnikv.selector
    else:
        selector = "last"
    if artifact.kv_cache or selector != "last":
        raise HeadwiseError(
            "--dense-prefill shares one cache: artifacts with a kv_cache section, or a selector "
            "other than last, need their own"
        )


def _shared(config: Comparison, loaded: LoadedModel, texts: Sequence[Prompt]) -> list[Begun]:
    """Prefill the texts densely into caches for artifacts that choose by the last query."""
    with dense(loaded.model, KERNEL):
        return list(
            begin(
                loaded.model, lambda: make_cache(None, loaded.model, "never"), texts, config.forced
            )
        )


def _record(
    config: Comparison,
    hashes: Mapping[str, str | None],
    rows: Sequence[Row],
    timed: Timed,
    losses: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Make the JSON record: figures and settings.

    Args:
        hashes: content hashes by artifact.
    """
    if losses:
        by_method = by_position(losses, losses[MODEL])
    else:
        by_method = {}
    positions = {name: [asdict(part) for part in parts] for name, parts in by_method.items()}
    file = config.config
    return {
        "rows": [asdict(row) for row in rows],
        "all_seconds": timed.seconds,
        "by_position": positions,
        "batch_seconds": timed.batch_seconds,
        "speedups": {name: of_rounds(timed.seconds, name).over for name in timed.seconds},
        "settings": {
            **asdict(config),
            "config": file and file.name,
            "beside": [each.name for each in config.beside],
        },
        "artifacts": hashes,
        "environment": environment(config.device),
    }


def _prompts(
    config: Comparison, loaded: LoadedModel, seen: Seen, task: str, length: int, samples: int
) -> tuple[list[Prompt], list[dict[str, Any]]]:
    """Make prompts that no search has seen; if some were, the arguments of `overlap_sentence`."""
    made = unseen_prompts(
        task, loaded.tokenizer, length=length, samples=samples, seed=config.seed, seen=seen
    )
    overlaps: list[dict[str, Any]] = []
    if made.overlapping:
        overlaps.append(
            {
                "task": parse_task(task).name,
                "length": length,
                "overlapping": made.overlapping,
                "samples": samples,
            }
        )
    return made.prompts, overlaps


def _timed_fields(config: Comparison, name: str, timed: Timed) -> dict[str, Any]:
    """Fields of a row that were timed; none without repeats."""
    fields: dict[str, Any] = {}
    if name in timed.seconds:
        fields["token_seconds"] = statistics.median(timed.seconds[name]) / config.steps
        fields["device_bytes"] = timed.held[name].device
        fields["bank_bytes"] = timed.held[name].bank
    if name in timed.batch_seconds:
        tokens = timed.batches[name] * config.steps
        fields["batch"] = timed.batches[name]
        fields["batch_rate"] = tokens / statistics.median(timed.batch_seconds[name])
    return fields


def _row(
    config: Comparison,
    name: str,
    timed: Timed,
    prompts: Sequence[Prompt],
    quality: Mapping[str, Any],
    losses: Mapping[str, Tensor],
) -> Row:
    """Make a method's row.

    Args:
        losses: (T, F) of the methods so far, dense first, then an artifact.
    """
    fields = _timed_fields(config, name, timed)
    given = quality["answers"]
    if prompts:
        fields["right"] = sum(map(is_right, prompts, given))
    if name in losses:
        own = losses[name]
        first = next((each for each in losses if each != MODEL), name)
        fields["perplexity"] = math.exp(own.mean().item())
        fields["losses"] = in_blocks(own)
        if name != MODEL:
            fields["change"] = apart(own, losses[MODEL])
        if name not in (MODEL, first):
            fields["apart"] = apart(own, losses[first])
    return Row(method=name, answers=tuple(given), tokens=quality["tokens"], **fields)
