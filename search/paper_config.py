"""Config of the search with a budget for each head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from artifacts.cli.options import at_least, check_ranges, option

PAPER_LENGTH = 30_000
PAPER_BUDGET = "a_shape:1024,4096"


@dataclass(frozen=True, kw_only=True)
class PaperSearch:
    """Config of the search; the defaults are the paper's.

    Attributes:
        preset: the option by which a command asks for this search.
        dense_below: None is half of the length.
    """

    preset: str | None = option(
        "paper: MInference's own search, of one prompt of one --task and --length (default "
        f"{PAPER_LENGTH}), with a --budget for each head, a share or a_shape:SINK,WINDOW (default "
        f"{PAPER_BUDGET})",
        default=None,
        choices=("paper",),
        advanced=True,
    )
    model: str
    out: Path
    calibration: str = "kv_retrieval"
    length: int = option(default=PAPER_LENGTH, within=at_least(1))
    budget: str = PAPER_BUDGET
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    backend: str = "auto"
    revision: str | None = None
    dense_below: int | None = option(default=None, within=at_least(1))
    dense_tail: int = option(default=0, within=at_least(0))
    beyond_positions: bool = False
    fresh: bool = False
    picture: bool = True
    command: str = ""

    def __post_init__(self) -> None:
        check_ranges(self)
