"""Both dense attentions against an artifact on one model: prefill time, density, recall, perplexity and passkeys.

python -m profiling.compare cfg.yaml --model smollm2 --length 8192 --text novel.txt --passkeys 20
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from artifacts import HeadwiseError, arguments, load, load_pair
from artifacts.command_line import ArgumentParser, run_command
from artifacts.page_layout import aligned
from profiling.environment import environment
from profiling.inside.head_fidelity import fidelity
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.prompt import Prompt, make_prompts
from profiling.quality.answers import answers, is_right, perplexity
from profiling.speed.baselines import COLUMNS, HEADWISE, KERNEL, MODEL, Speedup, cells, dense, of_rounds
from profiling.speed.latency import interleaved, medians, prefill
from runtime import load as load_headwise


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What to compare; 0 leaves a measurement out."""

    model: str
    config: Path
    length: int
    passkey_length: int | None = None
    passkeys: int = 20
    text: str | None = None
    texts: int = 1
    repeats: int = 5
    seed: int = 1000
    dtype: str = "bfloat16"
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method's figures; None where they were not asked for. Of dense attention by our kernel only time is told."""

    method: str
    prefill_seconds: float | None
    density: float
    recall: float
    perplexity: float | None
    passkeys_right: int | None
    answers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Result:
    """Dense attention as the model comes, by Headwise's kernel where times are measured, and the artifact."""

    rows: tuple[Row, ...]
    expected: tuple[str, ...]
    all_seconds: dict[str, list[float]]
    settings: dict[str, Any]
    environment: dict[str, str]

    def speedup(self, method: str) -> Speedup | None:
        """How many times as fast a method is as each dense attention; None where times were not asked for."""
        return of_rounds(self.all_seconds, method) if self.all_seconds else None


def run(config: Comparison) -> Result:
    """Load the model and compare."""
    load(config.config)
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    return compare(config, loaded)


def compare(config: Comparison, loaded: LoadedModel) -> Result:
    """Compare on a model that is loaded; the model is left as it was."""
    artifact, arrays = load_pair(config.config)
    if config.length < artifact.prefill.dense_below:
        raise HeadwiseError(
            f"--length {config.length} is below the artifact's dense_below of {artifact.prefill.dense_below}: "
            "both sides would be dense; ask for a longer prompt"
        )
    model, headwise = loaded.model, load_headwise(config.config)

    def make(task: str, length: int, samples: int) -> list[Prompt]:
        return make_prompts(task, loaded.tokenizer, length=length, samples=samples, seed=config.seed)

    timed = make(f"text:{config.text}" if config.text else "passkey", config.length, 1)[0]
    kept = fidelity(model, artifact, timed, arrays)
    ids = torch.tensor([timed.input_ids], device=model.device)

    seconds: dict[str, list[float]] = {}
    if config.repeats:
        contexts: dict[str, Callable[[], AbstractContextManager[object]]] = {
            MODEL: lambda: dense(model, MODEL),
            KERNEL: lambda: dense(model, KERNEL),
            HEADWISE: lambda: headwise.apply(model),
        }
        seconds = interleaved(contexts, lambda: prefill(model, ids), repeats=config.repeats, device=config.device)
    task = f"passkey:{config.text}" if config.text else "passkey"
    keys = make(task, config.passkey_length or config.length, config.passkeys) if config.passkeys else []
    texts = make(f"text:{config.text}", config.length, config.texts) if config.text else []

    times = medians(seconds)

    def row(method: str, density: float, recall: float) -> Row:
        given = answers(model, loaded.tokenizer, keys, label=f"{method}: passkeys")
        return Row(
            method=method,
            prefill_seconds=times.get(method),
            density=density,
            recall=recall,
            perplexity=perplexity(model, texts) if texts else None,
            passkeys_right=sum(is_right(key, text) for key, text in zip(keys, given, strict=True)) if keys else None,
            answers=tuple(given),
        )

    rows = [row(MODEL, 1.0, 1.0)]
    if seconds:
        own = replace(rows[0], method=KERNEL, prefill_seconds=times[KERNEL])
        rows.append(replace(own, perplexity=None, passkeys_right=None, answers=()))
    with headwise.apply(model):
        rows.append(row(HEADWISE, float(np.nanmean(kept.density)), float(np.nanmean(kept.recall))))
    return Result(
        rows=tuple(rows),
        expected=tuple(key.answer or "" for key in keys),
        all_seconds=seconds,
        settings={**asdict(config), "config": config.config.name, "content_sha256": artifact.content_sha256},
        environment=environment(config.device),
    )


def table(result: Result) -> str:
    """The comparison as an aligned text table."""
    dense, sparse = result.rows[0], result.rows[-1]
    total = len(result.expected)
    lines = [["", "prefill s", *COLUMNS, "density", "recall", "perplexity", "passkeys"]]
    for row in result.rows:
        lines.append(
            [
                row.method,
                "-" if row.prefill_seconds is None else f"{row.prefill_seconds:.3f}",
                *cells(result.speedup(row.method)),
                f"{row.density:.3f}",
                f"{row.recall:.3f}",
                "-" if row.perplexity is None else f"{row.perplexity:.3f}",
                "-" if row.passkeys_right is None else f"{row.passkeys_right}/{total}",
            ]
        )
    if dense.perplexity and sparse.perplexity:
        lines[-1][-2] += f" ({100 * (sparse.perplexity / dense.perplexity - 1):+.1f}%)"
    return "\n".join(aligned(lines))


def parser() -> ArgumentParser:
    """The command line of python -m profiling.compare."""
    p = ArgumentParser(prog="python -m profiling.compare", description=__doc__)
    arguments.add_model(p)
    arguments.add_artifact(p, old="--config")
    arguments.add_length(p, "tokens of the timed prompt and of the long text", required=True)
    p.add_argument("--text", help="long text for perplexity and as the haystack; without it there is no perplexity")
    p.add_argument("--texts", type=int, default=1, help="windows of the text that perplexity is taken over")
    p.add_argument("--passkeys", type=int, default=20, help="seeded passkey trials (0: none)")
    p.add_argument("--passkey-length", type=int, help="tokens of a passkey prompt (default: --length)")
    p.add_argument("--repeats", type=int, default=5, help="timed rounds, all in turn (0: none)")
    arguments.add_seed(p, Comparison.seed)
    arguments.add_dtype(p)
    arguments.add_device(p)
    arguments.add_json(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    to_json = options.pop("json")
    result = run(Comparison(**options))
    speedups = {row.method: found.over for row in result.rows if (found := result.speedup(row.method))}
    record = {"command": arguments.as_typed("profiling.compare", argv), **asdict(result), "speedups": speedups}
    arguments.deliver(table(result), record, to_json)
    return 0


if __name__ == "__main__":
    run_command(main)
