"""What a search with one budget for the model is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from artifacts import HeadwiseError
from profiling.prompts.prompt import CALIBRATED_TASKS, GATE_TASKS
from search.model.costs import Unit
from search.model.limits import Limits

DEFAULT_BUDGET = 0.25
DEFAULT_TRIALS = 1
# Trials that are known in closed form, before any is drawn.
CLOSED = 2
# Dense tails that are compared where none is asked for, in tokens. Not 0: default tasks ask elsewhere than at the end
# of a prompt, so that they see no worth in a tail, and users' prompts end with a question more often than not.
TAILS = (64, 256)
# In prompts shorter than this, of which a tail is a sixteenth and more, 0 is compared, too.
SHORT = 2048


@dataclass(frozen=True, kw_only=True)
class ModelSearch:
    """What a search with one budget for the model is asked to do; None takes the default that depends on the model.

    budget: cost of all heads' attention, as a share of what computing everything by the same kernels costs; None: a
        quarter, or more where not even the cheapest candidates keep to that.
    lengths: prompts are made at each; the patterns are for the longest, the others show how sizes go with the length.
    samples: prompts of each task and length. dense_tail: None lets the search choose among TAILS. trials: in all.
    storage: of Optuna's study, any URL that it takes; None keeps it in memory.
    max_memory: bytes of weights that stay on the device, None all; the other layers come in one at a time.
    """

    model: str
    out: Path
    tasks: tuple[str, ...] = CALIBRATED_TASKS
    lengths: tuple[int, ...] | None = None
    samples: int = 1
    budget: float | None = None
    cost: Unit = "seconds"
    n_trials: int = DEFAULT_TRIALS
    storage: str | None = None
    limits: Limits = field(default_factory=Limits)
    seed: int = 0
    dtype: str = "bfloat16"
    device: str = "cpu"
    backend: str = "auto"
    revision: str | None = None
    max_memory: int | None = None
    dense_below: int | None = None
    dense_tail: int | None = None
    beyond_positions: bool = False
    fresh: bool = False
    picture: bool = True
    command: str = ""

    def __post_init__(self) -> None:
        for name in ("samples", "n_trials", "dense_below"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise HeadwiseError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        for name in ("seed", "dense_tail"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise HeadwiseError(f"--{name.replace('_', '-')} must be at least 0, got {value}")
        if self.lengths is not None and min(self.lengths) < 128:
            raise HeadwiseError(f"--length must be at least 128, got {min(self.lengths)}")
        if not 0 < self.share <= 1:
            raise HeadwiseError(f"--budget must be above 0 and at most 1 (all of attention), got {self.share:g}")
        if self.storage is not None and self.n_trials < CLOSED + 1:
            raise HeadwiseError(
                "--storage keeps the study of Optuna's draws, which begin at "
                f"--n-trials {CLOSED + 1}; got {self.n_trials}"
            )

    @property
    def held_out_tasks(self) -> tuple[str, ...]:
        """The tasks of held-out prompts: those that are calibrated on, by default in fewer prefills."""
        return GATE_TASKS if self.tasks == CALIBRATED_TASKS else self.tasks

    @property
    def measures_costs(self) -> bool:
        """Whether this machine is timed; with FLOPs nothing is, and all ranks find the same."""
        return self.cost == "seconds"

    @property
    def share(self) -> float:
        """The budget that was asked for, or the default."""
        return DEFAULT_BUDGET if self.budget is None else self.budget

    def tails(self, length: int) -> tuple[int, ...]:
        """Dense tails that are compared for patterns of prompts of this length."""
        if self.dense_tail is not None:
            return (self.dense_tail,)
        return TAILS if length >= SHORT else (0, *TAILS)
