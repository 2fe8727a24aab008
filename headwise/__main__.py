"""The command headwise: a table of verbs, whose modules are imported when they are called.

A verb's module has `Config`, its options (artifacts.cli.options), and `run(config)`, which prints
and returns the exit status: 0 success, 3 a finding. Its docstring starts the help page, EXAMPLES
ends it. A mistake of the user is a HeadwiseError, with status 2.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from artifacts import HeadwiseError
from artifacts.cli.command import one_process, run_command
from artifacts.cli.interrupt import while_importing
from artifacts.cli.parser import ArgumentParser, read
from artifacts.cli.parser import parser_of as make_parser

# Group -> verb -> (module, description).
GROUPS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "every day": {
        "doctor": (
            "profiling.doctor",
            "what this machine can do, and how long a search of a model takes on it",
        ),
        "search": ("search.heads", "a pattern for every head of a model"),
        "gate": (
            "search.gate",
            "what an artifact loses on prompts that its search did not see; fails if too much",
        ),
        "evaluate": (
            "profiling.evaluate",
            "artifacts and methods side by side: tasks, perplexity, speed, as one page",
        ),
        "show": ("artifacts.commands.show", "an artifact to read"),
        "check": (
            "runtime.vllm.check",
            "whether vLLM would serve an artifact, and if not, why not",
        ),
    },
    "find": {
        "filters": ("search.filters", "the filter layers of decode (OmniKV)"),
        "kv": ("search.kv", "how many tokens each KV head keeps, for a total (H2O)"),
        "demo": ("search.demo", "search, apply and compare on a small model, in minutes"),
    },
    "measure": {
        "lm-eval": ("profiling.lm_eval", "lm-evaluation-harness, with an artifact in its model"),
        "decode": (
            "profiling.decode",
            "decode: time a token, perplexity, answers, bytes of the cache",
        ),
        "similarity": (
            "profiling.similarity",
            "which layers choose tokens for those after them (OmniKV)",
        ),
        "heatmaps": ("profiling.heatmaps", "pictures of layers and of a head's attention"),
        "plot": ("profiling.plot", "the picture of an artifact's patterns"),
        "stream": ("profiling.stream", "streams of any length (StreamingLLM)"),
        "tasks": ("profiling.tasks", "the tasks that prompts are made of"),
        "bench": ("profiling.bench", "prefill by the kernels against torch's"),
    },
    "artifacts": {
        "validate": (
            "artifacts.commands.validate",
            "whether its files are whole and the record valid",
        ),
        "diff": ("artifacts.commands.diff", "what changed from one to another"),
        "convert": ("artifacts.commands.convert", "other tools' files of head patterns, both ways"),
        "schema": ("artifacts.commands.schema", "the JSON Schema, with what every field means"),
        "sign": ("artifacts.commands.sign", "a signature file next to an artifact"),
        "verify": ("artifacts.commands.verify", "whether it is from whom it should be"),
    },
}
VERBS = {verb: module for group in GROUPS.values() for verb, (module, _) in group.items()}
_EPILOG = """\
headwise VERB --help says more. All of them exit with 0 where all is good, 1 for a bug of ours, 2
for bad input, and 3 for a finding, such as a gate that fails.

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
    module: Any = import_module(VERBS[verb])
    examples = getattr(module, "EXAMPLES", None)
    return make_parser(module.Config, f"headwise {verb}", module.__doc__, examples)


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
    module: Any = import_module(VERBS[verb])
    config = read(parser_of(verb), module.Config, words, _typed(verb, words))
    if not module.Config.shares_work:
        one_process(f"headwise {verb}")
    return int(module.run(config))


def _typed(verb: str, words: list[str]) -> str:
    """The command line for records, without passwords."""
    from search.study import without_password

    return f"headwise {verb} {shlex.join(map(without_password, words))}".rstrip()


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
