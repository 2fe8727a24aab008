"""python -m search.demo: the whole of Headwise on a real model in a few minutes.

Searches SmolLM2 as MInference 1.0 does it, a budget for each head, which is the quicker search; loads the artifact in
the runtime, and shows dense attention and Headwise side by side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from artifacts import HeadwiseError, arguments
from artifacts.command_line import ArgumentParser, run_command
from profiling.compare import Comparison, Result, compare
from profiling.inside.capture import attending
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.prompt import make_prompts
from profiling.quality.sequences import planned
from profiling.speed.latency import interleaved, medians, prefill
from runtime import load
from runtime.fingerprint import fingerprint
from search.common.report import report
from search.published.config import DEFAULT_BUDGET, HeadSearch
from search.published.head_budget import resolve, search_model

# Half of what the patterns are searched for: up to here SmolLM2 finds every key itself.
PASSKEY_LENGTH = 4096
# The search is a dense pass with 6 candidates for each head beside it, and a few prefills are timed after it.
_SEARCH_PASSES = 6
_SDPA, _OURS, _HEADWISE = "dense as the model comes (sdpa)", "dense by our kernel", "Headwise"


def run(out: Path, *, model: str, length: int, budget: str, repeats: int) -> tuple[Result, Mapping[str, float]]:
    """Search, apply and compare; everything lands in the folder `out`.

    Returns:
        The comparison, and the seconds of a prefill by name, medians.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HeadwiseError(f"cannot make the folder {out}: {error.strerror}") from None
    config = out / "cfg.yaml"
    command = (
        f"python -m search.heads --allocation heads --model {model} --length {length} --budget {budget} --out {config}"
    )
    print(f"1. search a pattern for every head of {model} on one prompt of {length:,} tokens, and write {config}")
    print("2. load it in the runtime and time prefills beside dense attention, in turn")
    print("3. ask for a pass key under both", flush=True)
    loaded = load_model(model)
    found = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    wanted = resolve(HeadSearch(model=model, out=config, length=length, budget=budget, command=command), found)
    ids = torch.tensor([make_prompts("passkey", loaded.tokenizer, length=length, samples=1, seed=0)[0].input_ids])
    # The first call of all loads and compiles what later ones have.
    prefill(loaded.model, ids[:, :64])
    start = time.perf_counter()
    prefill(loaded.model, ids)
    seconds = time.perf_counter() - start
    minutes = seconds * (_SEARCH_PASSES + 3 * (repeats + 1) + 2) / 60
    print(
        f"a dense prefill takes {seconds:.1f} s here, so all of it about {max(1, round(minutes))} minutes\n", flush=True
    )
    print(f"$ {command}")
    print(report(search_model(wanted, loaded, found), config, model))
    times = _times(loaded, config, ids, repeats)
    asked = min(PASSKEY_LENGTH, length)
    comparison = Comparison(model=model, config=config, length=length, passkey_length=asked, passkeys=1, repeats=0)
    return compare(comparison, loaded), times


def _times(loaded: LoadedModel, config: Path, ids: torch.Tensor, repeats: int) -> dict[str, float]:
    """Median seconds of a prefill by both dense attentions and with the artifact, in turn."""
    contexts: dict[str, Callable[[], AbstractContextManager[object]]] = {
        _SDPA: nullcontext,
        _OURS: lambda: attending(loaded.model, planned({}, ids.shape[1])),
        _HEADWISE: lambda: load(config).apply(loaded.model),
    }
    return medians(interleaved(contexts, lambda: prefill(loaded.model, ids), repeats=repeats, device="cpu"))


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = parser().parse_args(argv)
    if options.repeats < 1:
        raise HeadwiseError(f"--repeats must be at least 1, got {options.repeats}")
    result, times = run(
        options.out,
        model=options.model,
        length=options.length,
        budget=options.budget,
        repeats=options.repeats,
    )
    print(f"\nprefill of {options.length:,} tokens, median of {options.repeats} interleaved runs\n")
    for name, seconds in times.items():
        print(f"  {name:<34}{seconds:>9.3f} s")
    better = min(times[_SDPA], times[_OURS])
    print(f"Headwise is {better / times[_HEADWISE]:.2f} times as fast as the better dense,", end=" ")
    print(f"{times[_SDPA] / times[_HEADWISE]:.2f} times as fast as the model as it comes")
    sparse = result.rows[1]
    print(f"it computes {sparse.density:.3f} of the tiles and keeps {sparse.recall:.3f} of the attention mass")
    print(f"\npasskey in {result.settings['passkey_length']} tokens: {result.expected[0]}")
    for row in result.rows:
        print(f"  {row.method:<9} answers {row.answers[0]}")
    print(f"\npattern of each layer and head: {options.out / 'cfg.png'} (also .svg and .csv)")
    return 0


def parser() -> ArgumentParser:
    """The command line of python -m search.demo."""
    p = ArgumentParser(prog="python -m search.demo", description=__doc__)
    arguments.add_out(p, "folder for the artifact and the picture", metavar="FOLDER")
    arguments.add_model(p, "as for search.heads (default smollm2)", default="smollm2")
    arguments.add_length(p, "tokens of the prompt (default 8192)", default=8192)
    p.add_argument("--budget", default=DEFAULT_BUDGET, help="as for search.heads (default 0.3)")
    p.add_argument("--repeats", type=int, default=3, help="timed runs of each side (default 3)")
    return p


if __name__ == "__main__":
    run_command(main)
