"""Config of a search with one budget for the model."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from artifacts import HeadwiseError
from artifacts.cli.arguments import (
    Backend,
    Device,
    Dtype,
    Fresh,
    Length,
    ModelName,
    Out,
    Picture,
    Revision,
    Seed,
)
from artifacts.cli.options import ADVANCED, Arg, CommandConfig, bytes_of
from artifacts.schema.search import CostUnit
from profiling.prompts.options import LISTED, Tasks, words
from profiling.prompts.prompt import CALIBRATED_TASKS, GATE_TASKS, Task
from search.model.limits import Limits
from search.study import STORAGE_HELP

# Defaults of --preset paper.
PAPER_LENGTH = 30_000
PAPER_BUDGET = "a_shape:1024,4096"
PAPER_TASK = Task("kv_retrieval")
# What it has no use for.
_NOT_PAPER = ("samples", "cost", "storage", "limits", "max_memory", "keep")
# Dense tails that are compared where none is asked for, in tokens. Not 0: default tasks ask
# elsewhere than at the end of a prompt, so they see no gain in a tail, and users' prompts end
# with a question more often than not: without a tail SmolLM2 lost 5 of 6 pass keys at 4,096 tokens,
# where an artifact of shorter prompts is served, too.
TAILS = (64, 256)


def _number(value: Any) -> Any:
    """Read a number; --preset paper takes other texts too."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


class ModelSearch(CommandConfig):
    """Config of a search with one budget for the model; None takes a default of the model's.

    Attributes:
        budget: cost of all heads' attention, as a fraction of dense attention's by the same
            kernels, which is spent whatever is lost; None: the least that is proven to be within
            the limits.
        length: tokens of a prompt.
        samples: prompts of each task.
        dense_tail: None lets the search choose among TAILS.
        storage: of an Optuna study of all that is measured, any URL that it takes; None keeps none.
        max_memory: bytes of weights that stay on the device, None all; the other layers come in
            one at a time.
        preset: paper asks for the search of search.paper, which has no use for some options.
    """

    shares_work: ClassVar[bool] = True

    model: ModelName
    out: Annotated[Out, Arg("artifact to write, such as cfg.yaml")]
    tasks: Annotated[
        Tasks,
        Arg(
            f"what prompts are made of (default {words(CALIBRATED_TASKS)}), text:FILE for text "
            f"like yours; {LISTED}; repeatable"
        ),
    ] = CALIBRATED_TASKS
    length: Annotated[
        Length | None, Arg("tokens of a prompt (default: the model's positions, at most 8192)")
    ] = None
    samples: Annotated[int, Arg("prompts of each task", group=ADVANCED), Field(ge=1)] = 1
    budget: Annotated[
        float | str | None,
        Arg(
            "fraction of dense attention's cost to spend, whatever is lost (default: the least "
            "that is proven to be within the limits)"
        ),
        BeforeValidator(_number),
    ] = None
    cost: Annotated[
        CostUnit,
        Arg("what is spent, seconds or flops (default seconds)", group=ADVANCED, metavar="UNIT"),
    ] = "seconds"
    storage: Annotated[str | None, Arg(STORAGE_HELP, group=ADVANCED, metavar="URL")] = None
    limits: Limits = Field(default_factory=Limits)
    seed: Seed = 0
    dtype: Dtype = "auto"
    device: Device = "auto"
    backend: Backend = "auto"
    revision: Revision = None
    max_memory: Annotated[
        int | None,
        Arg(
            "weights that stay on the device, such as 16GiB (default: all)",
            group=ADVANCED,
            metavar="SIZE",
        ),
        BeforeValidator(partial(bytes_of, option="--max-memory")),
    ] = None
    dense_below: Annotated[
        int | None,
        Arg(
            "serve shorter prompts densely (default: measured, or half the length)", group=ADVANCED
        ),
        Field(ge=1),
    ] = None
    dense_tail: Annotated[
        int | None,
        Arg(
            f"last queries kept dense (default: the best of {', '.join(map(str, TAILS))})",
            group=ADVANCED,
        ),
        Field(ge=0),
    ] = None
    beyond_positions: Annotated[
        bool, Arg("allow a --length over the model's positions", group=ADVANCED)
    ] = False
    fresh: Fresh = False
    keep: Annotated[bool, Arg("write the artifact even if it is too slow to serve")] = False
    picture: Picture = True
    preset: Annotated[
        Literal["paper"] | None,
        Arg(
            "paper: MInference's own search, of one prompt of one --task and --length (default "
            f"{PAPER_LENGTH}), with a --budget for each head, a share or a_shape:SINK,WINDOW "
            f"(default {PAPER_BUDGET})",
            group=ADVANCED,
        ),
    ] = None
    command: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.length is not None and self.length < 128:
            raise HeadwiseError(f"--length must be at least 128, got {self.length}")
        if self.length is not None:
            self.check_tail(self.length)
        if self.preset is not None:
            self._check_preset()
            return self
        if isinstance(self.budget, str):
            raise HeadwiseError(
                f"--budget {self.budget!r} must be a fraction of dense attention's cost such as "
                "0.25; a_shape:SINK,WINDOW goes with --preset paper"
            )
        if self.share is not None and not 0 < self.share <= 1:
            raise HeadwiseError(
                f"--budget must be above 0 and at most 1 (dense attention), got {self.share:g}"
            )
        return self

    def check_tail(self, length: int) -> None:
        """Raise HeadwiseError if the dense tail is the whole prompt."""
        if (self.dense_tail or 0) >= length:
            raise HeadwiseError(
                f"--dense-tail must be below the --length of {length}, got {self.dense_tail}: "
                "every query would be dense"
            )

    def _check_preset(self) -> None:
        """Raise HeadwiseError for an option that --preset paper has no use for."""
        typed = (self.model_fields_set - {"limits"}) | self.limits.model_fields_set
        without = {*_NOT_PAPER, *type(self.limits).model_fields}
        for name in sorted(typed & without):
            raise HeadwiseError(
                f"--{name.replace('_', '-')} goes with one budget for the model, not with "
                "--preset paper"
            )
        if len(self.paper_tasks) > 1:
            raise HeadwiseError(
                f"--task takes one value with --preset paper, got {len(self.tasks)}"
            )

    @property
    def paper_tasks(self) -> tuple[Task, ...]:
        """The task of --preset paper."""
        if "tasks" in self.model_fields_set:
            return self.tasks
        return (PAPER_TASK,)

    @property
    def held_out_tasks(self) -> tuple[Task, ...]:
        """Tasks of held-out prompts: the calibrated ones, by default in fewer prefills."""
        if self.tasks == CALIBRATED_TASKS:
            return GATE_TASKS
        return self.tasks

    @property
    def share(self) -> float | None:
        """The budget that was asked for; None where the limits choose it."""
        if self.budget is None:
            return None
        return float(self.budget)

    @property
    def tails(self) -> tuple[int, ...]:
        """Dense tails that are compared."""
        if self.dense_tail is not None:
            return (self.dense_tail,)
        return TAILS
