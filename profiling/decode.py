"""Both dense attentions against an artifact's decode section: time a token, perplexity, pass keys, bytes held.

python -m profiling.decode cfg.yaml --model smollm2 --context 8192 --text novel.txt --trials 20

With --policy caches that drop tokens stand beside it, by their quality; profiling.cache_speed times them.
With --dense-prefill texts are prefilled once, densely, for all artifacts: what decode alone loses.
With --json FILE an interrupted comparison goes on after the last method whose quality it has.

Speed is measured on a cache of random keys and values, whatever context the model was trained for; quality on prompts.

Shapes: T texts, F forced tokens of each.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from artifacts import Artifact, HeadwiseError, arguments, load
from artifacts.command_line import ArgumentParser, run_command
from artifacts.page_layout import aligned
from profiling.caches.policies import CACHES, parse_cache
from profiling.environment import environment
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.prompt import Prompt, digest, make_prompts
from profiling.quality.answers import answers, is_right
from profiling.quality.forced_decode import (
    Begun,
    apart,
    begin,
    by_position,
    changed,
    dense_losses,
    forced_losses,
    in_blocks,
    position_lines,
)
from profiling.quality.intervals import Interval
from profiling.speed.baselines import COLUMNS, KERNEL, MODEL, cells, dense, of_rounds
from profiling.speed.decode_steps import Method, methods, of_cache, step_seconds
from runtime import load as load_headwise
from runtime.fingerprint import fingerprint
from runtime.memory import CacheBytes
from runtime.new_cache import OFFLOADS, make_cache


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What to compare; 0 leaves a measurement out."""

    model: str
    config: Path
    beside: tuple[Path, ...] = ()
    policies: tuple[str, ...] = ()
    context: int
    steps: int = 16
    repeats: int = 5
    text: str | None = None
    texts: int = 1
    text_length: int = 4096
    forced: int = 512
    task: str = "passkey"
    task_length: int = 4096
    trials: int = 20
    dense_prefill: bool = False
    prefill_chunk: int | None = None
    seed: int = 1000
    offload: tuple[str, ...] = ("auto",)
    dtype: str = "bfloat16"
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method's figures; None where they were not asked for. Bytes are those of the cache of the timed context.

    Of dense attention by our kernel only time and bytes are measured: it is there where they are asked for.
    change, apart: of the loss, in nats a token, against dense and against the first artifact on the same tokens, over
    texts. losses: of 64 tokens, by text.
    tokens: that a KV head of a sparse layer read in a step, on average over all that was decoded.
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


def run(config: Comparison, ledger: Ledger | None = None) -> tuple[list[Row], dict[str, Any]]:
    """Load the model and compare; rows of the methods, dense first, and what is needed to repeat them.

    ledger: keeps the quality of the methods that are done.

    Raises:
        HeadwiseError: the artifact has no decode section, or is for another model.
    """
    files = (config.config, *config.beside)
    found = {file: load(file) for file in files}
    for file, artifact in found.items():
        if artifact.decode is None:
            raise HeadwiseError(f"{file} has no decode section: python -m search.filters writes one")
    names = ["headwise", *(file.stem for file in config.beside)]
    if len(set(names)) < len(names):
        raise HeadwiseError(f"artifacts of one name cannot be told apart: {', '.join(names)}")
    hashes = {name: found[file].content_sha256 for name, file in zip(names, files, strict=True)}
    if config.dense_prefill:
        _check_shared(found.values())
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    if config.prefill_chunk is not None:
        # Each process loads a model of its own: nobody else generates with it.
        loaded.model.generation_config.prefill_chunk_size = config.prefill_chunk
    compared = methods(
        loaded, {name: load_headwise(file) for name, file in zip(names, files, strict=True)}, config.offload
    )
    compared += [of_cache(loaded, text, parse_cache(text)) for text in config.policies]
    timed = {"context": config.context, "steps": config.steps, "repeats": config.repeats, "seed": config.seed}
    seconds, held = step_seconds(loaded, compared, **timed) if config.repeats else ({}, {})
    prompts = _prompts(config, loaded, config.task, config.task_length, config.trials) if config.trials else []
    texts = _prompts(config, loaded, f"text:{config.text}", config.text_length, config.texts) if config.text else []
    shared = cache(partial(_shared, config, loaded, texts))
    depends = None if ledger is None else _depends(config, loaded, prompts, texts)
    rows: list[Row] = []
    known: dict[str, Tensor] = {}
    for method in compared:
        if method.name == KERNEL:
            if seconds:
                rows.append(_row(config, method.name, seconds, held, (), (), {}))
            continue
        find = partial(_quality, config, loaded, method, prompts, texts, shared)
        if ledger is None:
            quality = find()
        else:
            quality = ledger.once(ledger.unit(f"{method.name} {method.artifact}", depends), find)
        if texts:
            known[method.name] = torch.as_tensor(quality["losses"])
        rows.append(_row(config, method.name, seconds, held, prompts, quality["answers"], known, quality["tokens"]))
    parts = by_position(known, known[MODEL]) if texts else {}
    figures: dict[str, Any] = {"rows": [asdict(row) for row in rows], "all_seconds": seconds}
    figures["by_position"] = {name: [asdict(part) for part in each] for name, each in parts.items()}
    figures["speedups"] = {name: of_rounds(seconds, name).over for name in seconds}
    return rows, _record(config, hashes, figures)


def _depends(
    config: Comparison, loaded: LoadedModel, prompts: Sequence[Prompt], texts: Sequence[Prompt]
) -> dict[str, Any]:
    """What a method's quality depends on besides itself."""
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    names = ("dtype", "device", "forced", "dense_prefill", "prefill_chunk")
    made = {"prompts": digest(prompts), "texts": digest(texts)}
    return {"weights": model.weights_sha256, **made, **{name: getattr(config, name) for name in names}}


def _quality(
    config: Comparison,
    loaded: LoadedModel,
    method: Method,
    prompts: Sequence[Prompt],
    texts: Sequence[Prompt],
    shared: Callable[[], Sequence[Begun]],
) -> dict[str, Any]:
    """A method's answers, the losses (T, F) of its texts, and the tokens that it read in a step: None where none."""
    losses: Tensor | None = None
    # Before the method is applied: it is a prefill of another one.
    sharing = shared() if texts and config.dense_prefill and method.sparse else None
    with method.apply() as applied:
        given = answers(
            loaded.model, loaded.tokenizer, prompts, label=f"{method.name}: {config.task}", cache=method.cache
        )
        if texts and method.name == MODEL:
            losses = dense_losses(loaded.model, texts, config.forced)
        elif texts:
            begun = sharing or begin(loaded.model, method.cache, texts, config.forced)
            losses = forced_losses(loaded.model, begun, config.forced)
        tokens = applied.stats().get("tokens") if method.sparse else None
    return {"answers": given, "losses": None if losses is None else losses.cpu().numpy(), "tokens": tokens}


def _check_shared(artifacts: Iterable[Artifact]) -> None:
    """Raise HeadwiseError where an artifact cannot go on from a cache that another prefill has filled."""
    for artifact in artifacts:
        if artifact.kv_cache or (artifact.decode and artifact.decode.omnikv.selector != "last"):
            raise HeadwiseError(
                "--dense-prefill shares one cache: artifacts with a kv_cache section, or a selector other than last, "
                "need their own"
            )


def _shared(config: Comparison, loaded: LoadedModel, texts: Sequence[Prompt]) -> list[Begun]:
    """The texts after a dense prefill, in caches that serve every artifact which chooses by the last query alone."""
    with dense(loaded.model, KERNEL):
        return list(begin(loaded.model, lambda: make_cache(None, loaded.model, "never"), texts, config.forced))


def _record(config: Comparison, hashes: Mapping[str, str], figures: dict[str, Any]) -> dict[str, Any]:
    """What was found, and what is needed to repeat it. hashes: the artifacts' content, by their names."""
    return {
        **figures,
        "settings": {**asdict(config), "config": config.config.name, "beside": [file.name for file in config.beside]},
        "artifacts": hashes,
        "environment": environment(config.device),
    }


def _prompts(config: Comparison, loaded: LoadedModel, task: str, length: int, samples: int) -> list[Prompt]:
    return make_prompts(task, loaded.tokenizer, length=length, samples=samples, seed=config.seed)


def _row(
    config: Comparison,
    name: str,
    seconds: dict[str, list[float]],
    held: dict[str, CacheBytes],
    prompts: Sequence[Prompt],
    given: Sequence[str],
    known: Mapping[str, Tensor],
    tokens: float | None = None,
) -> Row:
    """known: losses (T, F) of the methods so far, dense first and then an artifact."""
    timed, losses = sorted(seconds.get(name, [])), known.get(name)
    first = None if losses is None else next((each for each in known if each != MODEL), name)
    return Row(
        method=name,
        token_seconds=timed[len(timed) // 2] / config.steps if timed else None,
        device_bytes=held[name].device if name in held else None,
        bank_bytes=held[name].bank if name in held else None,
        perplexity=None if losses is None else math.exp(losses.mean().item()),
        change=None if losses is None or name == MODEL else apart(losses, known[MODEL]),
        right=sum(is_right(p, text) for p, text in zip(prompts, given, strict=True)) if prompts else None,
        tokens=tokens,
        answers=tuple(given),
        losses=() if losses is None else in_blocks(losses),
        apart=None if losses is None or first is None or name in (MODEL, first) else apart(losses, known[first]),
    )


def table(rows: Sequence[Row], seconds: Mapping[str, Sequence[float]], trials: int) -> str:
    """The comparison as an aligned text table. seconds: of each method's rounds."""
    lines = [["", "ms/token", "tokens/s", *COLUMNS, "cache MiB", "bank MiB", "tokens read", "perplexity", "right"]]
    beside = [row.apart for row in rows if row.apart]
    lines[0] += ["perplexity to the artifact's"] if beside else []
    for row in rows:
        t, loss = row.token_seconds, row.perplexity
        change = f" {changed(row.change)}" if row.change else ""
        lines.append(
            [
                row.method,
                f"{1e3 * t:.2f}" if t else "-",
                f"{1 / t:.1f}" if t else "-",
                *cells(of_rounds(seconds, row.method) if seconds else None),
                *(f"{n / 2**20:.1f}" if n is not None else "-" for n in (row.device_bytes, row.bank_bytes)),
                f"{row.tokens:.0f}" if row.tokens else "-",
                f"{loss:.3f}{change}" if loss else "-",
                f"{row.right}/{trials}" if row.right is not None else "-",
                *([changed(row.apart) if row.apart else "-"] if beside else []),
            ]
        )
    return "\n".join(aligned(lines))


def parser() -> ArgumentParser:
    """The command line of python -m profiling.decode."""
    p = ArgumentParser(prog="python -m profiling.decode", description=__doc__)
    arguments.add_model(p)
    arguments.add_artifact(p, "artifact with a decode section", old="--config")
    arguments.add_beside(p)
    p.add_argument(
        "--policy",
        dest="policies",
        action="append",
        default=[],
        help="KIND or KIND:FIELD=VALUE,..., repeatable: caches to compare, with --repeats 0; kinds: " + CACHES,
    )
    p.add_argument("--context", type=int, default=8192, help="tokens in the cache when decode is timed")
    p.add_argument("--steps", type=int, default=Comparison.steps, help="tokens of a timed round")
    p.add_argument("--repeats", type=int, default=Comparison.repeats, help="timed rounds, in turn (0: none)")
    p.add_argument("--text", help="long text for perplexity; without it there is none")
    p.add_argument("--texts", type=int, default=Comparison.texts, help="windows of it (default 1)")
    p.add_argument("--text-length", type=int, default=Comparison.text_length, help="tokens of the text's window")
    p.add_argument("--forced", type=int, default=Comparison.forced, help="of these, decoded one by one at the end")
    arguments.add_task(p, "what is answered (default passkey)", several=False, default=Comparison.task)
    p.add_argument("--task-length", type=int, default=Comparison.task_length, help="tokens of its prompts")
    p.add_argument("--trials", type=int, default=Comparison.trials, help="seeded prompts of the task (0: none)")
    p.add_argument(
        "--dense-prefill", action="store_true", help="prefill the texts once, densely, for all artifacts (not policies)"
    )
    p.add_argument("--prefill-chunk", type=int, help="prefill them so many tokens at a time (default: at once)")
    p.add_argument("--offload", nargs="+", choices=OFFLOADS, default=["auto"], help="caches to compare (default auto)")
    arguments.add_seed(p, Comparison.seed)
    arguments.add_dtype(p)
    arguments.add_device(p)
    arguments.add_json(p)
    p.add_argument("--fresh", action="store_true", help="discard what an interrupted run left")
    return p


def config_from(options: argparse.Namespace) -> Comparison:
    """The comparison of a command line.

    Raises:
        HeadwiseError: a size that leaves nothing to measure.
    """
    values = {name: value for name, value in vars(options).items() if name not in ("json", "fresh")}
    for name in ("context", "steps", "forced", "texts", "text_length", "task_length"):
        if values[name] < 1:
            raise HeadwiseError(f"--{name.replace('_', '-')} must be at least 1, got {values[name]}")
    if values["prefill_chunk"] is not None and values["prefill_chunk"] < 1:
        raise HeadwiseError(f"--prefill-chunk must be at least 1, got {values['prefill_chunk']}")
    if values["dense_prefill"] and options.offload != ["auto"]:
        raise HeadwiseError("--dense-prefill shares one cache: leave --offload away")
    if values["policies"] and values["repeats"]:
        raise HeadwiseError("--policy compares quality: give --repeats 0 with it; profiling.cache_speed times caches")
    for text in values["policies"]:
        parse_cache(text)
    for name in ("repeats", "trials"):
        if values[name] < 0:
            raise HeadwiseError(f"--{name} must be at least 0, got {values[name]}")
    if values["forced"] >= values["text_length"]:
        raise HeadwiseError(
            f"--forced must be below --text-length ({values['text_length']}), got {values['forced']}: "
            "the tokens before are prefilled"
        )
    tuples = {name: tuple(values[name]) for name in ("offload", "beside", "policies")}
    return Comparison(**values | tuples)


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = parser().parse_args(argv)
    config = config_from(options)
    # With the file that is written a ledger lies beside it; timed rounds are never taken from one.
    kept = isinstance(options.json, Path) and options.json != arguments.STDOUT
    with Ledger(options.json, "decode", fresh=options.fresh) if kept else nullcontext() as ledger:
        rows, record = run(config, ledger)
        record = {"command": arguments.as_typed("profiling.decode", argv), **record}
        said = table(rows, record["all_seconds"], config.trials)
        arguments.deliver("\n".join([said, *position_lines(record.get("by_position", {}))]), record, options.json)
        if ledger is not None:
            ledger.remove()
    return 0


if __name__ == "__main__":
    run_command(main)
