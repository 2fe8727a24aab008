"""headwise lm-eval: lm-evaluation-harness's own command line, with the model `headwise` in it.

headwise lm-eval --model headwise --model_args pretrained=smollm2,config=cfg.yaml --tasks hellaswag
"""

from __future__ import annotations

import argparse
import sys
from typing import Annotated, ClassVar

from artifacts.cli.options import Arg, CommandConfig

EXAMPLES = """\
--model_args of the model `headwise` are those of the harness's `hf`, and
  pretrained        also smollm2 and gemma3, from their packages
  config            the artifact, or `dense` for the model's own attention
  check_weights     false accepts other weights of the same architecture
  point             of the artifact's front: lost=X, kl=X, speedup=X or recall=X
"""


class Config(CommandConfig):
    """The harness's command line, which its own parser reads."""

    # The harness distributes its work itself.
    shares_work: ClassVar[bool] = True
    words: Annotated[
        tuple[str, ...],
        Arg("of the harness", (), metavar="lm-eval's arguments", nargs=argparse.REMAINDER),
    ]


def run(config: Config) -> int:
    """Hand the command line to the harness, with our model registered.

    Raises:
        HeadwiseError: see profiling.harness.model.HeadwiseLM.
    """
    from lm_eval.__main__ import cli_evaluate

    import profiling.harness.model  # noqa: F401

    # The harness's parser reads the process's own words.
    before = sys.argv
    sys.argv = ["lm_eval", *config.words]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    return 0
