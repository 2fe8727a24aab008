"""python -m search.filters: choose the layers that filter in decode and those that stay dense, for an artifact.

The similarity of layers and of their KV heads is measured on a few prompts (or read with --profile). The filter and
dense layers that change what the sparse layers add to the residual stream least are found exactly, and with them whose
tokens each KV head takes. On other prompts the choice is compared with evenly spaced and with random filter layers. The
artifact's other sections stay as they are.

python -m search.filters cfg.yaml --model smollm2 --out cfg.yaml --task multi_hop:novel.txt --task kv_retrieval
"""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any

from artifacts import HeadwiseError, arguments
from artifacts.command_line import ArgumentParser, run_command
from profiling.prompts.prompt import TASKS
from profiling.similarities.layer_similarity import DEFAULT_TASKS, SimilarityConfig
from search.decode.filter_layers import Rules
from search.decode.filter_search import FilterSearch, run
from search.decode.found import record, report
from search.decode.head_map import KINDS
from search.decode.rules import RULES


def parser() -> ArgumentParser:
    """The command line of python -m search.filters."""
    p = ArgumentParser(prog="python -m search.filters", description=__doc__)
    arguments.add_model(p)
    arguments.add_artifact(p, "artifact to start from, as search.heads writes it", old="--config")
    arguments.add_out(p, "artifact to write; may be the same file")
    p.add_argument("--profile", type=Path, help="folder of python -m profiling.similarity, instead of measuring")
    p.add_argument("--filters", type=int, default=Rules.filters, help="at most so many filter layers (default 6)")
    p.add_argument("--sparse", type=float, default=Rules.sparse, help="least share of sparse layers (default 0.6)")
    p.add_argument("--dense-first", type=int, default=Rules.dense_first, help="first layers that are dense (default 0)")
    p.add_argument("--adjacent", action="store_true", help="keep the layer after each filter dense, to hide fetches")
    p.add_argument(
        "--heads",
        choices=KINDS,
        help="whose tokens a KV head takes: all heads' together, also a single head's, also a group's (default: "
        "the first, unless another is better beyond chance on prompts that chose neither)",
    )
    p.add_argument("--worst", type=float, default=FilterSearch.worst, help="weight of the worst steps (default 0.25)")
    p.add_argument("--max-error", type=float, help="the fewest full layers within this error, not the best")
    p.add_argument("--layers", help="filter layers by hand, such as 2,8,18")
    p.add_argument("--rule", choices=RULES, default=RULES[0], help="whose rule chooses (default error, ours)")
    p.add_argument("--dense-layers", help="with --layers: layers that stay dense besides those before the first")
    p.add_argument("--budget", default="2048", help="tokens of a sparse layer, or a share such as 0.125")
    p.add_argument("--coverage", type=float, help="stop earlier where this share of the attention is chosen (top-p)")
    p.add_argument("--target-error", type=float, help="find the least --coverage within this error on the prompts")
    p.add_argument("--target-tokens", type=float, help="find the --coverage that reads so many tokens, on average")
    p.add_argument("--selector", choices=("last", "uniform", "exponential"), default="last")
    p.add_argument("--window", type=int, default=16, help="queries of the selector (default 16)")
    p.add_argument("--prefill-ratio", type=float, help="in chunked prefill, tokens of the past for each of the chunk")
    arguments.add_task(p, f"prompts to measure on: {TASKS}")
    arguments.add_length(p, "their length in tokens")
    p.add_argument("--samples", type=int, default=SimilarityConfig.samples, help="prompts of each task")
    p.add_argument("--steps", type=int, default=SimilarityConfig.steps, help="decode steps of each prompt")
    arguments.add_seed(p, SimilarityConfig.seed)
    arguments.add_dtype(p)
    arguments.add_device(p)
    arguments.add_json(p)
    p.add_argument("--fresh", action="store_true", help="discard what an interrupted run left")
    return p


def config_from(options: dict[str, Any], command: str) -> FilterSearch:
    """The search of a command line's options.

    Raises:
        HeadwiseError: a value that cannot be.
    """
    options["budget"] = budget = _budget(options["budget"])
    for name in ("layers", "dense_layers"):
        if options[name] is not None:
            options[name] = _layers(f"--{name.replace('_', '-')}", options[name])
    rules = {name: options.pop(name) for name in ("filters", "sparse", "dense_first", "adjacent")}
    measured = {name: options.pop(name) for name in ("length", "samples", "steps", "seed", "dtype", "device")}
    length = measured["length"]
    return FilterSearch(
        rules=Rules(**rules),
        measured=SimilarityConfig(
            model=options["model"],
            tasks=tuple(options.pop("tasks") or DEFAULT_TASKS),
            top_k=ceil(budget * length) if isinstance(budget, float) and length else None,
            sets=options["heads"] or SimilarityConfig.sets,
            command=command,
            **measured,
        ),
        **options,
    )


def _budget(text: str) -> int | float:
    try:
        budget = float(text) if "." in text else int(text)
    except ValueError:
        budget = 0
    if budget <= 0 or (isinstance(budget, float) and budget >= 1):
        raise HeadwiseError(f"--budget must be a number of tokens or a share between 0 and 1, got {text!r}")
    return budget


def _layers(option: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise HeadwiseError(f"{option} must be layer numbers with commas between, such as 2,8,18, got {text!r}")
    return tuple(int(part) for part in parts)


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    to_json, command = options.pop("json"), arguments.as_typed("search.filters", argv)
    config = config_from(options, command)
    _, found = run(config)
    arguments.deliver(f"{report(found)}\nwrote {config.out}", {"command": command, **record(found)}, to_json)
    return 0


if __name__ == "__main__":
    run_command(main)
