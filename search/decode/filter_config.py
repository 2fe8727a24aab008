"""What a search for filter layers is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from artifacts import HeadwiseError
from artifacts.cli import arguments
from artifacts.cli.options import POSITIVE, at_least, check_ranges, option, shared
from profiling.similarities.config import SimilarityConfig
from search.decode.filter_layers import Rules


def _budget(text: str) -> int | float:
    try:
        budget = float(text) if "." in text else int(text)
    except ValueError:
        budget = 0
    if budget <= 0 or (isinstance(budget, float) and budget >= 1):
        raise HeadwiseError(
            f"--budget must be a number of tokens or a share between 0 and 1, got {text!r}"
        )
    return budget


@dataclass(frozen=True, kw_only=True)
class FilterSearch:
    """What to choose by. `profile` is measured if None; worst: how much the worst steps count, of 1
    in all."""

    measured: SimilarityConfig
    rules: Rules
    model: str = shared(arguments.add_model)
    config: Path = shared(
        arguments.add_artifact, "artifact to start from, as headwise search writes it"
    )
    out: Path = shared(arguments.add_out, "artifact to write; may be the same file")
    profile: Path | None = option(
        "folder of headwise similarity, instead of measuring", default=None, advanced=True
    )
    worst: float = option(
        "weight of the worst steps",
        default=0.25,
        within=(lambda value: 0 <= value <= 1, "from 0 to 1"),
        advanced=True,
    )
    budget: int | float = option(
        "tokens of a sparse layer, or a share such as 0.125", default=2048, read=_budget
    )
    selector: str = option(
        choices=("last", "uniform", "exponential"), default="last", advanced=True
    )
    window: int = option("queries of the selector", default=16, within=at_least(1), advanced=True)
    prefill_ratio: float | None = option(
        "in chunked prefill, tokens of the past for each of the chunk",
        default=None,
        within=POSITIVE,
        advanced=True,
    )
    fresh: bool = shared(arguments.add_fresh, default=False)

    def __post_init__(self) -> None:
        check_ranges(self)
