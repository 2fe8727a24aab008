"""headwise: its verbs, what it loads for them, and the page of all commands."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from artifacts import HeadwiseError
from artifacts.cli import arguments
from artifacts.cli.command import ADVANCED, ArgumentParser
from search.__main__ import GROUPS, SHARED, VERBS, main
from search.reference import _parser, page

ROOT = Path(__file__).resolve().parents[2]


def headwise(*words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "search", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, **how)


def test_help_lists_every_verb_and_needs_no_torch() -> None:
    code = (
        "import sys\nfrom search.__main__ import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    for words in (["--help"], [], ["show", "--help"], ["validate", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT
        )
        assert done.stdout.endswith("False False\n"), (words, done.stderr)
        if words in (["--help"], []):
            listed = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
            assert set(VERBS) <= set(listed)


def test_a_verb_is_the_command_in_its_own_words(tmp_path: Path) -> None:
    for verb in ("show", "check"):
        done = headwise(verb, "--help")
        assert done.returncode == 0 and done.stdout.startswith(f"usage: headwise {verb} ")
        assert "python -m" not in done.stdout
    done = headwise("-v", "show", str(tmp_path / "none.yaml"))
    assert done.returncode == 2 and "Traceback" in done.stderr
    done = headwise("show")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.endswith(
        "(see headwise show --help)\n"
    )


@pytest.mark.parametrize(
    ("word", "says"), [("serch", "did you mean 'search'?"), ("xyzzy", "headwise --help lists them")]
)
def test_an_unknown_verb_is_one_line_with_the_nearest(word: str, says: str) -> None:
    with pytest.raises(HeadwiseError, match=f"there is no command '{word}': ") as error:
        main([word])
    assert str(error.value).endswith(says)


def test_version() -> None:
    done = headwise("--version")
    assert done.returncode == 0 and done.stdout.startswith("headwise ")


def test_no_verb_has_two_modules_and_no_module_two_names() -> None:
    assert len(VERBS) == sum(map(len, GROUPS.values()))
    own = [module for module in VERBS.values() if module not in SHARED]
    assert len(own) == len(set(own))


@pytest.mark.parametrize("after", [0.0, 0.3, 0.8])
def test_ctrl_c_is_one_line_from_the_first_moment(tmp_path: Path, after: float) -> None:
    script = tmp_path / "headwise"
    # As pip writes console scripts; the pause stands for a slow disk.
    script.write_text("from search.__main__ import start\nprint('ready', flush=True)\nstart()\n")
    command = [
        sys.executable,
        str(script),
        "search",
        "--model",
        "no/such",
        "--out",
        str(tmp_path / "cfg.yaml"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        time.sleep(after)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        assert (process.wait(60), process.stderr.read()) == (130, "interrupted\n")


PARSERS = {verb: _parser(verb, module) for verb, module in VERBS.items()}


@pytest.mark.parametrize(
    "flag", ["--length", "--task", "--json", "--device", "--seed", "--out", "--revision", "--dtype"]
)
def test_the_same_thing_has_the_same_name_everywhere(flag: str) -> None:
    found = {
        verb: p._option_string_actions[flag]
        for verb, p in PARSERS.items()
        if flag in p._option_string_actions
    }
    assert len(found) > 3
    shown = {"--out": {"FILE", "FOLDER", "STEM"}}.get(flag)
    metavars = {action.metavar for action in found.values()}
    assert metavars <= shown if shown else len(metavars) == 1
    if flag == "--json":
        assert {(action.nargs, action.const) for action in found.values()} == {
            ("?", arguments.STDOUT)
        }


def test_daily_verbs_come_first() -> None:
    assert list(VERBS)[:6] == ["doctor", "search", "gate", "evaluate", "show", "check"]


def _headings(p: ArgumentParser) -> dict[str, str]:
    """The heading of each option of a command's help."""
    return {
        flag: str(g.title)
        for g in p._action_groups
        for a in g._group_actions
        for flag in a.option_strings
    }


def test_the_help_of_a_search_fits_two_screens_and_ends_with_what_few_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = PARSERS["search"].format_help().splitlines()
    assert len(lines) <= 48 and max(map(len, lines)) <= 100
    headings = _headings(PARSERS["search"])
    few = {flag for flag, heading in headings.items() if heading == ADVANCED}
    assert {"--n-trials", "--dense-tail", "--seed", "--preset"} <= few
    assert not few & {"--model", "--out", "--task", "--length", "--budget", "--max-lost"}
    at = lines.index(f"{ADVANCED}:")
    assert not any(line.strip().startswith(tuple(few)) for line in lines[:at])
    assert not any(line.endswith(":") for line in lines[at + 1 :])
    assert any("headwise tasks" in line for line in lines[:at])


@pytest.mark.parametrize("flag", ["--seed", "--dtype", "--backend", "--revision", "--no-picture"])
def test_what_few_need_of_one_command_they_need_of_none(flag: str) -> None:
    headings = {verb: _headings(p).get(flag) for verb, p in PARSERS.items() if verb != "convert"}
    assert set(headings.values()) == {ADVANCED, None}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("search --budget 2", "--budget must be above 0 and at most 1 "),
        ("search --length 100", "--length must be at least 128, got 100"),
        ("search --max-lost -1", "--max-lost must be "),
        ("search --n-trials 0", "--n-trials must be at least 1, got 0"),
        ("search --task nothing", "unknown task 'nothing'"),
        ("search --preset paper --n-trials 5", "--n-trials goes with one budget for the model"),
    ],
)
def test_an_option_is_judged_before_torch_is_imported(
    words: str, says: str, tmp_path: Path
) -> None:
    code = (
        "import sys\nfrom artifacts import HeadwiseError\nfrom search.__main__ import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except HeadwiseError as error:\n    print(error)\n"
        "print('torch' in sys.modules)"
    )
    typed = [*words.split(), "--model", "no/such", "--out", str(tmp_path / "cfg.yaml")]
    done = subprocess.run(
        [sys.executable, "-c", code, *typed], capture_output=True, text=True, cwd=ROOT
    )
    assert says in done.stdout and done.stdout.endswith("False\n"), (done.stdout, done.stderr)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_has_another_spelling(verb: str) -> None:
    p = PARSERS[verb]
    # What convert takes by that name is a model's config.json.
    gone = {"--tasks", "--lengths", "--calibration", "--dtypes", "--show"} | (
        {"--config"} if verb != "convert" else set()
    )
    assert not gone & {*p._option_string_actions}
    assert {"-q", "-v", "--version"} <= {*p._option_string_actions}


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("filters", ["cfg.yaml"]),
        ("kv", ["cfg.yaml", "--target-share", "0.2"]),
        ("heads", ["--preset", "paper"]),
        ("demo", []),
    ],
)
def test_a_command_for_one_process_says_so_to_a_launch_of_several(
    module: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        HeadwiseError, match=r"is for one process, got 2 of a launch: start it without torchrun"
    ):
        import_module(f"search.{module}").main(
            [*options, "--model", "no/such", "--out", str(tmp_path / "new.yaml")]
        )
    assert not list(tmp_path.iterdir())


def test_the_page_of_commands_is_current() -> None:
    assert (ROOT / "docs" / "commands.md").read_text(encoding="utf-8") == page(), (
        "python -m search.reference --out docs/commands.md"
    )
