"""Runs headwise decode: times, losses and answers of each method, as rows and a table.

Shapes: T texts, F forced tokens of each.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from artifacts import HeadwiseError, load, load_pair
from profiling.caches.parsing import parse_cache
from profiling.decoding.config import Comparison
from profiling.decoding.steps import filled, methods, step_seconds
from profiling.decoding.table import Row, apart, in_blocks
from profiling.environment import environment
from profiling.evaluation.intervals import mean_interval
from profiling.finite import check_finite
from profiling.ledger import Ledger
from profiling.models.device import settled
from profiling.models.identity import identity_of
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.held_out import Seen, Units, unit_means, units, unseen_prompts
from profiling.prompts.prompt import Prompt, Task, digest, parse_task
from profiling.quality.answers import answers, is_right
from profiling.quality.forced_decode import Begun, begin, dense_losses, forced_losses
from profiling.quality.method import Method, of_policy
from profiling.speed.baselines import KERNEL, MODEL, dense, of_rounds
from runtime import LoadedArtifact
from runtime import load as load_headwise
from runtime.memory import CacheBytes, cache_bytes


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Seconds of each round and cache bytes, by method."""

    seconds: dict[str, list[float]]
    held: dict[str, CacheBytes]


@contextmanager
def comparison(
    config: Comparison, file: Path | None = None, *, fresh: bool = False
) -> Iterator[tuple[list[Row], dict[str, Any]]]:
    """Load the model and compare the methods; yield their rows, dense first, and the record.

    Args:
        config: the model, the methods and what to measure.
        file: where the record will be. Next to it is the resume file, with the quality of the
            methods that are done, until the block ends without an error; None for none.
        fresh: discard the resume file.

    Raises:
        HeadwiseError: the artifact has no decode section, or is for another model.
    """
    headwise = _artifact(config)
    config = settled(config)
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    if file is None:
        yield _compare(config, headwise, loaded, None)
        return
    model = identity_of(loaded.model, loaded.name)
    with Ledger(file, "decode", model, fresh=fresh) as ledger:
        yield _compare(config, headwise, loaded, ledger)
        ledger.remove()


def _compare(
    config: Comparison,
    headwise: LoadedArtifact | None,
    loaded: LoadedModel,
    ledger: Ledger | None,
) -> tuple[list[Row], dict[str, Any]]:
    """Rows and record of the methods; timed rounds are always measured again."""
    compared = methods(headwise, config.offload)
    compared += [of_policy(loaded, text, parse_cache(text)) for text in config.policies]
    timed = _timed(config, loaded, compared)
    seen = Seen.by([load_pair(config.artifact)[1]] if config.artifact else [])
    notes: dict[str, list[dict[str, Any]]] = {"seen_by_search": [], "fewer_prompts": []}
    prompts: list[Prompt] = []
    if config.trials:
        task = parse_task(config.task)
        prompts = _prompts(config, loaded, seen, task, config.task_length, config.trials, notes)
    texts: list[Prompt] = []
    if config.text:
        task = parse_task(f"text:{config.text}")
        texts = _prompts(config, loaded, seen, task, config.text_length, config.texts, notes)
    depends = _depends(config, prompts, texts)
    text_units = units(texts)
    rows: list[Row] = []
    losses: dict[str, Tensor] = {}
    for method in compared:
        if method.name == KERNEL:
            # Quality is the model's own attention's; only its times are of interest.
            if timed.seconds:
                rows.append(Row(method=method.name, **_timed_fields(config, method.name, timed)))
            continue
        measure = partial(_quality, config, loaded, method, prompts, texts)
        if ledger is None:
            quality = measure()
        else:
            unit = ledger.unit(f"{method.name} {method.identity}", depends)
            quality = ledger.once(unit, measure)
        if texts:
            losses[method.name] = torch.as_tensor(
                quality["losses"], dtype=torch.float32, device="cpu"
            )
        rows.append(_row(config, method.name, timed, prompts, quality, losses, text_units))
    artifact = None
    if headwise is not None:
        artifact = headwise.artifact.content_sha256
    return rows, {**_record(config, artifact, rows, timed), **notes}


def _artifact(config: Comparison) -> LoadedArtifact | None:
    """Load the artifact."""
    if config.artifact is None:
        return None
    artifact = load(config.artifact)
    if artifact.decode is None:
        raise HeadwiseError(f"{config.artifact} has no decode section: headwise filters writes one")
    if config.dense_prefill and (
        artifact.kv_cache is not None or artifact.decode.omnikv.selector != "last"
    ):
        raise HeadwiseError(
            "--dense-prefill fills a plain cache: an artifact with a kv_cache section, or a "
            "selector other than last, needs its own"
        )
    return load_headwise(config.artifact)


def _timed(config: Comparison, loaded: LoadedModel, compared: Sequence[Method]) -> Timed:
    """Time one sequence by each method."""
    if not config.repeats:
        return Timed(seconds={}, held={})
    caches = filled(loaded, compared, context=config.context, seed=config.seed)
    held = {name: cache_bytes(cache) for name, cache in caches.items()}
    seconds = step_seconds(
        loaded,
        compared,
        caches,
        context=config.context,
        steps=config.steps,
        repeats=config.repeats,
    )
    return Timed(seconds=seconds, held=held)


def _chooses(method: Method) -> bool:
    """Tell an artifact whose filter layers choose keys for other layers."""
    return method.headwise is not None and not method.evicts


def _depends(
    config: Comparison, prompts: Sequence[Prompt], texts: Sequence[Prompt]
) -> dict[str, Any]:
    """Collect all that a method's quality depends on besides the method and the model."""
    settings = ("dtype", "device", "forced", "dense_prefill", "prefill_chunk")
    return {
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
) -> dict[str, Any]:
    """Measure a method's answers, losses (T, F) of texts, and tokens read in a step."""
    new_cache = partial(method.cache, loaded.model)
    prefilled: Sequence[Begun] = ()
    if config.dense_prefill and _chooses(method):
        with dense(loaded.model, KERNEL):
            prefilled = list(begin(loaded.model, new_cache, texts, config.forced))
    losses = None
    tokens = None
    with method.apply(loaded.model) as applied:
        label = f"{method.name}: {config.task}"
        replies = answers(
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
            begun = prefilled or begin(loaded.model, new_cache, texts, config.forced)
            losses = forced_losses(loaded.model, begun, config.forced).cpu().numpy()
        if losses is not None:
            check_finite(losses, f"{config.text}: losses of {method.name} are", loaded.model)
        if _chooses(method):
            tokens = applied.stats().get("tokens")
    return {"answers": replies, "losses": losses, "tokens": tokens}


def _record(
    config: Comparison, artifact: str | None, rows: Sequence[Row], timed: Timed
) -> dict[str, Any]:
    """Make the JSON record: figures and settings.

    Args:
        config: options of the comparison.
        artifact: content hash.
        rows: of all methods.
        timed: seconds of all methods.
    """
    return {
        "rows": [asdict(row) for row in rows],
        "all_seconds": timed.seconds,
        "speedups": {name: of_rounds(timed.seconds, name).over for name in timed.seconds},
        "settings": {**config.settings(), "artifact": config.artifact and config.artifact.name},
        "artifact": artifact,
        "environment": environment(config.device),
    }


def _prompts(
    config: Comparison,
    loaded: LoadedModel,
    seen: Seen,
    task: Task,
    length: int,
    samples: int,
    notes: dict[str, list[dict[str, Any]]],
) -> list[Prompt]:
    """Make prompts that no search has seen; note where some were, or where there are too few."""
    held_out = unseen_prompts(
        task, loaded.tokenizer, length=length, samples=samples, seed=config.seed, seen=seen
    )
    prompts = len(held_out.prompts)
    about = {"task": task.name, "length": length}
    if held_out.overlapping:
        overlap = {"overlapping": held_out.overlapping, "samples": prompts}
        notes["seen_by_search"].append({**about, **overlap})
    if prompts < samples:
        notes["fewer_prompts"].append({**about, "prompts": prompts, "samples": samples})
    return held_out.prompts


def _timed_fields(config: Comparison, name: str, timed: Timed) -> dict[str, Any]:
    """Fields of a row that were timed; none without repeats."""
    fields: dict[str, Any] = {}
    if name in timed.seconds:
        fields["token_seconds"] = statistics.median(timed.seconds[name]) / config.steps
        fields["device_bytes"] = timed.held[name].device
        fields["bank_bytes"] = timed.held[name].bank
    return fields


def _row(
    config: Comparison,
    name: str,
    timed: Timed,
    prompts: Sequence[Prompt],
    quality: Mapping[str, Any],
    losses: Mapping[str, Tensor],
    text_units: Units,
) -> Row:
    """Make a method's row.

    Args:
        config: of the run.
        name: of the method.
        timed: times and memory of all methods.
        prompts: the questions that `quality` answers.
        quality: the method's answers and tokens.
        losses: (T, F) of the methods so far, dense first, then an artifact.
        text_units: units of the T texts.
    """
    fields = _timed_fields(config, name, timed)
    replies = quality["answers"]
    if prompts:
        scores = [float(right) for right in map(is_right, prompts, replies)]
        fields["right"] = int(sum(scores))
        fields["accuracy"] = mean_interval(unit_means(scores, units(prompts)))
    if name in losses:
        own = losses[name]
        first = next((each for each in losses if each != MODEL), name)
        fields["perplexity"] = math.exp(own.mean().item())
        fields["losses"] = in_blocks(own)
        if name != MODEL:
            fields["change"] = apart(own, losses[MODEL], text_units)
        if name not in (MODEL, first):
            fields["apart"] = apart(own, losses[first], text_units)
    return Row(method=name, answers=tuple(replies), tokens=quality["tokens"], **fields)
