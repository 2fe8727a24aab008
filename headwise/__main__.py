"""The command headwise: a table of verbs, whose modules are imported when they are called.

A verb's module has `Config`, its options (artifacts.cli.options), and `run(config)`, which prints
and returns the exit status: 0 success, 3 a finding. Its docstring starts the help page, EXAMPLES
ends it. A mistake of the user is a HeadwiseError, with status 2.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module

from artifacts import HeadwiseError
from artifacts.cli.command import run_command
from artifacts.cli.interrupt import while_importing
from artifacts.cli.parser import ArgumentParser, parser_of_verb, run_verb

# Group -> verb -> (module, description).
GROUPS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "every day": {
        "doctor": ("profiling.doctor", "check this machine and estimate the time of a search"),
        "search": ("search.heads", "find a pattern for every head of a model"),
        "gate": (
            "search.gate",
            "measure an artifact's loss on held-out prompts; exit with 3 beyond the limits",
        ),
        "evaluate": (
            "profiling.evaluate",
            "compare artifacts and methods: tasks, perplexity, speed, on one page",
        ),
        "show": ("artifacts.commands.show", "print an artifact"),
        "check": ("profiling.check", "check that vLLM can serve an artifact"),
    },
    "find": {
        "filters": ("search.decode.filters", "choose the filter layers of decode (OmniKV)"),
        "kv": ("search.decode.kv", "divide a total of cached tokens among KV heads (H2O)"),
        "demo": ("search.demo", "search, apply and compare on a small model, in minutes"),
    },
    "measure": {
        "lm-eval": ("profiling.lm_eval", "run lm-evaluation-harness with an artifact"),
        "decode": (
            "profiling.decode",
            "compare caches in decode: ms/token, perplexity, accuracy, bytes",
        ),
        "similarity": (
            "profiling.similarity",
            "measure which layers select tokens for later layers (OmniKV)",
        ),
        "heatmaps": ("profiling.heatmaps", "draw layer similarity and the attention of a head"),
        "plot": (
            "profiling.plot",
            "draw an artifact's frontier, its patterns, or the candidates of a head",
        ),
        "stream": ("profiling.stream", "measure perplexity over an endless text (StreamingLLM)"),
        "tasks": ("profiling.tasks", "list the tasks that prompts are made from"),
        "bench": ("profiling.bench", "time Headwise's prefill kernels and torch's"),
    },
    "artifacts": {
        "validate": ("artifacts.commands.validate", "check an artifact's files and values"),
        "diff": ("artifacts.commands.diff", "print the differences between two artifacts"),
        "convert": ("artifacts.commands.convert", "convert head patterns from and to other tools"),
        "schema": ("artifacts.commands.schema", "print the JSON Schema of artifacts"),
        "sign": ("artifacts.commands.sign", "write a signature file next to an artifact"),
        "verify": ("artifacts.commands.verify", "check an artifact's signature"),
    },
}
VERBS = {verb: module for group in GROUPS.values() for verb, (module, _) in group.items()}
_EPILOG = """\
headwise VERB --help lists its options. Exit status: 0 success, 1 a bug in Headwise, 2 bad input,
3 a negative result, such as a gate that fails.

  headwise doctor --model MODEL
  headwise search --model MODEL --out cfg.yaml
  headwise gate cfg.yaml --model MODEL
"""


def parser() -> ArgumentParser:
    """The command line of headwise before its verb."""
    width = max(map(len, VERBS)) + 2
    lines = [
        "Find, check, measure and serve sparse attention patterns for the heads of a long-context "
        "language model."
    ]
    for group, verbs in GROUPS.items():
        lines += [
            "",
            f"{group}:",
            *(f"  {verb:<{width}}{says}" for verb, (_, says) in verbs.items()),
        ]
    p = ArgumentParser(
        prog="headwise", usage="headwise VERB ...", description="\n".join(lines), epilog=_EPILOG
    )
    return p


def parser_of(verb: str) -> ArgumentParser:
    """The command line of a verb."""
    return parser_of_verb(import_module(VERBS[verb]), verb)


def main(argv: list[str] | None = None) -> int:
    """Run the verb that the command line names; without one, list them."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = next((at for at, word in enumerate(words) if not word.startswith("-")), None)
    if at is None:
        parser().parse_args(words)
        parser().print_help()
        return 0
    verb = words.pop(at)
    if verb not in VERBS:
        near = get_close_matches(verb, VERBS, n=1, cutoff=0.5)
        if near:
            hint = f"did you mean {near[0]!r}?"
        else:
            hint = "headwise --help lists them"
        raise HeadwiseError(f"there is no command {verb!r}: {hint}")
    return run_verb(import_module(VERBS[verb]), verb, words)


def start() -> None:
    """The console script."""
    with while_importing():
        for word in sys.argv[1:]:
            if word in VERBS:
                import_module(VERBS[word])
            if not word.startswith("-"):
                break
    run_command(main)


if __name__ == "__main__":
    start()
