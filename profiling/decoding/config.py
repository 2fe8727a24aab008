"""Options of headwise decode. Imports no torch, so that a wrong option is refused at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from artifacts import HeadwiseError
from artifacts.cli import arguments
from artifacts.cli.options import arg, at_least, check_ranges, option, shared
from profiling.caches.parsing import CACHES, parse_cache
from runtime.memory import OFFLOADS


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Options of one comparison; 0 leaves a measurement out."""

    model: str = shared(arguments.add_model)
    config: Path | None = shared(
        arguments.add_artifact,
        "artifact with a decode section; none: --policy alone",
        nargs="?",
        default=None,
    )
    policies: tuple[str, ...] = arg(
        "--policy",
        action="append",
        default=(),
        help=f"KIND or KIND:FIELD=VALUE,..., repeatable: caches to compare; kinds: {CACHES}",
    )
    context: int = option(
        "tokens in the cache when decode is timed", default=8192, within=at_least(1)
    )
    steps: int = option("tokens of a timed round", default=16, within=at_least(1), advanced=True)
    repeats: int = option(
        "timed rounds, interleaved, 0 for none", default=5, within=at_least(0), advanced=True
    )
    text: str | None = option("long text for perplexity; without it there is none", default=None)
    texts: int = option("windows of it", default=1, within=at_least(1), advanced=True)
    text_length: int = option(
        "tokens of the text's window", default=4096, within=at_least(1), advanced=True
    )
    forced: int = option(
        "of these, decoded one by one at the end", default=512, within=at_least(1), advanced=True
    )
    task: str = shared(
        arguments.add_task,
        f"what is answered (default passkey); {arguments.TASKS}",
        several=False,
        default="passkey",
    )
    task_length: int = option(
        "tokens of its prompts", default=4096, within=at_least(1), advanced=True
    )
    trials: int = option("seeded prompts of the task, 0 for none", default=20, within=at_least(0))
    dense_prefill: bool = option(
        "prefill the texts densely for the artifact: what decode alone loses (not policies)",
        default=False,
        action="store_true",
        advanced=True,
    )
    prefill_chunk: int | None = option(
        "prefill them so many tokens at a time (default: at once)",
        default=None,
        within=at_least(1),
        advanced=True,
    )
    offload: tuple[str, ...] = arg(
        "--offload",
        nargs="+",
        choices=OFFLOADS,
        default=("auto",),
        help="caches to compare (default auto)",
    )
    seed: int = shared(arguments.add_seed, default=1000)
    dtype: str = shared(arguments.add_dtype, default="auto")
    device: str = shared(arguments.add_device, default="auto")

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.config is None and not self.policies:
            raise HeadwiseError("name an artifact with a decode section, or caches with --policy")
        if self.dense_prefill and self.offload != ("auto",):
            raise HeadwiseError("--dense-prefill makes a cache of its own: leave --offload away")
        for text in self.policies:
            parse_cache(text)
        if self.forced >= self.text_length:
            raise HeadwiseError(
                f"--forced must be below --text-length ({self.text_length}), got {self.forced}: "
                "the tokens before are prefilled"
            )
