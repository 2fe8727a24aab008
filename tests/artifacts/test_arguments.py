"""The arguments that commands share: one spelling, --json, -q, -v and --version."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from artifacts import Finding
from artifacts.cli import arguments, command
from artifacts.cli.command import ArgumentParser, run_command


@pytest.fixture
def parser() -> ArgumentParser:
    p = ArgumentParser(prog="headwise gate", description="what an artifact loses")
    arguments.add_artifact(p)
    arguments.add_model(p)
    arguments.add_length(p, several=True)
    arguments.add_task(p, "what is asked")
    arguments.add_dtype(p)
    arguments.add_seed(p, 7)
    arguments.add_json(p)
    return p


def test_the_spelling(parser, capsys):
    words = "cfg.yaml --model M --length 1 2 --task a --task b --dtype bf16"
    options = parser.parse_args(words.split())
    assert vars(options) == {
        **{"config": Path("cfg.yaml"), "model": "M", "length": [1, 2], "tasks": ["a", "b"]},
        **{"dtype": "bfloat16", "seed": 7, "json": None},
    }
    assert capsys.readouterr().err == ""


def test_json_takes_no_artifact_for_its_file(parser, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parser.parse_args(["--json", "cfg.yaml", "--model", "M"]).json == arguments.STDOUT
    for words in (["--json", "out.json"], ["--json=out.json"]):
        assert parser.parse_args(["cfg.yaml", "--model", "M", *words]).json == Path("out.json")
    assert parser.parse_args(["cfg.yaml", "--model", "M", "--json=out.txt"]).json == Path("out.txt")
    assert parser.parse_args(["--model", "M", "--", "--json"]).config == Path("--json")


def test_json_where_it_cannot_be_written_ends_before_anything_is_done(
    parser, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for words in (["--json", "none/out.json"], ["--json="]):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(["cfg.yaml", "--model", "M", *words])
        said = capsys.readouterr().err
        assert ended.value.code == 2 and said.startswith("error: argument --json: cannot write '")
        assert said.count("\n") == 1


def test_deliver(tmp_path, capsys):
    arguments.deliver("text", {"a": 1}, None)
    assert capsys.readouterr().out == "text\n"
    arguments.deliver("text", {"a": 1}, arguments.STDOUT)
    assert json.loads(capsys.readouterr().out) == {"a": 1}
    arguments.deliver("text", {"a": tmp_path}, tmp_path / "out.json")
    assert capsys.readouterr().out == "text\n"
    assert json.loads((tmp_path / "out.json").read_text()) == {"a": str(tmp_path)}


def test_verbosity_lasts_for_one_command_line(parser):
    words = ["cfg.yaml", "--model", "M"]
    log = logging.getLogger("headwise")
    try:
        for flag, level, logged in (("-q", -1, logging.ERROR), ("--verbose", 1, logging.INFO)):
            assert "quiet" not in vars(parser.parse_args([*words, flag]))
            assert (command.verbosity, log.level) == (level, logged)
    finally:
        parser.parse_args(words)
    assert (command.verbosity, log.level) == (0, logging.NOTSET)


def test_version(parser, capsys):
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"headwise {importlib.metadata.version('headwise')}\n"


def test_a_finding_has_its_own_status(capsys):
    def fails(argv):
        raise Finding("nothing passes")

    with pytest.raises(SystemExit) as ended:
        run_command(fails, [])
    assert ended.value.code == 3 and capsys.readouterr().err == "error: nothing passes\n"


def test_an_error_tells_more_where_that_is_asked_for(tmp_path):
    command = [sys.executable, "-m", "artifacts", "show", str(tmp_path / "none.yaml")]
    usual, verbose = (
        subprocess.run([*command, *more], capture_output=True, text=True) for more in ([], ["-v"])
    )
    assert usual.returncode == verbose.returncode == 2
    assert usual.stderr.count("\n") == 1 and "Traceback" in verbose.stderr
    assert verbose.stderr.endswith(usual.stderr)
