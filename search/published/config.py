"""Config of the search with a budget for each head."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from artifacts.cli.options import CommandConfig
from search.model.config import PAPER_BUDGET, PAPER_LENGTH


class HeadSearch(CommandConfig):
    """Config of the search; the defaults are the paper's.

    Attributes:
        dense_below: None is half of the length.
    """

    model: str
    out: Path
    calibration: str = "kv_retrieval"
    length: Annotated[int, Field(ge=1)] = PAPER_LENGTH
    budget: str = PAPER_BUDGET
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    backend: str = "auto"
    revision: str | None = None
    dense_below: Annotated[int | None, Field(ge=1)] = None
    dense_tail: Annotated[int, Field(ge=0)] = 0
    beyond_positions: bool = False
    fresh: bool = False
    picture: bool = True
    command: str = ""
