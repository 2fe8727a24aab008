"""headwise kv: choose how many tokens each KV head keeps, for a total, and write that into an
artifact.

headwise kv cfg.yaml --model smollm2 --out cfg.yaml --target-share 0.2
headwise kv cfg.yaml --model smollm2 --out cfg.yaml --target-bytes 64MiB --context 8192

Heads that find what they need in few tokens give their room to those that do not. Each head's curve
of error against budget is measured (profiling.caches.budget_curves), the total is spent exactly,
and the result is compared with the same total spent evenly, on held-out prompts; where it is not
better beyond chance, even is written. Others report."""

from __future__ import annotations

from artifacts.cli import arguments
from artifacts.cli.command import ArgumentParser, run_command
from artifacts.cli.options import add_arguments, config_of
from search.decode.kv_search import KVSearch, record, report, run


def parser() -> ArgumentParser:
    """The command line of headwise kv."""
    p = ArgumentParser(prog="headwise kv", description=__doc__)
    add_arguments(p, KVSearch)
    arguments.add_json(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    command = arguments.as_typed("kv", argv)
    config = config_of(KVSearch, options)
    _, found = run(config)
    then = f"headwise evaluate {config.out} --model {config.model} --out report/"
    said = f"{report(found)}\nwrote {config.out} ({command})\nnext, beside other caches: {then}"
    arguments.deliver(said, {"command": command, **record(found)}, options["json"])
    return 0


if __name__ == "__main__":
    run_command(main)
