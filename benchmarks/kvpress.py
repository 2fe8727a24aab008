"""Caches under Headwise's policies and kvpress's presses, on the same prompts and model.

    python benchmarks/kvpress.py --model smollm2 --task line_turns@questions=8 --length 1024
    --samples 6

kvpress runs in a separate environment, with the transformers that it needs (.ci/kvpress;
--python), by its own pipeline: it prefills a context under a press, feeds each question after it,
and answers greedily. So do Headwise's caches. The last token of a prompt that is no later turn is
fed after the rest. Both keep the same fraction of the context."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from result import Result, commit, labeled, machine_of, write

from artifacts import HeadwiseError
from artifacts.cli.command import run_command
from artifacts.errors import shorten
from profiling.caches.parsing import RANDOM, CacheKind
from profiling.environment import environment, versions
from profiling.evaluation.cache_table import CACHES
from profiling.evaluation.intervals import holm, mean_interval, paired_difference, sign_flip
from profiling.models.loading import LoadedModel, load_model, local_folder
from profiling.models.packages import PACKAGES
from profiling.progress import bar
from profiling.prompts.metrics import score
from profiling.prompts.prompt import Prompt, make_prompts, parse_task, per_context
from profiling.quality.answers import new_tokens
from profiling.quality.contexts import by_context
from profiling.quality.method import Method, of_policy
from profiling.quality.trials import trials
from profiling.speed.baselines import KERNEL
from runtime.fingerprint import fingerprint
from runtime.memory import memory_report

WORKER = Path(__file__).parent / "kvpress_worker.py"
# Of kvpress: no press, and those that are compared, by its class.
_NONE = "kvpress: none"
_PRESSES = (
    "SnapKVPress",
    "ExpectedAttentionPress",
    "KVzipPress",
    "StreamingLLMPress",
    "RandomPress",
)


def parser() -> argparse.ArgumentParser:
    """The script's command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", required=True)
    p.add_argument(
        "--task", dest="tasks", action="append", required=True, help="what is asked; repeatable"
    )
    p.add_argument("--length", type=int, default=1024, help="tokens of a prompt (default 1024)")
    p.add_argument(
        "--share", type=float, default=0.25, help="of a context that is kept (default 0.25)"
    )
    p.add_argument("--samples", type=int, default=12, help="contexts of each task (default 12)")
    p.add_argument("--seed", type=int, default=4000)
    p.add_argument("--dtype", default="bfloat16")
    python = Path(".venv-kvpress/bin/python")
    p.add_argument(
        "--python", type=Path, default=python, help=f"of kvpress's environment (default {python})"
    )
    p.add_argument(
        "--presses", nargs="+", default=_PRESSES, help=f"kvpress's (default: {' '.join(_PRESSES)})"
    )
    p.add_argument("--out", type=Path, metavar="FILE", help="also write the figures as JSON")
    return p


@dataclass(frozen=True)
class _Context:
    """Prompts that share a context."""

    task: str
    prompts: tuple[Prompt, ...]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, and return the figures with the settings that they depend on.

    Raises:
        HeadwiseError: a mistake of the user, and an error of kvpress.
    """
    if not options.python.exists():
        raise HeadwiseError(
            f"--python {shorten(str(options.python))} is not there: "
            "bash .ci/kvpress, or name another"
        )
    loaded = load_model(options.model, dtype=options.dtype)
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    token = 2 * model.num_kv_heads * model.head_dim * loaded.model.dtype.itemsize
    contexts = [each for task in options.tasks for each in _contexts(options, loaded, task)]
    results = {
        method.name: _of_ours(loaded, method, contexts, token)
        for method in _methods(options, loaded)
    }
    results |= _of_kvpress(options, loaded, contexts)
    return {
        "command": sys.argv,
        "model": loaded.name,
        "weights": model.weights_sha256,
        "environment": {**environment(), **_versions(options.python)},
        "rows": _rows(contexts, results),
    }


def _contexts(options: argparse.Namespace, loaded: LoadedModel, name: str) -> Iterator[_Context]:
    task = parse_task(name)
    samples = options.samples * per_context(task)
    prompts = make_prompts(
        task, loaded.tokenizer, length=options.length, samples=samples, seed=options.seed
    )
    if any(prompt.scored or prompt.answer is None for prompt in prompts):
        raise HeadwiseError(
            f"--task {task} asks nothing after its prompts: take one with an answer at the end"
        )
    prompts = [replace(prompt, turn=max(1, prompt.turn)) for prompt in prompts]
    for numbers in by_context(prompts):
        yield _Context(task.name, tuple(prompts[number] for number in numbers))


def _methods(options: argparse.Namespace, loaded: LoadedModel) -> Iterator[Method]:
    yield of_policy(loaded, KERNEL, None)
    for name, spec in CACHES.items():
        if spec.policy is None:
            continue
        policy = spec.policy(options.share, options.length)
        yield of_policy(loaded, name, CacheKind(policy=policy, random=name == RANDOM))


def _of_ours(
    loaded: LoadedModel, method: Method, contexts: Sequence[_Context], token: int
) -> list[dict[str, Any]]:
    results = []
    with method.apply(loaded.model):
        for each in bar(contexts, desc=method.name):
            run = trials(loaded.model, loaded.tokenizer, each.prompts, method)
            records = {trial.number: trial.record for trial in run}
            answers = [records[number]["text"] for number in range(len(each.prompts))]
            results.append({"answers": answers, "bytes": _bytes(loaded, method, each, token)})
    return results


@torch.no_grad()
def _bytes(loaded: LoadedModel, method: Method, context: _Context, token: int) -> float:
    """Bytes of the kept tokens of a context, `token` each, without headroom and scores."""
    cache = method.cache(loaded.model)
    loaded.model(
        torch.tensor([context.prompts[0].context], dtype=torch.long, device="cpu"),
        past_key_values=cache,
        logits_to_keep=1,
    )
    return sum(layer.mean_cached for layer in memory_report(cache).layers) * token


def _of_kvpress(
    options: argparse.Namespace, loaded: LoadedModel, contexts: Sequence[_Context]
) -> dict[str, list[dict[str, Any]]]:
    """The same of every press, run by one process."""
    presses: dict[str, Any] = {_NONE: None}
    presses |= {
        f"kvpress: {name}": (name, {"compression_ratio": 1 - options.share})
        for name in options.presses
    }
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in presses}
    # Press by press, context by context.
    for line in _worker(options, loaded, presses, contexts):
        answers = [answer.strip() for answer in line["answers"]]
        results[line["press"]].append({"answers": answers, "bytes": line["bytes"]})
    return results


def _worker(
    options: argparse.Namespace,
    loaded: LoadedModel,
    presses: Mapping[str, Any],
    contexts: Sequence[_Context],
) -> Iterator[dict[str, Any]]:
    if options.model in PACKAGES:
        folder = local_folder(options.model, dtype=options.dtype)
    else:
        folder = options.model
    job = {
        "model": str(Path(folder).resolve()),
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "presses": presses,
        "contexts": [
            {
                "ids": each.prompts[0].context,
                "turns": [prompt.input_ids[len(prompt.context) :] for prompt in each.prompts],
                "new_tokens": max(new_tokens(loaded.tokenizer, prompt) for prompt in each.prompts),
            }
            for each in contexts
        ],
    }
    # -P: this folder has a kvpress.py, too.
    command = [str(options.python), "-P", str(WORKER)]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(job).encode())
        process.stdin.close()
        for line in process.stdout:
            yield json.loads(line)
        process.wait()
        log.seek(0)
        last = log.read().decode(errors="replace").strip().rpartition("\n")[2]
    if process.returncode:
        raise HeadwiseError(
            f"kvpress in {shorten(str(options.python))} failed: "
            f"{shorten(last or 'it printed nothing')}"
        )


def _versions(python: Path) -> dict[str, str]:
    code = "from importlib.metadata import version as v; print(v('kvpress'), v('transformers'))"
    versions = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    return {"kvpress": versions[0], "transformers of kvpress": versions[1]}


def _rows(
    contexts: Sequence[_Context], results: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """A row for each task and method; differences are to the same library's dense attention."""
    rows: list[dict[str, Any]] = []
    for task in dict.fromkeys(each.task for each in contexts):
        here = [at for at, each in enumerate(contexts) if each.task == task]
        scores = {
            name: [_score(contexts[at], some[at]["answers"]) for at in here]
            for name, some in results.items()
        }
        for name, own in scores.items():
            dense = _NONE if name.startswith("kvpress") else KERNEL
            full = statistics.mean(results[dense][at]["bytes"] for at in here)
            held = statistics.mean(results[name][at]["bytes"] for at in here)
            interval = mean_interval(own)
            row: dict[str, Any] = {"task": task, "method": name, "contexts": len(own)}
            row |= {
                "answers": sum(len(contexts[at].prompts) for at in here),
                "bytes": held,
                "of_full": held / full,
            }
            row |= {"score": interval.value, "low": interval.low, "high": interval.high}
            if name != dense:
                gap = paired_difference(own, scores[dense])
                row |= {
                    "difference": gap.value,
                    "difference_low": gap.low,
                    "difference_high": gap.high,
                }
                row["p"] = sign_flip([a - b for a, b in zip(own, scores[dense], strict=True)])
            rows.append(row)
    compared = [row for row in rows if "p" in row]
    for row, corrected in zip(compared, holm([row["p"] for row in compared]), strict=True):
        row["corrected"] = corrected
    return rows


def _score(context: _Context, answers: Sequence[str]) -> float:
    return statistics.mean(
        score(prompt, text) for prompt, text in zip(context.prompts, answers, strict=True)
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text; - where a method is worse than dense attention beyond chance."""
    lines = [
        f"{'':<28}{'method':<34}{'score':>6}  {'less dense (95%)':>26}  {'cache':>10}  of full"
    ]
    for row in rows:
        gap = ""
        if "difference" in row:
            mark = "-" if row["corrected"] < 0.05 and row["difference"] < 0 else " "
            gap = (
                f"{row['difference']:+.3f} ({row['difference_low']:+.3f} to "
                f"{row['difference_high']:+.3f}){mark}"
            )
        lines.append(
            f"{row['task']:<28}{row['method']:<34}{row['score']:>6.3f}  {gap:>26}  "
            f"{row['bytes'] / 2**20:>6.2f} MiB  "
            f"{row['of_full']:.2f}"
        )
    return "\n".join(lines)


def _result(options: argparse.Namespace, record: Mapping[str, Any]) -> Result:
    words = [Path(word).name if "/" in word else word for word in record["command"][1:]]
    settings = {
        "model": record["model"],
        "weights": record["weights"],
        "tasks": options.tasks,
        "length": options.length,
        "samples": options.samples,
        "share": options.share,
        "seed": options.seed,
        "dtype": options.dtype,
    }
    return Result(
        what=f"Correct answers of {record['model']} by Headwise's caches and by kvpress",
        command=" ".join(["python benchmarks/kvpress.py", *words]),
        commit=commit(),
        machine=machine_of(record["environment"]),
        versions=versions() | _versions(options.python),
        rows=labeled("settings", [settings]) + labeled("row", record["rows"]),
    )


def main() -> int:
    """Print the table; with --out write the figures."""
    options = parser().parse_args()
    if not 0 < options.share < 1:
        raise HeadwiseError(f"--share must be between 0 and 1, got {options.share}")
    if options.samples < 2:
        raise HeadwiseError(f"--samples must be at least 2, got {options.samples}")
    record = run(options)
    print(table(record["rows"]))
    if options.out is not None:
        write(options.out, _result(options, record))
    return 0


if __name__ == "__main__":
    run_command(lambda _: main())
