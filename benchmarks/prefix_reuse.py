"""Seconds to the first token of new text behind a cached prefix, as agents and chats reuse one.

    python benchmarks/prefix_reuse.py cfg.yaml --model MODEL --out FILE.json

The cached tokens are prefilled once, by Headwise's dense kernel. Then the new tokens are a chunk
behind them: by the model's own dense attention, by Headwise's dense kernel and by the artifact, in
turn. The text is prose that no search saw. vllm_ttft.py has `--cached` for vLLM.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from result import Result, commit, labeled, machine_of, write

from artifacts import load_pair
from artifacts.cli.command import run_command
from artifacts.files import check_writable
from profiling.environment import environment, versions
from profiling.models.loading import LoadedModel, load_model
from profiling.progress import phase
from profiling.prompts.held_out import GATE_SET, Seen
from profiling.prompts.prompt import Task
from profiling.speed.baselines import HEADWISE, KERNEL, LABELS, MODEL, dense, speedup
from runtime import load as load_headwise
from runtime.fingerprint import check
from runtime.layers import text_config
from search.model.prompts import HeldOut


def parser() -> argparse.ArgumentParser:
    """The script's command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("config", type=Path, metavar="ARTIFACT")
    p.add_argument("--model", required=True)
    p.add_argument("--new", type=int, default=8192, help="tokens of the chunk (default 8192)")
    p.add_argument(
        "--cached", type=int, nargs="+", default=[8192, 24576], help="(default 8192 24576)"
    )
    p.add_argument("--rounds", type=int, default=3, help="timed rounds, after one that is not")
    p.add_argument(
        "--without", nargs="+", choices=(MODEL, KERNEL), default=(), metavar="DENSE", help="not run"
    )
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--out", type=Path, required=True, metavar="FILE")
    return p


def main() -> int:
    """Measure, print a line for each method, and write the result file."""
    options = parser().parse_args()
    check_writable(options.out)
    artifact, arrays = load_pair(options.config)
    loaded = load_model(options.model, dtype=options.dtype, device="cpu")
    check(artifact.model, loaded.model)
    rows: list[dict[str, Any]] = []
    for cached in options.cached:
        rows.append(_row(options, loaded, arrays, cached))
        _print(rows[-1])
        write(options.out, _result(options, rows))
    return 0


@torch.inference_mode()
def _row(options: argparse.Namespace, loaded: LoadedModel, arrays: Any, cached: int) -> Any:
    from transformers import DynamicCache

    text = HeldOut(
        (Task("prose"),),
        loaded,
        length=cached + options.new,
        samples=1,
        seed=1,
        seen=Seen.by([arrays]),
        first=GATE_SET,
    ).first[0]
    ids = torch.tensor([text.input_ids], dtype=torch.long, device="cpu")
    model = loaded.model
    headwise = load_headwise(options.config)
    cache: Any = DynamicCache(config=text_config(model))
    methods = {
        MODEL: lambda: dense(model, MODEL),
        KERNEL: lambda: dense(model, KERNEL),
        HEADWISE: lambda: headwise.apply(model, check_weights=False, strict=True),
    }
    for name in options.without:
        del methods[name]
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    with phase(f"{cached:,} cached tokens", 1 + len(methods) * (1 + options.rounds), "calls") as at:
        with dense(model, KERNEL):
            model(ids[:, :cached], past_key_values=cache, logits_to_keep=1)
        at.update()
        for number in range(1 + options.rounds):
            for name, enter in methods.items():
                with enter():
                    start = time.perf_counter()
                    output = model(ids[:, cached:], past_key_values=cache, logits_to_keep=1)
                    int(output.logits[0, -1].argmax())
                    taken = time.perf_counter() - start
                cache.crop(-options.new)
                # The first round warms all of them up.
                if number:
                    seconds[name].append(round(taken, 4))
                at.update()
    baselines = {name: seconds[name] for name in methods if name != HEADWISE}
    gain = speedup(seconds[HEADWISE], baselines)
    return {
        "cached": cached,
        "new": options.new,
        "seconds": seconds,
        "speedup": round(gain.value, 4),
        "over": gain.fastest,
        "bounds": [round(each, 4) for each in gain.bounds.get(gain.fastest, ())],
    }


def _print(row: dict[str, Any]) -> None:
    for name, seconds in row["seconds"].items():
        print(f"{LABELS[name]:34} {statistics.median(seconds):8.2f} s")
    print(f"{row['new']} new tokens behind {row['cached']}: {row['speedup']:.2f}x {row['over']}")


def _result(options: argparse.Namespace, rows: list[dict[str, Any]]) -> Result:
    name = Path(options.model).name
    return Result(
        what="Seconds to the first token of new tokens behind cached ones, in transformers",
        command=f"python benchmarks/prefix_reuse.py {options.config.name} --model {name}",
        commit=commit(),
        machine=machine_of(environment("cpu")),
        versions=versions(),
        rows=labeled("settings", [{"model": name}]) + labeled("row", rows),
    )


if __name__ == "__main__":
    run_command(lambda _: main())
