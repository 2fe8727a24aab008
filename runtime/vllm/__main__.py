"""python -m runtime.vllm: would an artifact serve inside vLLM, and what is gained?"""

from __future__ import annotations

import sys
from importlib import import_module

from artifacts.command_line import ArgumentParser, run_command

_EPILOG = """\
exit status:
  0  it would serve; it was measured
  1  a bug of ours, with a traceback
  2  bad input, said in one line
  3  it would not serve, with every reason

examples:
  python -m runtime.vllm check cfg.yaml --model HuggingFaceTB/SmolLM2-135M-Instruct
  python -m runtime.vllm check cfg.yaml --model ./model --tensor-parallel-size 4
  python -m runtime.vllm ttft cfg.yaml --model ./model --length 8192
  python -m runtime.vllm ttft cfg.yaml --model ./model --length 32768 --repeats 3 \\
      --engine '{"hf_overrides": {"max_position_embeddings": 32784}}'
"""
_VERBS = {
    "check": ("check", "would this artifact serve that model inside vLLM, and if not, why not?"),
    "ttft": ("first_token", "time to the first token with the artifact and without, in engines that run in turn"),
}


def parser() -> ArgumentParser:
    """The command line of python -m runtime.vllm."""
    p = ArgumentParser(
        prog="python -m runtime.vllm", description="Headwise inside vLLM: see docs/vllm.md.", epilog=_EPILOG
    )
    verbs = p.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, (name, what) in _VERBS.items():
        module = import_module(f"runtime.vllm.{name}")
        below = verbs.add_parser(verb, help=what, description=f"{what[0].upper()}{what[1:]}")
        module.add_arguments(below)
        below.set_defaults(module=module)
    return p


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run the verb and print what it gives; returns the exit status."""
    given = vars(parser().parse_args(argv))
    module = given.pop("module")
    del given["verb"]
    outcome = module.run(module.Config(**given))
    sys.stdout.write(outcome.text)
    return int(outcome.status)


if __name__ == "__main__":
    run_command(main)
