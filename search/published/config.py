"""What a search with a budget for each head is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from artifacts import HeadwiseError

# What a_shape:1024,4096 computes at 30,000 tokens, the paper's budget, is 0.31 of dense attention.
DEFAULT_BUDGET = "0.3"
# As many queries as vertical-slash looks at, one row of tiles.
DENSE_TAIL = 64


@dataclass(frozen=True, kw_only=True)
class HeadSearch:
    """What a search is asked to do; None takes the default that depends on the model or the preset."""

    model: str
    out: Path
    calibration: str | None = None
    length: int | None = None
    samples: int = 1
    budget: str | None = None
    preset: Literal["paper", "scaled"] = "scaled"
    seed: int = 0
    dtype: str = "bfloat16"
    device: str = "cpu"
    backend: str = "auto"
    revision: str | None = None
    dense_below: int | None = None
    dense_tail: int | None = None
    beyond_positions: bool = False
    fresh: bool = False
    picture: bool = True
    command: str = ""

    def __post_init__(self) -> None:
        for name in ("length", "samples", "dense_below"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise HeadwiseError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.dense_tail is not None and self.dense_tail < 0:
            raise HeadwiseError(f"--dense-tail must be at least 0, got {self.dense_tail}")

    @property
    def tail(self) -> int:
        """Last queries that see every key: none in the paper's search, else enough for a question to find answers."""
        if self.dense_tail is not None:
            return self.dense_tail
        return 0 if self.preset == "paper" else DENSE_TAIL
