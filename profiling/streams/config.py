"""Options of headwise stream. Imports no torch, so that a wrong option is refused at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from artifacts import HeadwiseError
from artifacts.cli import arguments
from artifacts.cli.options import arg, at_least, check_ranges, option, shared
from artifacts.errors import shorten
from profiling.caches.parsing import CACHES, parse_cache

RECOMPUTED = "recomputed"
_POLICIES = ("full", "streaming:sinks=4,window=1020")
# Tokens of a block, which is a job of the resume file, and the most blocks of a long stream.
_BLOCK = 1024
_BLOCKS = 200


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """Options of a stream."""

    model: str = shared(arguments.add_model)
    out: Path = shared(arguments.add_out, "folder for stream.json", metavar="FOLDER")
    tokens: int = arg("--tokens", help="length of the stream", within=at_least(2))
    text: Path = arg("--text", help="text file; repeated if it is shorter than the stream")
    policies: tuple[str, ...] = arg(
        "--policy",
        action="append",
        default=(),
        help=f"KIND or KIND:FIELD=VALUE,..., repeatable: caches to compare (default "
        f"{' and '.join(_POLICIES)}); kinds: {CACHES}",
    )
    recompute: int = option(
        "window of the method that recomputes it for each token, 0 for none",
        default=1024,
        within=at_least(0),
    )
    chunk: int = option("tokens fed at a time", default=256, within=at_least(1), advanced=True)
    block: int | None = option(
        "tokens of a mean and of a job in the resume file (default 1024 or more)",
        default=None,
        within=at_least(1),
        advanced=True,
    )
    stride: int = option(
        "recompute at one token in so many", default=16, within=at_least(1), advanced=True
    )
    dtype: str = shared(arguments.add_dtype, default="auto")
    device: str = shared(arguments.add_device, default="auto")
    revision: str | None = shared(arguments.add_revision, default=None)
    fresh: bool = shared(arguments.add_fresh, default=False)
    command: str = ""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.text.is_file():
            raise HeadwiseError(f"there is no text file {shorten(str(self.text), 200)}")
        for text in self.policies:
            parse_cache(text)
            if self.policies.count(text) > 1:
                raise HeadwiseError(f"--policy {text} is given twice")

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of all methods: policies as typed, then the recomputed window."""
        return (self.policies or _POLICIES) + (RECOMPUTED,) * (self.recompute > 0)

    @property
    def block_size(self) -> int:
        """Tokens of a block: whole chunks."""
        size = self.block or max(_BLOCK, -(-self.tokens // _BLOCKS))
        return -(-size // self.chunk) * self.chunk
