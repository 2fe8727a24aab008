"""A Config's fields are the command's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from artifacts import HeadwiseError
from artifacts.cli import arguments
from artifacts.cli.command import ArgumentParser
from artifacts.cli.options import (
    BETWEEN_0_AND_1,
    add_arguments,
    arg,
    at_least,
    check_ranges,
    config_of,
    option,
    shared,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    file: Path = arg(metavar="FILE")
    share: float | None = arg(
        "--target-share", default=None, either="total", within=BETWEEN_0_AND_1
    )
    layers: tuple[int, ...] | None = arg(
        "--by-hand",
        default=None,
        either="total",
        read=lambda text: tuple(map(int, text.split(","))),
    )
    at_most: int = option("so many", default=3, within=at_least(1))
    tasks: tuple[str, ...] = shared(arguments.add_task, "what is asked", default=("prose",))
    picture: bool = shared(arguments.add_picture, default=True)
    command: str = ""

    def __post_init__(self) -> None:
        check_ranges(self)


def parsed(*words: str) -> Config:
    p = ArgumentParser()
    add_arguments(p, Config)
    return config_of(Config, vars(p.parse_args(words)), command="typed")


def test_what_is_typed_has_the_fields_types_and_the_rest_its_defaults() -> None:
    found = parsed("a.yaml", "--target-share", "0.5")
    assert found == Config(file=Path("a.yaml"), share=0.5, command="typed")
    words = "a.yaml --by-hand 1,2 --at-most 4 --task passkey --task chain --no-picture"
    found = parsed(*words.split())
    assert (found.layers, found.at_most) == ((1, 2), 4)
    assert (found.tasks, found.picture) == (("passkey", "chain"), False)


def test_the_help_says_a_numbers_default() -> None:
    p = ArgumentParser()
    add_arguments(p, Config)
    assert "--at-most N" in p.format_help() and "so many (default 3)" in p.format_help()


def test_a_parser_can_have_some_of_the_fields_only(capsys: pytest.CaptureFixture[str]) -> None:
    p = ArgumentParser()
    add_arguments(p, Config, ("at_most", "tasks"))
    found = vars(p.parse_args(["--at-most", "4"]))
    assert found == {"at_most": 4, "tasks": None}
    with pytest.raises(SystemExit):
        p.parse_args(["--no-picture"])
    assert "--no-picture" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--target-share", "1"), "--target-share must be between 0 and 1, got 1.0"),
        (("--target-share", "nan"), "--target-share must be between 0 and 1, got nan"),
        (("--target-share", "0.5", "--at-most", "0"), "--at-most must be at least 1, got 0"),
    ],
)
def test_a_value_out_of_its_range_is_named_as_it_was_typed(
    words: tuple[str, ...], says: str
) -> None:
    with pytest.raises(HeadwiseError, match=says):
        parsed("a.yaml", *words)


@pytest.mark.parametrize(
    "words", [(), ("--target-share", "0.5", "--by-hand", "1"), ("--target-share", "much")]
)
def test_one_of_a_set_has_to_be_given(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed("a.yaml", *words)
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1
