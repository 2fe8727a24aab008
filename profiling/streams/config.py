"""Options of headwise stream. Imports no torch, so that a wrong option is refused at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from artifacts import HeadwiseError
from artifacts.cli.arguments import Device, Dtype, Fresh, ModelName, Out, Revision
from artifacts.cli.options import ADVANCED, Arg, CommandConfig
from artifacts.errors import shorten
from profiling.caches.parsing import CACHES, parse_cache

RECOMPUTED = "recomputed"
_POLICIES = ("full", "streaming:sinks=4,window=1020")
# Tokens of a block, which is a job of the resume file, and the most blocks of a long stream.
_BLOCK = 1024
_BLOCKS = 200


class StreamConfig(CommandConfig):
    """Options of a stream."""

    model: ModelName
    out: Annotated[Out, Arg("folder for stream.json", metavar="FOLDER")]
    tokens: Annotated[int, Arg("length of the stream"), Field(ge=2)]
    text: Annotated[Path, Arg("text file; repeated if it is shorter than the stream")]
    policies: Annotated[
        tuple[str, ...],
        Arg(
            f"KIND or KIND:FIELD=VALUE,..., repeatable: caches to compare (default "
            f"{' and '.join(_POLICIES)}); kinds: {CACHES}",
            repeat=True,
            flags=("--policy",),
        ),
    ] = ()
    recompute: Annotated[
        int, Arg("window of the method that recomputes it for each token, 0 for none"), Field(ge=0)
    ] = 1024
    chunk: Annotated[int, Arg("tokens fed at a time", group=ADVANCED), Field(ge=1)] = 256
    block: Annotated[
        int | None,
        Arg(
            "tokens of a mean and of a job in the resume file (default 1024 or more)",
            group=ADVANCED,
        ),
        Field(ge=1),
    ] = None
    stride: Annotated[
        int, Arg("recompute at one token in so many", group=ADVANCED), Field(ge=1)
    ] = 16
    dtype: Dtype = "auto"
    device: Device = "auto"
    revision: Revision = None
    fresh: Fresh = False
    command: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not os.path.isfile(self.text):
            raise HeadwiseError(f"there is no text file {shorten(str(self.text), 200)}")
        for text in self.policies:
            parse_cache(text)
            if self.policies.count(text) > 1:
                raise HeadwiseError(f"--policy {text} is given twice")
        return self

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of all methods: policies as typed, then the recomputed window."""
        return (self.policies or _POLICIES) + (RECOMPUTED,) * (self.recompute > 0)

    @property
    def block_size(self) -> int:
        """Tokens of a block: whole chunks."""
        size = self.block or max(_BLOCK, -(-self.tokens // _BLOCKS))
        return -(-size // self.chunk) * self.chunk
