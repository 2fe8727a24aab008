"""Options of headwise similarity. Imports no torch, so that a wrong option is refused at once."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from artifacts import HeadwiseError
from artifacts.cli.arguments import (
    Device,
    Dtype,
    Length,
    ModelName,
    Revision,
    Seed,
)
from artifacts.cli.options import ADVANCED, Arg, CommandConfig
from profiling.prompts.options import LISTED, Tasks, words
from profiling.prompts.prompt import TASKS as KNOWN_TASKS
from profiling.prompts.prompt import parse_task
from profiling.similarities.similarity_profile import file_name

DEFAULT_TASKS = tuple(map(parse_task, ("multi_hop", "two_stage_retrieval", "kv_retrieval")))
DEFAULT_LENGTH = 4096
# OmniKV's own budget.
DEFAULT_TOP_K = 2048
# The prompt's last queries, by which an eviction method selects tokens: as many as the selector of
# OmniKV reads.
TAIL = 16
# Tokens of the shortest prompt.
SHORTEST = 4 * TAIL


class Decoded(CommandConfig):
    """Prompts that are decoded to measure the similarity of layers; None takes the default."""

    model: ModelName
    tasks: Annotated[
        Tasks, Arg(f"prompts to decode (default {words(DEFAULT_TASKS)}); {LISTED}; repeatable")
    ] = DEFAULT_TASKS
    length: Annotated[
        Length | None, Arg(f"tokens of a prompt (default {DEFAULT_LENGTH})"), Field(ge=SHORTEST)
    ] = None
    samples: Annotated[int, Arg("prompts of each task"), Field(ge=1)] = 2
    steps: Annotated[int, Arg("decode steps of each prompt"), Field(ge=1)] = 32
    seed: Seed = 0
    dtype: Dtype = "auto"
    device: Device = "auto"
    command: str = ""

    @model_validator(mode="after")
    def _check_tasks(self) -> Self:
        if not self.tasks:
            raise HeadwiseError(f"no task given; known: {KNOWN_TASKS}")
        names = [file_name(task.name) for task in self.tasks]
        for name in names:
            if names.count(name) > 1:
                raise HeadwiseError(f"two tasks are called {name!r}: give each a name of its own")
        return self


class SimilarityConfig(Decoded):
    """Options of a measurement; None takes the default of the model or the length."""

    top_k: Annotated[
        int | None,
        Arg(
            f"tokens that a layer chooses (default {DEFAULT_TOP_K}, at most an eighth of the "
            "prompt)",
            group=ADVANCED,
        ),
        Field(ge=1),
    ] = None
    greedy: Annotated[
        bool,
        Arg(
            "follow the model's own tokens from the first, not the expected answer or the text "
            "as far as known",
            group=ADVANCED,
        ),
    ] = False
    revision: Revision = None
    beyond_positions: Annotated[
        bool, Arg("allow a --length over the model's positions", group=ADVANCED)
    ] = False

    @model_validator(mode="after")
    def _check_top_k(self) -> Self:
        length = self.length or DEFAULT_LENGTH
        if self.top_k is not None and self.top_k >= length:
            raise HeadwiseError(
                f"--top-k {self.top_k} chooses every token of {length}: give fewer than --length"
            )
        return self
