"""python -m search.demo: the whole of Headwise on a real model in a few minutes.

Searches SmolLM2 as MInference 1.0 does it, a budget for each head, which is the quicker search; loads the artifact in
the runtime, and shows dense attention and Headwise side by side.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from artifacts import HeadwiseError, arguments
from artifacts.command_line import ArgumentParser, run_command
from profiling.compare import Comparison, Result, compare
from profiling.models.loading import load_model
from profiling.prompts.prompt import make_prompts
from profiling.speed.baselines import HEADWISE, rows, told
from profiling.speed.latency import medians, prefill
from runtime.fingerprint import fingerprint
from search.common.report import report
from search.published.config import DEFAULT_BUDGET, HeadSearch
from search.published.head_budget import resolve, search_model

# Half of what the patterns are searched for: up to here SmolLM2 finds every key itself.
PASSKEY_LENGTH = 4096
# The search is a dense pass with 6 candidates for each head beside it, and a few prefills are timed after it.
_SEARCH_PASSES = 6


def run(out: Path, *, model: str, length: int, budget: str, repeats: int) -> Result:
    """Search, apply and compare; everything lands in the folder `out`."""
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
    asked = min(PASSKEY_LENGTH, length)
    comparison = Comparison(
        model=model, config=config, length=length, passkey_length=asked, passkeys=1, repeats=repeats
    )
    return compare(comparison, loaded)


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = parser().parse_args(argv)
    if options.repeats < 1:
        raise HeadwiseError(f"--repeats must be at least 1, got {options.repeats}")
    result = run(
        options.out,
        model=options.model,
        length=options.length,
        budget=options.budget,
        repeats=options.repeats,
    )
    print(f"\nprefill of {options.length:,} tokens, median of {options.repeats} interleaved runs\n")
    print("\n".join(rows(medians(result.all_seconds))))
    found, sparse = result.speedup(HEADWISE), result.rows[-1]
    assert found is not None, "it is timed at least once"
    print(f"Headwise is {told(found)}")
    print(f"it computes {sparse.density:.3f} of the tiles and keeps {sparse.recall:.3f} of the attention mass")
    print(f"\npasskey in {result.settings['passkey_length']} tokens: {result.expected[0]}")
    for row in (result.rows[0], sparse):
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
