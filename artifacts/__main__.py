"""headwise: look at artifacts, check, compare, convert and sign them."""

from __future__ import annotations

import sys
from collections.abc import Collection

from artifacts.cli.command import ArgumentParser, one_process, run_command, set_verbosity

VERBS = ("show", "validate", "diff", "convert", "schema", "sign", "verify")
_EPILOG = """\
An artifact is what `headwise search` writes: FILE.yaml, to be read and diffed, and a
.safetensors file beside it. Move or copy the two together, and keep their names.

exit status:
  0  good
  1  a bug of ours, with a traceback
  2  bad input, said in one line
  3  differences

examples:
  headwise show cfg.yaml                          a page: model, search, winners, layers, evidence
  headwise validate cfg.yaml                      are both files whole and valid?
  headwise diff old.yaml new.yaml                 which heads changed, and what that does to density
  headwise validate --rehash cfg.yaml             keep a change that was made in an editor
  headwise convert best_pattern.json --config config.json --out cfg.yaml
  headwise verify cfg.yaml --key me.key.pub       is it from whom it should be?
  headwise VERB --help                            every verb has examples of its own
"""


def parser(asked: Collection[str] = VERBS) -> ArgumentParser:
    """Return the parser of headwise; verbs not in `asked` are only listed, without arguments."""
    return _parsers(asked)[0]


def parser_of(verb: str) -> ArgumentParser:
    """Return the parser of one verb."""
    return _parsers((verb,))[1][verb]


def _parsers(asked: Collection[str]) -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    """Return the main parser, and the parser of each verb by name."""
    from importlib import import_module

    from artifacts.cli.options import add_arguments
    from artifacts.commands import Verb

    p = ArgumentParser(
        prog="headwise",
        description="Look at Headwise artifacts, check, compare, convert and sign them.",
        epilog=_EPILOG,
    )
    subparsers = p.add_subparsers(dest="verb", metavar="VERB", required=True)
    parsers = {}
    verbs: dict[str, Verb] = {name: import_module(f"artifacts.commands.{name}") for name in VERBS}
    for name, verb in verbs.items():
        says = f"{verb.SHORT[0].upper()}{verb.SHORT[1:]}."
        below = subparsers.add_parser(name, help=verb.SHORT, description=says, epilog=verb.EXAMPLES)
        if name in asked:
            add_arguments(below, verb.Config)
        below.set_defaults(module=verb, parser=below)
        parsers[name] = below
    return p, parsers


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run the verb, print its output and return the exit status."""
    from artifacts.cli.options import config_of

    if argv is None:
        words = sys.argv[1:]
    else:
        words = argv
    set_verbosity(0)
    namespace, left_over = parser(words).parse_known_args(words)
    values = vars(namespace)
    below = values.pop("parser")
    if left_over:
        usage = " ".join(below.format_usage().split())
        below.error(f"unrecognized arguments: {' '.join(left_over)}; {usage}")
    one_process(below.prog)
    verb = values.pop("module")
    outcome = verb.run(config_of(verb.Config, values))
    sys.stdout.write(outcome.text)
    return int(outcome.status)


if __name__ == "__main__":
    run_command(main)
