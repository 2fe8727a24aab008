"""Options of headwise similarity. Imports no torch, so that a wrong option is refused at once."""

from __future__ import annotations

from dataclasses import dataclass

from artifacts import HeadwiseError
from artifacts.cli import arguments
from artifacts.cli.options import at_least, check_ranges, option, shared
from profiling.prompts.prompt import TASKS, parse_task
from profiling.similarities.similarity_profile import file_name

DEFAULT_TASKS = ("multi_hop", "two_stage_retrieval", "kv_retrieval")
DEFAULT_LENGTH = 4096
# OmniKV's own budget.
DEFAULT_TOP_K = 2048
# The prompt's last queries, by which an eviction method selects tokens: as many as the selector of
# OmniKV reads.
TAIL = 16


@dataclass(frozen=True, kw_only=True)
class SimilarityConfig:
    """Options of a measurement; None takes the default of the model or the length."""

    model: str = shared(arguments.add_model)
    tasks: tuple[str, ...] = shared(
        arguments.add_task,
        f"prompts to decode (default {' '.join(DEFAULT_TASKS)})",
        default=DEFAULT_TASKS,
    )
    length: int | None = shared(
        arguments.add_length,
        f"tokens of a prompt (default {DEFAULT_LENGTH})",
        default=None,
        within=at_least(4 * TAIL),
    )
    samples: int = option("prompts of each task", default=2, within=at_least(1))
    steps: int = option("decode steps of each prompt", default=32, within=at_least(1))
    top_k: int | None = option(
        f"tokens that a layer chooses (default {DEFAULT_TOP_K}, at most an eighth of the prompt)",
        default=None,
        within=at_least(1),
        advanced=True,
    )
    seed: int = shared(arguments.add_seed, default=0)
    greedy: bool = option(
        "follow the model's own tokens from the first, not the expected answer or the text as far "
        "as known",
        default=False,
        action="store_true",
        advanced=True,
    )
    dtype: str = shared(arguments.add_dtype, default="auto")
    device: str = shared(arguments.add_device, default="auto")
    revision: str | None = shared(arguments.add_revision, default=None)
    beyond_positions: bool = option(
        "allow a --length over the model's positions",
        default=False,
        action="store_true",
        advanced=True,
    )
    command: str = ""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.tasks:
            raise HeadwiseError(f"no task given; known: {TASKS}")
        names = [file_name(parse_task(task).name) for task in self.tasks]
        for name in names:
            if names.count(name) > 1:
                raise HeadwiseError(f"two tasks are called {name!r}: give each a name of its own")
