"""Options of headwise decode. Imports no torch, so that a wrong option is refused at once."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from artifacts import HeadwiseError
from artifacts.cli.arguments import TASKS, ArtifactFile, Device, Dtype, ModelName, Seed, Task
from artifacts.cli.options import ADVANCED, Arg, CommandConfig
from profiling.caches.parsing import CACHES, parse_cache
from profiling.prompts.prompt import parse_task
from runtime.memory import OFFLOADS


class Comparison(CommandConfig):
    """Options of one comparison; 0 leaves a measurement out."""

    model: ModelName
    artifact: Annotated[
        ArtifactFile | None, Arg("artifact with a decode section; none: --policy alone")
    ] = None
    policies: Annotated[
        tuple[str, ...],
        Arg(
            f"KIND or KIND:FIELD=VALUE,..., repeatable: caches to compare; kinds: {CACHES}",
            repeat=True,
            flags=("--policy",),
        ),
    ] = ()
    context: Annotated[int, Arg("tokens in the cache when decode is timed"), Field(ge=1)] = 8192
    steps: Annotated[int, Arg("tokens of a timed round", group=ADVANCED), Field(ge=1)] = 16
    repeats: Annotated[
        int, Arg("timed rounds, interleaved, 0 for none", group=ADVANCED), Field(ge=0)
    ] = 5
    text: Annotated[str | None, Arg("long text for perplexity; without it there is none")] = None
    texts: Annotated[int, Arg("windows of it", group=ADVANCED), Field(ge=1)] = 1
    text_length: Annotated[int, Arg("tokens of the text's window", group=ADVANCED), Field(ge=1)] = (
        4096
    )
    forced: Annotated[
        int, Arg("of these, decoded one by one at the end", group=ADVANCED), Field(ge=1)
    ] = 512
    task: Annotated[Task, Arg(f"what is answered (default passkey); {TASKS}")] = "passkey"
    task_length: Annotated[int, Arg("tokens of its prompts", group=ADVANCED), Field(ge=1)] = 4096
    trials: Annotated[int, Arg("seeded prompts of the task, 0 for none"), Field(ge=0)] = 20
    dense_prefill: Annotated[
        bool,
        Arg(
            "prefill the texts densely for the artifact: what decode alone loses (not policies)",
            group=ADVANCED,
        ),
    ] = False
    prefill_chunk: Annotated[
        int | None,
        Arg("prefill them so many tokens at a time (default: at once)", group=ADVANCED),
        Field(ge=1),
    ] = None
    offload: Annotated[
        tuple[str, ...], Arg("caches to compare (default auto)", choices=OFFLOADS)
    ] = ("auto",)
    seed: Seed = 1000
    dtype: Dtype = "auto"
    device: Device = "auto"
    command: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.artifact is None and not self.policies:
            raise HeadwiseError("name an artifact with a decode section, or caches with --policy")
        if self.dense_prefill and self.offload != ("auto",):
            raise HeadwiseError("--dense-prefill makes a cache of its own: leave --offload away")
        parse_task(self.task)
        if self.text is not None:
            parse_task(f"text:{self.text}")
        for text in self.policies:
            parse_cache(text)
            if self.policies.count(text) > 1:
                raise HeadwiseError(f"--policy {text} is given twice")
        if self.forced >= self.text_length:
            raise HeadwiseError(
                f"--forced must be below --text-length ({self.text_length}), got {self.forced}: "
                "the tokens before are prefilled"
            )
        return self
