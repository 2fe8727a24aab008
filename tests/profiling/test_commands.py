"""Options of the profiling commands that cannot be: one line each, before torch is imported."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

RUN = """
import json, sys
from artifacts import HeadwiseError
from headwise.__main__ import main

def refusal(words):
    try:
        main(words)
    except HeadwiseError as error:
        return str(error)
    return "accepted"

lines = [refusal(words) for words in json.load(sys.stdin)]
print(json.dumps({"lines": lines, "torch": "torch" in sys.modules}))
"""
# (command and options, a part of the line that names the value or what would be right)
CASES = [
    ("bench --length 300 0", "length must be at least 1, got 0"),
    ("bench --density 3", "--density must be above 0 and at most 1, got 3.0"),
    ("bench --repeats 0", "--repeats must be at least 1, got 0"),
    ("decode --model m", "name an artifact with a decode section"),
    ("decode c.yaml --model m --texts 0", "--texts must be at least 1, got 0"),
    ("decode c.yaml --model m --forced 4096", "--forced must be below --text-length (4096)"),
    ("decode --model m --policy lru", "unknown policy 'lru'"),
    ("evaluate c.yaml --model m --out o --seeds 0", "--seeds must be at least 1, got 0"),
    ("evaluate c.yaml --model m --out o --share 0", "--share must be above 0"),
    ("evaluate c.yaml --model m --out o --depths 2", "--depths must be from 0 to 1"),
    ("evaluate c.yaml --model m --out o --task riddle", "unknown task 'riddle'"),
    ("evaluate c.yaml --model m --out o --speed-only --task prose", "--speed-only asks nothing"),
    ("heatmaps --out o", "nothing to draw from: give --profile DIR or --model M"),
    (
        "heatmaps --out o --profile x --picture attention",
        "the picture 'attention' needs --model and --head",
    ),
    ("heatmaps --out o --profile x --picture pie", "unknown picture 'pie'; known: similarity, abi"),
    ("heatmaps --out o --model m --head 3", "--head must be layer.head"),
    ("heatmaps --out o --model m --length 3", "--length must be at least 16, got 3"),
    ("similarity --model m --out o --length 63", "--length must be at least 64, got 63"),
    ("similarity --model m --out o --task vt --task vt", "two tasks are called 'vt'"),
    ("stream --model m --out o --text t.txt --tokens 1", "--tokens must be at least 2, got 1"),
    ("stream --model m --out o --text t.txt --tokens 9 --chunk 0", "--chunk must be at least 1"),
    ("stream --model m --out o --text t.txt --tokens 9 --policy lru", "unknown policy 'lru'"),
    (
        "stream --model m --out o --text t.txt --tokens 9 --policy full --policy full",
        "--policy full is given twice",
    ),
    ("stream --model m --out o --tokens 9 --text none.txt", "there is no text file 'none.txt'"),
    ("tasks --task riddle", "unknown task 'riddle'; known: chain, cwe, facts"),
    ("tasks --task vt --length 0", "--length must be at least 1, got 0"),
    ("tasks --length 9", "say which task to show: --task TASK"),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """The line of every case by its words, all in one process that never imports torch."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "t.txt").write_text("word", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps([shlex.split(case) for case, _ in CASES]),
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    )
    result = json.loads(done.stdout)
    assert not result["torch"], "a wrong option is refused only after torch was imported"
    assert [path.name for path in folder.iterdir()] == ["t.txt"]
    return {case: line for (case, _), line in zip(CASES, result["lines"], strict=True)}


@pytest.mark.parametrize(("case", "line"), CASES, ids=[case for case, _ in CASES])
def test_command_with_a_wrong_option_names_it_in_one_line(refusals, case, line):
    assert line in refusals[case] and "\n" not in refusals[case]
