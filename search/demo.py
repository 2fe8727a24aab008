"""python -m search.demo: the whole of Headwise on a real model in a few minutes.

Searches SmolLM2, writes an artifact, loads it in the runtime, and shows dense attention and Headwise side by side.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from artifacts import HeadwiseError
from artifacts.command_line import ArgumentParser, run_command
from profiling.compare import Comparison, Result, compare, table
from profiling.models.loading import load_model
from runtime.fingerprint import fingerprint
from search.common.report import print_report
from search.published.config import DEFAULT_BUDGET, HeadSearch
from search.published.head_budget import resolve, search_model

# Half of what the patterns are searched for: up to here SmolLM2 finds every key itself.
PASSKEY_LENGTH = 4096


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
    print(f"$ {command}")
    loaded = load_model(model)
    found = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    wanted = HeadSearch(model=model, out=config, length=length, budget=budget, command=command)
    print_report(search_model(resolve(wanted, found), loaded, found), config)
    comparison = Comparison(
        model=model,
        config=config,
        length=length,
        passkey_length=min(PASSKEY_LENGTH, length),
        passkeys=1,
        repeats=repeats,
    )
    return compare(comparison, loaded)


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = parser().parse_args(argv)
    result = run(
        options.out,
        model=options.model,
        length=options.length,
        budget=options.budget,
        repeats=options.repeats,
    )
    print(f"\nprefill of {options.length} tokens, median of {options.repeats} interleaved runs\n")
    print(table(result))
    print(f"\npasskey in {result.settings['passkey_length']} tokens: {result.expected[0]}")
    for row in result.rows:
        print(f"  {row.method:<9} answers {row.answers[0]}")
    print(f"\npattern of each layer and head: {options.out / 'cfg.png'} (also .svg and .csv)")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line of python -m search.demo."""
    p = ArgumentParser(prog="python -m search.demo", description=__doc__)
    p.add_argument("--out", type=Path, required=True, help="folder for the artifact and the picture")
    p.add_argument("--model", default="smollm2", help="as for search.heads (default smollm2)")
    p.add_argument("--length", type=int, default=8192, help="prompt length in tokens (default 8192)")
    p.add_argument("--budget", default=DEFAULT_BUDGET, help="as for search.heads (default 0.3)")
    p.add_argument("--repeats", type=int, default=3, help="timed runs of each side (default 3)")
    return p


if __name__ == "__main__":
    run_command(main)
