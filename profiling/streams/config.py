"""Options of headwise stream, and its methods.

Imports no torch, so that a wrong option is refused at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from artifacts import HeadwiseError, Streaming
from artifacts.cli import arguments
from artifacts.cli.options import arg, at_least, check_ranges, option, shared
from artifacts.errors import shorten

METHODS = ("streaming", "window-only", "recomputed", "dense", "original")
TASKS = ("text", "stream_eval")
# Tokens of a block, which is a unit of the ledger, and the most blocks of a long stream.
_BLOCK = 1024
_BLOCKS = 200


@dataclass(frozen=True, kw_only=True)
class StreamMethod:
    """A name of METHODS, or streaming:S with S sinks.

    Attributes:
        whole: tokens that it holds, None for all.
    """

    name: str
    policy: Streaming | None
    whole: int | None

    @property
    def recomputed(self) -> bool:
        """True if every token takes a forward over the tokens before it."""
        return self.policy is None and self.whole is not None


def method_of(name: str, *, sinks: int, window: int) -> StreamMethod:
    """A method by its name; all but dense hold sinks + window tokens.

    Raises:
        HeadwiseError: there is none of that name, or its sinks leave no window.
    """
    whole = sinks + window
    kind, colon, count = name.partition(":")
    if name == "dense":
        return StreamMethod(name=name, policy=None, whole=None)
    if name == "recomputed":
        return StreamMethod(name=name, policy=None, whole=whole)
    if name == "window-only":
        return StreamMethod(name=name, policy=Streaming(sinks=0, window=whole), whole=whole)
    if name == "original":
        return StreamMethod(
            name=name,
            policy=Streaming(sinks=sinks, window=window, positions="original"),
            whole=whole,
        )
    if kind != "streaming" or (colon and not count.isdecimal()):
        raise HeadwiseError(
            f"unknown method {shorten(name)}; known: {', '.join(METHODS)}, streaming:SINKS"
        )
    if colon:
        sinks = int(count)
        if sinks >= whole:
            raise HeadwiseError(
                f"{name} leaves no window: sinks and window are {whole} tokens together"
            )
    return StreamMethod(name=name, policy=Streaming(sinks=sinks, window=whole - sinks), whole=whole)


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """Options of a stream.

    Attributes:
        timed: tokens of each round that are timed one by one, 0 for none.
    """

    model: str = shared(arguments.add_model)
    out: Path = shared(
        arguments.add_out, "folder for stream.json, .csv, .png and .svg", metavar="FOLDER"
    )
    tokens: int = arg("--tokens", help="length of the stream", within=at_least(2))
    text: Path | None = option(
        "text file; begun again where it is shorter than the stream", default=None
    )
    task: str = shared(
        arguments.add_task,
        f"one of {', '.join(TASKS)} (default text)",
        several=False,
        default="text",
    )
    sinks: int = option("first tokens that are kept", default=4, within=at_least(0))
    window: int = option("last tokens that are kept", default=1020, within=at_least(1))
    methods: tuple[str, ...] = arg(
        "--methods",
        nargs="+",
        default=METHODS,
        help=f"any of {', '.join(METHODS)}, streaming:SINKS",
    )
    chunk: int = option("tokens fed at a time", default=256, within=at_least(1), advanced=True)
    block: int | None = option(
        "tokens of a mean and of a job in the resume file (default 1024 or more)",
        default=None,
        within=at_least(1),
        advanced=True,
    )
    stride: int = option(
        "recomputed at every so many tokens", default=16, within=at_least(1), advanced=True
    )
    timed: int = option(
        "tokens of a round timed one by one", default=0, within=at_least(0), advanced=True
    )
    seed: int = shared(arguments.add_seed, help="of stream_eval", default=0)
    dtype: str = shared(arguments.add_dtype, default="auto")
    device: str = shared(arguments.add_device, default="auto")
    revision: str | None = shared(arguments.add_revision, default=None)
    fresh: bool = shared(arguments.add_fresh, default=False)
    command: str = ""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.timed and self.tokens < self.sinks + self.window:
            raise HeadwiseError(
                f"--timed needs a full cache: give at least {self.sinks + self.window} --tokens, "
                f"got {self.tokens}"
            )
        if self.task not in TASKS:
            raise HeadwiseError(f"unknown task {shorten(self.task)}; known: {', '.join(TASKS)}")
        if (self.task == "text") != (self.text is not None):
            raise HeadwiseError("the task 'text' needs --text FILE, and stream_eval takes none")
        if self.text is not None and not self.text.is_file():
            raise HeadwiseError(f"there is no text file {shorten(str(self.text), 200)}")
        if not self.methods:
            raise HeadwiseError(f"no method given; known: {', '.join(METHODS)}, streaming:SINKS")
        for name in self.methods:
            if self.methods.count(name) > 1:
                raise HeadwiseError(f"the method {name!r} is given twice")
            method_of(name, sinks=self.sinks, window=self.window)

    @property
    def size(self) -> int:
        """Tokens of a block: whole chunks."""
        size = self.block or max(_BLOCK, -(-self.tokens // _BLOCKS))
        return -(-size // self.chunk) * self.chunk

    @property
    def all_methods(self) -> list[StreamMethod]:
        return [method_of(name, sinks=self.sinks, window=self.window) for name in self.methods]
