"""Config of a search with one budget for the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from artifacts import HeadwiseError
from artifacts.cli import arguments
from artifacts.cli.options import at_least, bytes_of, check_ranges, nested, option, shared
from artifacts.schema.search import CostUnit
from profiling.prompts.prompt import CALIBRATED_TASKS, GATE_TASKS, parse_task
from search.model.limits import Limits
from search.study import STORAGE_HELP

DEFAULT_BUDGET = 0.25
# Dense tails that are compared where none is asked for, in tokens. Not 0: default tasks ask
# elsewhere than at the end of a prompt, so they see no gain in a tail, and users' prompts end
# with a question more often than not: without a tail SmolLM2 lost 5 of 6 pass keys at 4,096 tokens,
# where an artifact of shorter prompts is served, too.
TAILS = (64, 256)


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise HeadwiseError(
            f"--budget {text!r} must be a fraction of dense attention's cost such as 0.25; "
            "a_shape:SINK,WINDOW goes with --preset paper"
        ) from None


@dataclass(frozen=True, kw_only=True)
class ModelSearch:
    """Config of a search with one budget for the model; None takes a default of the model's.

    Attributes:
        budget: cost of all heads' attention, as a fraction of dense attention's by the same
            kernels; None: a quarter, or more where not even the cheapest candidates keep to that.
        length: tokens of a prompt.
        samples: prompts of each task.
        dense_tail: None lets the search choose among TAILS.
        storage: of an Optuna study of all that is measured, any URL that it takes; None keeps none.
        max_memory: bytes of weights that stay on the device, None all; the other layers come in
            one at a time.
    """

    model: str = shared(arguments.add_model)
    out: Path = shared(arguments.add_out, "artifact to write, such as cfg.yaml")
    tasks: tuple[str, ...] = shared(
        arguments.add_task,
        f"what prompts are made of (default {' '.join(CALIBRATED_TASKS)}), text:FILE for text like "
        f"yours",
        default=CALIBRATED_TASKS,
    )
    length: int | None = shared(
        arguments.add_length,
        "tokens of a prompt (default: the model's positions, at most 8192)",
        default=None,
    )
    samples: int = option("prompts of each task", default=1, within=at_least(1), advanced=True)
    budget: float | None = option(
        f"fraction of dense attention's cost to spend (default {DEFAULT_BUDGET}, or the least)",
        default=None,
        read=_share,
    )
    cost: CostUnit = option(
        "what is spent, seconds or flops (default seconds)",
        metavar="UNIT",
        default="seconds",
        choices=("seconds", "flops"),
        advanced=True,
    )
    storage: str | None = option(STORAGE_HELP, default=None, metavar="URL", advanced=True)
    limits: Limits = nested(Limits)
    seed: int = shared(arguments.add_seed, default=0, within=at_least(0))
    dtype: str = shared(arguments.add_dtype, default="auto")
    device: str = shared(arguments.add_device, default="auto")
    backend: str = shared(arguments.add_backend, default="auto")
    revision: str | None = shared(arguments.add_revision, default=None)
    max_memory: int | None = option(
        "weights that stay on the device, such as 16GiB (default: all)",
        default=None,
        metavar="SIZE",
        read=lambda text: bytes_of(text, "--max-memory"),
        advanced=True,
    )
    dense_below: int | None = option(
        "serve shorter prompts densely (default: measured, or half the length)",
        default=None,
        within=at_least(1),
        advanced=True,
    )
    dense_tail: int | None = option(
        f"last queries kept dense (default: the best of {', '.join(map(str, TAILS))})",
        default=None,
        within=at_least(0),
        advanced=True,
    )
    beyond_positions: bool = option(
        "allow a --length over the model's positions",
        default=False,
        action="store_true",
        advanced=True,
    )
    fresh: bool = shared(arguments.add_fresh, default=False)
    keep: bool = option(
        "write the artifact even if it is too slow to serve",
        default=False,
        action="store_true",
    )
    picture: bool = shared(arguments.add_picture, default=True)
    command: str = ""

    def __post_init__(self) -> None:
        check_ranges(self)
        for task in self.tasks:
            parse_task(task)
        if self.length is not None and self.length < 128:
            raise HeadwiseError(f"--length must be at least 128, got {self.length}")
        if not 0 < self.share <= 1:
            raise HeadwiseError(
                f"--budget must be above 0 and at most 1 (dense attention), got {self.share:g}"
            )

    @property
    def held_out_tasks(self) -> tuple[str, ...]:
        """Tasks of held-out prompts: the calibrated ones, by default in fewer prefills."""
        if self.tasks == CALIBRATED_TASKS:
            return GATE_TASKS
        return self.tasks

    @property
    def share(self) -> float:
        """The budget that was asked for, or the default."""
        if self.budget is None:
            return DEFAULT_BUDGET
        return self.budget

    @property
    def tails(self) -> tuple[int, ...]:
        """Dense tails that are compared."""
        if self.dense_tail is not None:
            return (self.dense_tail,)
        return TAILS
