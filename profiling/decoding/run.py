"""Runs headwise decode: times, losses and answers of each method, as rows and a table.

Shapes: T texts, F forced tokens of each.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from artifacts import Artifact, HeadwiseError, load
from artifacts.page.layout import aligned
from profiling.caches.parsing import parse_cache
from profiling.decoding.config import Comparison
from profiling.decoding.losses import apart, by_position, changed, in_blocks
from profiling.decoding.steps import filled, methods, step_seconds
from profiling.environment import environment
from profiling.evaluation.intervals import Interval, wilson
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.prompt import Prompt, digest, make_prompts
from profiling.quality.answers import answers, is_right
from profiling.quality.forced_decode import Begun, begin, dense_losses, forced_losses
from profiling.quality.method import Method, of_policy
from profiling.speed.baselines import COLUMNS, KERNEL, MODEL, cells, dense, of_rounds
from runtime import load as load_headwise
from runtime.caches.make import make_cache
from runtime.fingerprint import fingerprint
from runtime.memory import CacheBytes, cache_bytes


@dataclass(frozen=True, kw_only=True)
class Row:
    """Figures of one method; None where they were not asked for.

    Bytes are those of the cache of the timed context.

    Of dense attention by our kernel only time and bytes are measured: it is there where they are
    asked for. change, apart: of the loss, in nats a token, against dense and against the first
    artifact on the same tokens, over texts. losses: of 64 tokens, by text. tokens: that a KV head
    of a sparse layer read in a step, on average over all that was decoded. batch: the most
    sequences whose caches fit into the memory asked for. batch_rate: tokens a second of all of
    them.
    """

    method: str
    token_seconds: float | None
    device_bytes: int | None
    bank_bytes: int | None
    perplexity: float | None
    change: Interval | None
    right: int | None
    tokens: float | None
    answers: tuple[str, ...]
    losses: tuple[tuple[float, ...], ...] = ()
    apart: Interval | None = None
    batch: int | None = None
    batch_rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Seconds of each round, cache bytes, largest batch and its seconds, by method."""

    seconds: dict[str, list[float]]
    held: dict[str, CacheBytes]
    batches: dict[str, int]
    batch_seconds: dict[str, list[float]]


def run(config: Comparison, ledger: Ledger | None = None) -> tuple[list[Row], dict[str, Any]]:
    """Load the model and compare the methods; return their rows, dense first, and the record.

    ledger: keeps the quality of the methods that are done.

    Raises:
        HeadwiseError: the artifact has no decode section, or is for another model.
    """
    files = () if config.config is None else (config.config, *config.beside)
    found = {file: load(file) for file in files}
    for file, artifact in found.items():
        if artifact.decode is None:
            raise HeadwiseError(f"{file} has no decode section: headwise filters writes one")
    names = ["headwise", *(file.stem for file in config.beside)][: len(files)]
    if len(set(names)) < len(names):
        raise HeadwiseError(f"artifacts of one name cannot be told apart: {', '.join(names)}")
    hashes = {name: found[file].content_sha256 for name, file in zip(names, files, strict=True)}
    if config.dense_prefill:
        _check_shared(found.values())
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    compared = methods(
        {name: load_headwise(file) for name, file in zip(names, files, strict=True)}, config.offload
    )
    compared += [of_policy(loaded, text, parse_cache(text)) for text in config.policies]
    timed = _timed(config, loaded, compared)
    prompts = (
        _prompts(config, loaded, config.task, config.task_length, config.trials)
        if config.trials
        else []
    )
    texts = (
        _prompts(config, loaded, f"text:{config.text}", config.text_length, config.texts)
        if config.text
        else []
    )
    begun = cache(partial(_shared, config, loaded, texts))
    depends = None if ledger is None else _depends(config, loaded, prompts, texts)
    rows: list[Row] = []
    known: dict[str, Tensor] = {}
    for method in compared:
        if method.name == KERNEL:
            if timed.seconds:
                rows.append(_row(config, method.name, timed, (), (), {}))
            continue
        find = partial(_quality, config, loaded, method, prompts, texts, begun)
        if ledger is None:
            quality = find()
        else:
            quality = ledger.once(ledger.unit(f"{method.name} {method.identity}", depends), find)
        if texts:
            known[method.name] = torch.as_tensor(quality["losses"])
        rows.append(
            _row(config, method.name, timed, prompts, quality["answers"], known, quality["tokens"])
        )
    parts = by_position(known, known[MODEL]) if texts else {}
    figures: dict[str, Any] = {"rows": [asdict(row) for row in rows], "all_seconds": timed.seconds}
    figures["by_position"] = {name: [asdict(part) for part in each] for name, each in parts.items()}
    figures["batch_seconds"] = timed.batch_seconds
    figures["speedups"] = {name: of_rounds(timed.seconds, name).over for name in timed.seconds}
    return rows, _record(config, hashes, figures)


def _timed(config: Comparison, loaded: LoadedModel, compared: Sequence[Method]) -> Timed:
    """Time one sequence by each method, and with --memory the largest batch."""
    if not config.repeats:
        return Timed(seconds={}, held={}, batches={}, batch_seconds={})
    how: dict[str, Any] = {
        "context": config.context,
        "steps": config.steps,
        "repeats": config.repeats,
    }
    caches = filled(loaded, compared, context=config.context, seed=config.seed)
    held = {name: cache_bytes(cache) for name, cache in caches.items()}
    seconds = step_seconds(loaded, compared, caches, **how)
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
    batch_seconds = step_seconds(loaded, fitting, caches, **how, batches=batches)
    return Timed(seconds=seconds, held=held, batches=batches, batch_seconds=batch_seconds)


def _chooses(method: Method) -> bool:
    """Tell an artifact whose filter layers choose keys for other layers."""
    return method.headwise is not None and not method.evicts


def _depends(
    config: Comparison, loaded: LoadedModel, prompts: Sequence[Prompt], texts: Sequence[Prompt]
) -> dict[str, Any]:
    """Collect all that a method's quality depends on besides the method."""
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    names = ("dtype", "device", "forced", "dense_prefill", "prefill_chunk")
    made = {"prompts": digest(prompts), "texts": digest(texts)}
    return {
        "weights": model.weights_sha256,
        **made,
        **{name: getattr(config, name) for name in names},
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
    losses: Tensor | None = None
    # Before the method is applied: it is a prefill of another one.
    sharing = shared() if texts and config.dense_prefill and _chooses(method) else None
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
            losses = dense_losses(loaded.model, texts, config.forced)
        elif texts:
            begun = sharing or begin(loaded.model, new_cache, texts, config.forced)
            losses = forced_losses(loaded.model, begun, config.forced)
        tokens = applied.stats().get("tokens") if _chooses(method) else None
    return {
        "answers": given,
        "losses": None if losses is None else losses.cpu().numpy(),
        "tokens": tokens,
    }


def _check_shared(artifacts: Iterable[Artifact]) -> None:
    """Raise HeadwiseError where an artifact cannot go on from a cache of another prefill."""
    for artifact in artifacts:
        if artifact.kv_cache or (artifact.decode and artifact.decode.omnikv.selector != "last"):
            raise HeadwiseError(
                "--dense-prefill shares one cache: artifacts with a kv_cache section, or a "
                "selector other than last, "
                "need their own"
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
    config: Comparison, hashes: Mapping[str, str], figures: dict[str, Any]
) -> dict[str, Any]:
    """Make the JSON record: figures and settings. hashes: content hashes by artifact."""
    file = config.config
    return {
        **figures,
        "settings": {
            **asdict(config),
            "config": file and file.name,
            "beside": [each.name for each in config.beside],
        },
        "artifacts": hashes,
        "environment": environment(config.device),
    }


def _prompts(
    config: Comparison, loaded: LoadedModel, task: str, length: int, samples: int
) -> list[Prompt]:
    return make_prompts(task, loaded.tokenizer, length=length, samples=samples, seed=config.seed)


def _row(
    config: Comparison,
    name: str,
    timed: Timed,
    prompts: Sequence[Prompt],
    given: Sequence[str],
    known: Mapping[str, Tensor],
    tokens: float | None = None,
) -> Row:
    """known: losses (T, F) of the methods so far, dense first and then an artifact."""
    losses = known.get(name)
    first = None if losses is None else next((each for each in known if each != MODEL), name)
    return Row(
        method=name,
        token_seconds=statistics.median(timed.seconds[name]) / config.steps
        if name in timed.seconds
        else None,
        device_bytes=timed.held[name].device if name in timed.held else None,
        bank_bytes=timed.held[name].bank if name in timed.held else None,
        perplexity=None if losses is None else math.exp(losses.mean().item()),
        change=None if losses is None or name == MODEL else apart(losses, known[MODEL]),
        right=sum(is_right(p, text) for p, text in zip(prompts, given, strict=True))
        if prompts
        else None,
        tokens=tokens,
        answers=tuple(given),
        losses=() if losses is None else in_blocks(losses),
        batch=timed.batches.get(name),
        batch_rate=(
            timed.batches[name] * config.steps / statistics.median(timed.batch_seconds[name])
            if name in timed.batch_seconds
            else None
        ),
        apart=None
        if losses is None or first is None or name in (MODEL, first)
        else apart(losses, known[first]),
    )


def table(rows: Sequence[Row], seconds: Mapping[str, Sequence[float]], trials: int) -> str:
    """The comparison as an aligned text table. seconds: of each method's rounds."""
    rates = {row.method: [1 / row.batch_rate] for row in rows if row.batch_rate}
    lines = [
        [
            "",
            "ms/token",
            "tokens/s",
            *COLUMNS,
            "cache MiB",
            "bank MiB",
            "tokens read",
            "perplexity",
            f"accuracy of {trials}" if trials else "accuracy",
        ]
    ]
    beside = [row.apart for row in rows if row.apart]
    lines[0] += ["perplexity to the first's"] if beside else []
    lines[0] += ["batch", "tokens/s", *COLUMNS] if rates else []
    for row in rows:
        t = row.token_seconds
        loss = row.perplexity
        change = f" {changed(row.change)}" if row.change else ""
        lines.append(
            [
                row.method,
                f"{1e3 * t:.2f}" if t else "-",
                f"{1 / t:.1f}" if t else "-",
                *cells(of_rounds(seconds, row.method) if seconds else None),
                *(
                    f"{n / 2**20:.1f}" if n is not None else "-"
                    for n in (row.device_bytes, row.bank_bytes)
                ),
                f"{row.tokens:.0f}" if row.tokens else "-",
                f"{loss:.3f}{change}" if loss else "-",
                "-" if row.right is None else _accuracy(row.right, trials),
                *([changed(row.apart) if row.apart else "-"] if beside else []),
                *(_batch_cells(row, rates) if rates else []),
            ]
        )
    return "\n".join(aligned(lines))


def _accuracy(right: int, questions: int) -> str:
    """Accuracy with Wilson's 95% interval."""
    interval = wilson(right, questions)
    return f"{interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f})"


def _batch_cells(row: Row, rates: Mapping[str, Sequence[float]]) -> list[str]:
    """Cells of the largest batch: size, tokens a second, speed-up over dense batches."""
    if row.batch_rate is None:
        return ["-"] * (2 + len(COLUMNS))
    return [str(row.batch), f"{row.batch_rate:.1f}", *cells(of_rounds(rates, row.method))]
