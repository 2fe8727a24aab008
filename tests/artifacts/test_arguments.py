"""The arguments that commands share, and a Config's fields, which are the command's options."""

from __future__ import annotations

import importlib.metadata
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import pytest

from artifacts import HeadwiseError
from artifacts.cli import arguments, command
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
    file: Path = shared(arguments.add_artifact, dest="file")
    share: float | None = arg(
        "--target-share", default=None, either="total", within=BETWEEN_0_AND_1
    )
    layers: tuple[int, ...] | None = arg(
        "--by-hand",
        default=None,
        either="total",
        read=lambda text: tuple(map(int, text.split(","))),
    )
    at_most: int = option("how many", default=3, within=at_least(1))
    tasks: tuple[str, ...] = shared(arguments.add_task, "what is asked", default=("prose",))
    dtype: str = shared(arguments.add_dtype, default="auto")
    picture: bool = shared(arguments.add_picture, default=True)
    json: Path | None = shared(arguments.add_json, default=None)
    command: str = ""

    def __post_init__(self) -> None:
        check_ranges(self)


def parser(*names: str) -> ArgumentParser:
    p = ArgumentParser()
    add_arguments(p, Config, names or None)
    return p


def parsed(words: str) -> Config:
    return config_of(Config, vars(parser().parse_args(words.split())), command="typed")


def test_config_of_parsed_options_has_types_and_defaults() -> None:
    config = parsed("a.yaml --target-share 0.5")
    assert config == Config(file=Path("a.yaml"), share=0.5, command="typed")
    config = parsed("a.yaml --by-hand 1,2 --at-most 4 --task a --task b --no-picture --dtype bf16")
    assert (config.layers, config.at_most, config.dtype) == ((1, 2), 4, "bfloat16")
    assert (config.tasks, config.picture) == (("a", "b"), False)
    assert "how many (default 3)" in parser().format_help()


def test_add_arguments_of_some_fields_adds_no_others() -> None:
    p = parser("at_most", "tasks")
    assert vars(p.parse_args(["--at-most", "4"])) == {"at_most": 4, "tasks": None}
    with pytest.raises(SystemExit):
        p.parse_args(["--no-picture"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--target-share 1", "--target-share must be between 0 and 1, got 1.0"),
        ("--target-share nan", "--target-share must be between 0 and 1, got nan"),
        ("--target-share 0.5 --at-most 0", "--at-most must be at least 1, got 0"),
    ],
)
def test_check_ranges_names_the_option_and_its_value(words: str, says: str) -> None:
    with pytest.raises(HeadwiseError, match=says):
        parsed(f"a.yaml {words}")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "one of the arguments --target-share --by-hand is required"),
        ("--target-share 0.5 --by-hand 1", "not allowed with argument"),
        ("--target-share much", "invalid float value: 'much'"),
        ("--target-share 0.5 --at", "--at"),
        ("--target-share 0.5 --json none/out.json", "argument --json: cannot write 'none/out.json"),
        ("--target-share 0.5 --json=", "argument --json: cannot write ''"),
    ],
)
def test_parser_error_is_one_line(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(f"a.yaml {words}")
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert says in err and "--help)" in err


def test_json_before_an_artifact_prints_to_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rest = "--target-share 0.5"
    assert parsed(f"{rest} --json cfg.yaml").json == arguments.STDOUT
    for typed in ("--json out.json", "--json=out.json"):
        assert parsed(f"cfg.yaml {rest} {typed}").json == Path("out.json")
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
