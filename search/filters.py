"""headwise filters: choose the layers that filter in decode and those that stay dense, for an
artifact.

The similarity of layers is measured on a few prompts (or read with --profile). The filter and dense
layers that change what the sparse layers add to the residual stream least are found exactly. On
other prompts the choice is compared with evenly spaced filter layers. The artifact's other sections
stay as they are.

headwise filters cfg.yaml --model smollm2 --out cfg.yaml --task multi_hop:novel.txt --task
kv_retrieval"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

from artifacts.cli import arguments
from artifacts.cli.command import ArgumentParser, run_command
from artifacts.cli.options import add_arguments, config_of
from profiling.similarities.config import SimilarityConfig
from search.decode.filter_config import FilterSearch
from search.decode.filter_layers import Rules
from search.decode.filter_search import run
from search.decode.found import record, report

# Options of the similarity that is measured; the model is the search's own.
_MEASURED = ("tasks", "length", "samples", "steps", "seed", "dtype", "device")


def parser() -> ArgumentParser:
    """The command line of headwise filters."""
    p = ArgumentParser(prog="headwise filters", description=__doc__)
    add_arguments(p, FilterSearch)
    add_arguments(p, Rules)
    add_arguments(p, SimilarityConfig, _MEASURED)
    arguments.add_json(p)
    return p


def config_from(options: dict[str, Any], command: str) -> FilterSearch:
    """The search of a command line's options.

    Raises:
        HeadwiseError: a value that cannot be.
    """
    measured = config_of(SimilarityConfig, options, command=command)
    config = config_of(FilterSearch, options, rules=config_of(Rules, options), measured=measured)
    if isinstance(config.budget, float) and measured.length:
        measured = replace(measured, top_k=ceil(config.budget * measured.length))
    return replace(config, measured=measured)


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    command = arguments.as_typed("filters", argv)
    config = config_from(options, command)
    _, found = run(config)
    then = f"next: headwise decode {config.out} --model {config.model}"
    said = f"{report(found)}\nwrote {config.out}\n{then}"
    arguments.deliver(said, {"command": command, **record(found)}, options["json"])
    return 0


if __name__ == "__main__":
    run_command(main)
