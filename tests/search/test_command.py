"""headwise: its verbs, what it loads for them, and the page of all commands."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from artifacts import HeadwiseError, command_line
from kernels.native import build
from profiling import doctor, report
from search.__main__ import GROUPS, NAMES, VERBS, main
from search.reference import page

ROOT = Path(__file__).resolve().parents[2]


def headwise(*words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "search", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, **how)


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "called_as", {})


def test_help_lists_every_verb_and_needs_no_torch() -> None:
    code = (
        "import sys\nfrom search.__main__ import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    for words in (["--help"], [], ["show", "--help"], ["lint", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT)
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
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.endswith("(see headwise show --help)\n")


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
    assert len(VERBS) == sum(map(len, GROUPS.values())) and len(NAMES) == len(set(VERBS.values()))


@pytest.mark.parametrize("after", [0.0, 0.3, 0.8])
def test_ctrl_c_is_one_line_from_the_first_moment(tmp_path: Path, after: float) -> None:
    script = tmp_path / "headwise"
    # As pip writes console scripts; the pause stands for a slow disk.
    script.write_text("from search.__main__ import start\nprint('ready', flush=True)\nstart()\n")
    command = [sys.executable, str(script), "search", "--model", "no/such", "--out", str(tmp_path / "cfg.yaml")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        time.sleep(after)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        assert (process.wait(60), process.stderr.read()) == (130, "interrupted\n")


def test_the_page_of_commands_is_current() -> None:
    assert (ROOT / "docs" / "commands.md").read_text(encoding="utf-8") == page(), (
        "python -m search.reference --out docs/commands.md"
    )


def test_doctor_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert build.load() is None
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["wrong"] == [] and found["kernels"]["cpu"] in ("compiled", "prebuilt")
    assert found["kernels"]["engines"]["float32"][-1] == "float"
    assert all(0 < each["prefill_s"] < each["search_s"] for each in found["expected"].values())
    text = doctor.report(found)
    assert text.startswith("all is well\n") and "what to expect at 4,096 tokens" in text


def test_doctor_is_loud_about_the_slow_reference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = SimpleNamespace(
        load=lambda: "no C++ compiler found", find_compiler=lambda: "no C++ compiler found", cache_folder=Path
    )
    monkeypatch.setattr(doctor, "build", broken)
    assert doctor.main([]) == 3
    said = capsys.readouterr().out
    assert said.startswith("WRONG      attention on the CPU falls to the slow reference, ")
    assert "no C++ compiler found" in said and "what to expect" not in said


def test_doctor_sees_a_cache_that_others_can_write_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert doctor._state(tmp_path) == "unsafe: others can write to it (mode 777)"
    tmp_path.chmod(0o700)
    assert doctor._state(tmp_path) == "safe, yours alone"
    assert doctor._state(tmp_path / "none") == "made at first use"


@pytest.mark.parametrize(("text", "says"), [(None, "cannot be read"), ("{}", "is of no evaluation"), ("[", "is of no")])
def test_a_report_of_no_evaluation_is_one_line(tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "evaluation.json").write_text(text)
    with pytest.raises(HeadwiseError, match=says):
        report.main([str(tmp_path)])
    assert not (tmp_path / "index.html").exists()
