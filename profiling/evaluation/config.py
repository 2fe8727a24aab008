"""Options of headwise evaluate, and settings of a run: quality, and times.

Imports no torch, so that a wrong option is refused at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from artifacts import HeadwiseError
from artifacts.cli import arguments
from artifacts.cli.options import (
    SHARE,
    Range,
    arg,
    at_least,
    check_ranges,
    option,
    shared,
)
from profiling.evaluation.method_table import CACHES, METHODS, default_methods
from profiling.prompts.prompt import DEFAULT_TASKS, parse_task

DEFAULT_METHODS = default_methods(tails=True)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Name of all tasks that need no file.
ALL_TASKS = "all"
# The task that has a grid of depths.
GRID = "niah_single_2"
_LENGTHS: Range = (lambda lengths: min(lengths) >= 1, "at least 1")
_DEPTHS: Range = (lambda depths: all(0 <= depth <= 1 for depth in depths), "from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Settings of the quality part.

    Attributes:
        samples: prompts of each task and length, or contexts with all their questions, and of each
            depth where there is a grid: of each of `seeds` seeds, from `seed` on.
        share: of a prompt's keys and values that caches under policies keep.
        density: what single kinds are fitted to; the artifact's own if None.
    """

    tasks: tuple[str, ...] = DEFAULT_TASKS
    lengths: tuple[int, ...]
    methods: tuple[str, ...]
    samples: int = 12
    depths: tuple[float, ...] = DEPTHS
    share: float = 0.2
    density: float | None = None
    seed: int = 1000
    seeds: int = 1

    def __post_init__(self) -> None:
        for task in self.tasks:
            parse_task(task)


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


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run of the command; None takes the default that depends on the rest."""

    configs: tuple[Path, ...] = shared(
        arguments.add_artifact,
        "artifacts of one model, such as cfg.yaml",
        dest="configs",
        nargs="+",
    )
    model: str = shared(arguments.add_model)
    out: Path = shared(
        arguments.add_out,
        "folder of the report: index.html, evaluation.json, the resume file",
        metavar="FOLDER",
    )
    tasks: tuple[str, ...] | None = shared(
        arguments.add_task,
        f"what is asked, `all` for all that need no file (default {' '.join(DEFAULT_TASKS)})",
        default=None,
    )
    text: str | None = option(
        "long text: adds perplexity by position, and is the haystack of the needle", default=None
    )
    length: tuple[int, ...] | None = shared(
        arguments.add_length,
        "prompt lengths (default: the model's positions)",
        several=True,
        default=None,
        within=_LENGTHS,
    )
    methods: tuple[str, ...] | None = option(
        f"`all`, or some of {' '.join(METHODS)}, NAME-tail without a dense tail, dense+CACHE and "
        f"headwise+CACHE, with {' '.join(CACHES)} omnikv own (default: "
        f"{' '.join(DEFAULT_METHODS)})",
        default=None,
        nargs="+",
    )
    samples: int | None = option(
        "prompts, or contexts, of each task, length, seed and depth of the needle (default 12)",
        default=None,
        within=at_least(1),
    )
    depths: tuple[float, ...] | None = option(
        "where the needle lies (default: 0 0.25 0.5 0.75 1)",
        default=None,
        nargs="+",
        type=float,
        within=_DEPTHS,
        advanced=True,
    )
    share: float = option(
        "fraction of tokens that caches keep", default=Evaluation.share, within=SHARE, advanced=True
    )
    density: float | None = option(
        "of single kinds (default: the artifact's own)",
        default=None,
        within=SHARE,
        advanced=True,
    )
    seed: int = shared(arguments.add_seed, default=Evaluation.seed)
    seeds: int = option(
        "number of seeds, from --seed on",
        default=Evaluation.seeds,
        within=at_least(1),
        advanced=True,
    )
    quick: bool = option("few prompts, methods and rounds", default=False, action="store_true")
    speed_only: bool = option(
        "seconds to the first token, then of attention alone, and nothing else",
        default=False,
        action="store_true",
    )
    repeats: int | None = option(
        "timed rounds, interleaved (default 5)", default=None, within=at_least(1), advanced=True
    )
    steps: int = option(
        "decoded tokens of a timed round", default=Speed.steps, within=at_least(1), advanced=True
    )
    speed: bool = arg("--no-speed", default=True, action="store_false", help="quality only")
    memory: bool = arg(
        "--no-memory", default=True, action="store_false", help="no peak memory", advanced=True
    )
    again: bool = arg(
        "--time-again",
        default=False,
        action="store_true",
        help="time anew, whatever the resume file has",
        advanced=True,
    )
    attach: bool = option(
        "write the summary into the first artifact's evidence", default=False, action="store_true"
    )
    fresh: bool = option("discard the resume file", default=False, action="store_true")
    dtype: str = shared(arguments.add_dtype, default="auto")
    device: str = shared(arguments.add_device, default="auto")
    revision: str | None = shared(arguments.add_revision, default=None)
    command: str = ""

    def __post_init__(self) -> None:
        check_ranges(self)
        for task in self.tasks or ():
            if task != ALL_TASKS:
                parse_task(task)
        asked = any(each is not None for each in (self.tasks, self.text, self.samples))
        if self.speed_only and (asked or not self.speed):
            raise HeadwiseError(
                "--speed-only asks nothing: leave --task, --text, --samples and --no-speed away"
            )
