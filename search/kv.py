"""python -m search.kv: choose how many tokens each KV head keeps, for a total, and write that into an artifact.

python -m search.kv cfg.yaml --model smollm2 --out cfg.yaml --target-share 0.2
python -m search.kv cfg.yaml --model smollm2 --out cfg.yaml --target-bytes 64MiB --context 8192

Heads that find what they need in few tokens give their room to those that do not. Each head's curve of error against
budget is measured (profiling.caches.budget_curves), the total is spent exactly, and the result is compared with the
same total spent evenly, on held-out prompts; where even is better, even is written. Others report.
"""

from __future__ import annotations

import argparse

from artifacts import arguments
from artifacts.command_line import ArgumentParser, run_command
from profiling.memory_use.sizes import bytes_of
from profiling.prompts.prompt import TASKS
from search.decode.kv_search import KVSearch, report, run


def parser() -> ArgumentParser:
    """The command line of python -m search.kv."""
    p = ArgumentParser(prog="python -m search.kv", description=__doc__)
    arguments.add_model(p)
    arguments.add_artifact(p, "artifact to start from, as search.heads writes it", old="--config")
    arguments.add_out(p, "artifact to write; may be the same file")
    total = p.add_mutually_exclusive_group(required=True)
    total.add_argument("--target-share", type=float, dest="share", help="keep this share of all tokens, such as 0.2")
    total.add_argument("--target-bytes", help="bytes of a sequence's cache at --context tokens, such as 64MiB")
    p.add_argument("--context", type=int, help="tokens that --target-bytes is for")
    arguments.add_task(p, f"prompts to measure on: {TASKS}")
    arguments.add_length(p, "their length in tokens (default 2048)", default=KVSearch.length)
    p.add_argument("--samples", type=int, default=KVSearch.samples, help="prompts of each task (default 2)")
    p.add_argument("--forced", type=int, default=KVSearch.forced, help="tokens of each held-out prompt decoded")
    p.add_argument(
        "--normalised",
        action=argparse.BooleanOptionalAction,
        default=KVSearch.normalised,
        help="divide scores by how many queries could see a token (default), or keep H2O's sums",
    )
    arguments.add_seed(p, KVSearch.seed)
    arguments.add_dtype(p)
    arguments.add_device(p)
    p.add_argument("--fresh", action="store_true", help="discard what an interrupted run left")
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    options["tasks"] = tuple(options["tasks"] or KVSearch.tasks)
    if options["target_bytes"] is not None:
        options["target_bytes"] = bytes_of(options["target_bytes"], "--target-bytes")
    config = KVSearch(**options)
    _, found = run(config)
    print(report(found))
    print(f"wrote {config.out} ({arguments.as_typed('search.kv', argv)})")
    return 0


if __name__ == "__main__":
    run_command(main)
