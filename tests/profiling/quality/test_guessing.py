"""What a forced choice compares."""

from __future__ import annotations

from profiling.prompts.prompt import Prompt
from profiling.quality.guessing import compared


def test_a_forced_choice_compares_eight_at_most() -> None:
    many = Prompt((1,), "last", choices=(*"abcdefghij", "last"))
    assert compared(many) == (*"abcdefg", "last")
