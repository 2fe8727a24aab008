"""headwise lm-eval: lm-evaluation-harness's own command line, with the model `headwise` in it.

headwise lm-eval --model headwise --model_args pretrained=smollm2,config=cfg.yaml --tasks hellaswag
"""

from __future__ import annotations

import sys

from artifacts.cli.command import ArgumentParser, run_command

_EPILOG = """\
--model_args of the model `headwise` are those of the harness's `hf`, and
  pretrained        also smollm2 and gemma3, from their packages
  config            the artifact, or `dense` for the model's own attention
  check_weights     false accepts other weights of the same architecture
  point             of the artifact's front: speedup=X, kl=X or recall=X
"""


def parser() -> ArgumentParser:
    """Text of `headwise --help` and docs/commands.md; the arguments are the harness's."""
    return ArgumentParser(
        prog="headwise lm-eval",
        usage="headwise lm-eval [lm-eval's arguments]",
        description=__doc__,
        epilog=_EPILOG,
        add_help=False,
    )


def main(argv: list[str] | None = None) -> int:
    """Hand the command line to the harness, with our model registered.

    Raises:
        HeadwiseError: see profiling.harness.model.HeadwiseLM.
    """
    from lm_eval.__main__ import cli_evaluate

    import profiling.harness.model  # noqa: F401

    # The harness's parser reads the process's own words.
    before = sys.argv
    sys.argv = ["lm_eval", *(sys.argv[1:] if argv is None else argv)]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    return 0


if __name__ == "__main__":
    run_command(main)
