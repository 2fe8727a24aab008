"""Options of headwise evaluate, and settings of a run: quality, and times.

Imports no torch, so that a wrong option is refused at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from artifacts import HeadwiseError
from artifacts.cli.arguments import (
    ArtifactFile,
    Device,
    Dtype,
    Length,
    ModelName,
    Out,
    Revision,
    Seed,
)
from artifacts.cli.options import ADVANCED, SHARE, Arg, CommandConfig
from profiling.evaluation.cache_table import CACHES
from profiling.evaluation.method_table import METHODS, default_methods
from profiling.prompts.options import LISTED, Tasks, Text, words
from profiling.prompts.prompt import DEFAULT_TASKS, KINDS, Task

DEFAULT_METHODS = default_methods(tails=True)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Name of all tasks that need no file.
ALL_TASKS = "all"
# The task that has a grid of depths.
GRID = "niah_single_2"


def _expanded(names: Any) -> Any:
    """Put all tasks that need no file in the place of ALL_TASKS."""
    if not isinstance(names, tuple):
        return names
    free = (Task(kind.name) for kind in KINDS.values() if kind.takes_file != "must")
    by_name = {ALL_TASKS: tuple(free)}
    return tuple(task for name in names for task in by_name.get(name, (name,)))


AllTasks = Annotated[Tasks, BeforeValidator(_expanded)]
"""Tasks, of which ALL_TASKS is one."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Settings of the quality part.

    Attributes:
        samples: prompts of each task and length, or contexts with all their questions, and of each
            depth where there is a grid: of each of `seeds` seeds, from `seed` on.
        share: of a prompt's keys and values that caches under policies keep.
        density: what single kinds are fitted to; the artifact's own if None.
    """

    tasks: tuple[Task, ...] = DEFAULT_TASKS
    lengths: tuple[int, ...]
    methods: tuple[str, ...]
    samples: int = 12
    depths: tuple[float, ...] = DEPTHS
    share: float = 0.2
    density: float | None = None
    seed: int = 1000
    seeds: int = 1


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Settings of the speed part: methods that are timed next to both dense attentions.

    Attributes:
        repeats: rounds, interleaved.
        steps: tokens of a round of decode.
        decode: also tokens after a prompt.
        memory: also peak memory at the longest length.
    """

    lengths: tuple[int, ...]
    methods: tuple[str, ...]
    repeats: int = 5
    steps: int = 16
    decode: bool = True
    memory: bool = True


class Config(CommandConfig):
    """One run of the command; None takes the default that depends on the rest."""

    configs: Annotated[tuple[ArtifactFile, ...], Arg("artifacts of one model, such as cfg.yaml")]
    model: ModelName
    out: Annotated[
        Out,
        Arg("folder of the report: index.html, evaluation.json, the resume file", metavar="FOLDER"),
    ]
    tasks: Annotated[
        AllTasks | None,
        Arg(
            f"what is asked, `all` for all that need no file (default "
            f"{words(DEFAULT_TASKS)}); {LISTED}; repeatable"
        ),
    ] = None
    text: Annotated[
        Text | None,
        Arg("long text: adds perplexity by position, and is the haystack of the needle"),
    ] = None
    length: Annotated[
        tuple[Annotated[Length, Field(ge=1)], ...] | None,
        Arg("prompt lengths (default: that of the artifact's search)"),
    ] = None
    methods: Annotated[
        tuple[str, ...] | None,
        Arg(
            f"`all`, or some of {' '.join(METHODS)}, NAME-tail without a dense tail, dense+CACHE "
            f"and headwise+CACHE; CACHE is one of {' '.join(CACHES)}, with fields such as "
            f"snapkv:budget=0.1 (default: {' '.join(DEFAULT_METHODS)})"
        ),
    ] = None
    samples: Annotated[
        int | None,
        Arg(
            "prompts, or contexts, of each task, length, seed and depth of the needle (default 12)"
        ),
        Field(ge=1),
    ] = None
    depths: Annotated[
        tuple[Annotated[float, Field(ge=0, le=1)], ...] | None,
        Arg("where the needle lies (default: 0 0.25 0.5 0.75 1)", group=ADVANCED),
    ] = None
    share: Annotated[float, Arg("fraction of tokens that caches keep", group=ADVANCED), SHARE] = (
        Evaluation.share
    )
    density: Annotated[
        float | None, Arg("of single kinds (default: the artifact's own)", group=ADVANCED), SHARE
    ] = None
    seed: Seed = Evaluation.seed
    seeds: Annotated[int, Arg("number of seeds, from --seed on", group=ADVANCED), Field(ge=1)] = (
        Evaluation.seeds
    )
    quick: Annotated[bool, Arg("few prompts, methods and rounds")] = False
    speed_only: Annotated[
        bool, Arg("seconds to the first token, then of attention alone, and nothing else")
    ] = False
    repeats: Annotated[
        int | None, Arg("timed rounds, interleaved (default 5)", group=ADVANCED), Field(ge=1)
    ] = None
    steps: Annotated[int, Arg("decoded tokens of a timed round", group=ADVANCED), Field(ge=1)] = (
        Speed.steps
    )
    speed: Annotated[bool, Arg("quality only")] = True
    memory: Annotated[bool, Arg("no peak memory", group=ADVANCED)] = True
    again: Annotated[
        bool,
        Arg("time anew, whatever the resume file has", group=ADVANCED, flags=("--time-again",)),
    ] = False
    attach: Annotated[bool, Arg("write the summary into the first artifact's evidence")] = False
    fresh: Annotated[bool, Arg("discard the resume file")] = False
    dtype: Dtype = "auto"
    device: Device = "auto"
    revision: Revision = None
    command: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        asked = any(each is not None for each in (self.tasks, self.text, self.samples))
        if self.speed_only and (asked or not self.speed):
            raise HeadwiseError(
                "--speed-only asks nothing: leave --task, --text, --samples and --no-speed away"
            )
        return self
