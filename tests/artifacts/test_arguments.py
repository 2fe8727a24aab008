"""The arguments that commands share, and a Config's fields, which are the command's options."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pytest
from pydantic import BeforeValidator, Field, model_validator

from artifacts import HeadwiseError
from artifacts.cli import arguments, command
from artifacts.cli.arguments import ArtifactFile, Dtype, Json, Length, Picture
from artifacts.cli.options import (
    ADVANCED,
    BETWEEN_0_AND_1,
    POSITIVE,
    Arg,
    CommandConfig,
    bytes_of,
    config_by_name,
)
from artifacts.cli.parser import ArgumentParser, parser_of, read


def by_hand(value: Any) -> Any:
    """Read `1,2`."""
    return tuple(map(int, value.split(","))) if isinstance(value, str) else value


NAMED = Arg(flags=("--task",), metavar="TASK", repeat=True)


class Part(CommandConfig):
    """Options of a part."""

    rate: Annotated[float, Arg("of samples", group="part"), POSITIVE] = 0.5


class Config(CommandConfig):
    """An option of each sort."""

    file: ArtifactFile
    share: Annotated[
        float | None, Arg(flags=("--target-share",), either="total"), BETWEEN_0_AND_1
    ] = None
    layers: Annotated[
        tuple[int, int] | None, Arg(flags=("--by-hand",), either="total"), BeforeValidator(by_hand)
    ] = None
    at_most: Annotated[int, Arg("how many", ("-n", "--at-most")), Field(ge=1)] = 3
    lengths: Annotated[tuple[Annotated[Length, Field(ge=16)], ...], Arg("tokens")] = (64,)
    order: Annotated[Literal["rising", "falling"], Arg("sorted", group=ADVANCED)] = "rising"
    folder: Annotated[Path | None, Arg("of pictures")] = None
    tasks: Annotated[tuple[str, ...], NAMED, Arg("what is asked")] = ("prose",)
    dtype: Dtype = "auto"
    picture: Picture = True
    both: Annotated[bool, Arg("either", both=True)] = True
    part: Part = Field(default_factory=Part)
    as_json: Json = None
    command: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.at_most > len(self.lengths) + 10:
            raise HeadwiseError(f"--at-most is too much, got {self.at_most}")
        return self


def parser() -> ArgumentParser:
    return parser_of(Config, "headwise try", "A command.")


def parsed(words: str) -> Config:
    return read(parser(), Config, words.split(), "typed")


def test_config_of_parsed_options_has_types_and_defaults() -> None:
    config = parsed("a.yaml --target-share 0.5")
    assert config == Config(file=Path("a.yaml"), share=0.5, command="typed")
    assert config.model_fields_set == {"file", "share", "part", "command"}
    config = parsed("a.yaml --by-hand 1,2 -n 4 --task a --task b --no-picture --dtype bf16")
    assert (config.layers, config.at_most, config.dtype) == ((1, 2), 4, "bfloat16")
    assert (config.tasks, config.picture, config.both) == (("a", "b"), False, True)
    words = "--lengths 16 32 --order falling --folder maps --no-both --rate 2"
    config = parsed(f"a.yaml --by-hand 1,2 {words}")
    assert (config.lengths, config.order, config.folder) == ((16, 32), "falling", Path("maps"))
    assert not config.both and config.part.rate == 2


def test_config_by_name_accepts_text_for_a_path_and_one_value_for_several() -> None:
    options = {"folder": "maps", "tasks": "a", "lengths": [16, 32], "rate": 2, "share": 0.5}
    config = config_by_name(Config, options, file=Path("a.yaml"))
    assert (config.folder, config.tasks, config.lengths) == (Path("maps"), ("a",), (16, 32))
    assert config.part == Part(rate=2.0) and config.replace(at_most=4).at_most == 4
    assert config.settings().keys() == Config.model_fields.keys() - {"command", "as_json"}


@pytest.mark.parametrize(
    ("option", "value", "flag"),
    [
        ("at_most", True, "--at-most"),
        ("at_most", "4", "--at-most"),
        ("at_most", 20, "--at-most"),
        ("order", "none", "--order"),
        ("lengths", [16, 8], "--lengths"),
        ("lengths", 2**31, "--lengths"),
        ("rate", 0, "--rate"),
        ("rate", float("inf"), "--rate"),
        ("folder", 3, "--folder"),
        ("picture", 1, "--no-picture"),
        ("tasks", 3, "--task"),
    ],
)
def test_config_by_name_names_a_wrong_value(option: str, value: Any, flag: str) -> None:
    with pytest.raises(HeadwiseError) as refused:
        config_by_name(Config, {option: value}, file=Path("a.yaml"))
    wrong = value[-1] if isinstance(value, list) else value
    assert re.fullmatch(rf"{flag} .*, got {re.escape(repr(wrong))}", str(refused.value))


def test_config_names_missing_and_unknown_options() -> None:
    with pytest.raises(HeadwiseError, match=r"^ARTIFACT is required$"):
        Config(share=0.5)  # type: ignore[call-arg]
    with pytest.raises(HeadwiseError, match=r"'rates'; known: rate$"):
        Part(rates=1)  # type: ignore[call-arg]
    with pytest.raises(HeadwiseError, match=r"'file'; known: share, layers, at_most"):
        config_by_name(Config, {"file": "b.yaml"}, file=Path("a.yaml"))
    with pytest.raises(ValueError, match="frozen"):
        Part().rate = 2  # type: ignore[misc]


def test_bytes_of_reads_units() -> None:
    assert [bytes_of(text, "-b") for text in ("7", "1.5kB", "2 MiB", 9)] == [7, 1500, 2**21, 9]
    for text in ("0", "1 KB", "-1", "much"):
        with pytest.raises(HeadwiseError, match=r"^-b must be a number of bytes"):
            bytes_of(text, "-b")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--target-share 1", "--target-share .* got 1.0"),
        ("--target-share nan", "--target-share .* got nan"),
        ("--target-share 0.5 --at-most 0", "--at-most .* got 0"),
        ("--target-share 0.5 --json none/out.json", "--json: .*'none/out.json'"),
        ("--target-share 0.5 --json=", r"--json: .*'\.'"),
    ],
)
def test_check_ranges_names_the_option_and_its_value(words: str, says: str) -> None:
    with pytest.raises(HeadwiseError, match=says):
        parsed(f"a.yaml {words}")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "--target-share --by-hand"),
        ("--target-share 0.5 --by-hand 1", "--target-share"),
        ("--target-share much", "--target-share: .*'much'"),
        ("--target-share 0.5 --at", "--at"),
        ("--target-share 0.5 --order none", "--order: .*'none'"),
        ("--target-share 0.5 b.yaml", "b.yaml; usage: headwise try"),
    ],
)
def test_parser_error_is_one_line(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(f"a.yaml {words}")
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert re.search(says, err) and "--help)" in err


def test_json_before_an_artifact_prints_to_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rest = "--target-share 0.5"
    assert parsed(f"{rest} --json cfg.yaml").as_json == arguments.STDOUT
    for typed in ("--json out.json", "--json=out.json"):
        assert parsed(f"cfg.yaml {rest} {typed}").as_json == Path("out.json")
    assert parsed(f"{rest} -- --json").file == Path("--json")


def test_deliver_writes_text_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments.deliver("text", {"a": 1}, None)
    assert capsys.readouterr().out == "text\n"
    arguments.deliver("text", {"a": 1}, arguments.STDOUT)
    assert json.loads(capsys.readouterr().out) == {"a": 1}
    arguments.deliver("text", {"a": tmp_path}, tmp_path / "out.json")
    assert capsys.readouterr().out == "text\n"
    assert json.loads((tmp_path / "out.json").read_text()) == {"a": str(tmp_path)}


def test_verbosity_is_reset_by_the_next_command_line() -> None:
    words = ["cfg.yaml", "--target-share", "0.5"]
    log = logging.getLogger("headwise")
    try:
        for flag, level, logged in (("-q", -1, logging.ERROR), ("--verbose", 1, logging.INFO)):
            assert "quiet" not in vars(parser().parse_args([*words, flag]))
            assert (command.verbosity, log.level) == (level, logged)
    finally:
        parser().parse_args(words)
    assert (command.verbosity, log.level) == (0, logging.NOTSET)


def test_version_option_prints_the_installed_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"headwise {importlib.metadata.version('headwise')}\n"
