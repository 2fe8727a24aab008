"""Tokenizers and texts that prompts are made of."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from profiling.prompts.words import sentences
from tests.profiling.tokenizers import MAKERS


@pytest.fixture(scope="session", params=["bytes", "metaspace"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return MAKERS[request.param]()


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of some 60,000 characters in which no sentence comes twice."""
    path = tmp_path_factory.mktemp("texts") / "story.txt"
    source = sentences(random.Random(0))
    path.write_text("".join(f"{i}. {next(source)}" for i in range(900)), encoding="utf-8")
    return path
