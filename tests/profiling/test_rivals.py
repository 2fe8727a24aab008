"""python -m profiling.rivals: without OpenVINO GenAI one line; with it, the same answers from the same weights."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from artifacts import HeadwiseError
from profiling import rivals
from profiling.rivals import HEADWISE, KERNEL, MODEL, OPENVINO, XATTENTION, Rivals, table
from search.published.config import HeadSearch
from search.published.head_budget import run as search
from tests.search.conftest import save_tiny

LENGTH = 700


@pytest.mark.skipif(find_spec("openvino_genai") is not None, reason="OpenVINO GenAI is installed")
def test_without_openvino_one_line_says_what_to_install(tmp_path: Path) -> None:
    command = ["profiling.rivals", "cfg.yaml", "--model", "smollm2", "--json", str(tmp_path / "out.json")]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert done.stderr == "error: openvino_genai is not installed: pip install 'headwise[rivals]'\n"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"repeats": 0}, "--repeats must be at least 1, got 0"),
        ({"block": 0}, "--block must be at least 1, got 0"),
        ({"threshold": 1.5}, "--threshold must be above 0 and at most 1, got 1.5"),
    ],
)
def test_what_cannot_be_is_one_line(options: dict[str, Any], says: str) -> None:
    with pytest.raises(HeadwiseError, match=says):
        Rivals(model="x", config=Path("cfg.yaml"), **options)


def test_the_table_is_against_the_best_dense_of_all() -> None:
    seconds = {MODEL: 8.0, KERNEL: 4.0, HEADWISE: 1.0, OPENVINO: 2.0, XATTENTION: 3.0}
    rows = [
        {
            "method": name,
            "seconds": took,
            "speedups": dict(rivals._against_dense({n: [s] for n, s in seconds.items()}, name).over),
            "right": 1,
        }
        for name, took in seconds.items()
    ]
    lines = table({"rows": rows, "expected": ["1", "2"], "over_xattention": 3.0}).splitlines()
    assert lines[3].split()[-6:] == ["1.000", "2.00x", "8.00x", "1", "of", "2"]
    assert lines[5].startswith("OpenVINO GenAI, XAttention") and "0.67x" in lines[5]
    assert lines[-1] == "Headwise is 3.00 times as fast as XAttention"


@pytest.mark.slow
def test_all_give_the_answers_of_dense_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a budget of 1 and a threshold of 1 everything is dense: one answer, five times."""
    pytest.importorskip("openvino_genai", reason="needs headwise[rivals]")
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    model, config, out = save_tiny(tmp_path / "tiny"), tmp_path / "cfg.yaml", tmp_path / "rivals.json"
    search(HeadSearch(model=str(model), out=config, length=LENGTH, budget="1", dtype="float32", command="x"))
    words = [str(config), "--model", str(model), "--length", str(LENGTH), "--repeats", "1"]
    assert rivals.main([*words, "--dtype", "float32", "--threshold", "1", "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    assert [row["method"] for row in record["rows"]] == [MODEL, KERNEL, HEADWISE, OPENVINO, XATTENTION]
    answers = [row["answers"] for row in record["rows"]]
    assert all(own == answers[0] for own in answers) and len(answers[0]) == 2
    assert all(len(row["rounds"]) == 1 and row["seconds"] > 0 for row in record["rows"])
    assert "XAttention" in capsys.readouterr().out
    assert rivals.main([*words, "--dtype", "float32", "--without", MODEL, KERNEL, "--json", str(out)]) == 0
    fewer = json.loads(out.read_text())["rows"]
    assert [row["method"] for row in fewer] == [HEADWISE, OPENVINO, XATTENTION]
    assert all(list(row["speedups"]) == [OPENVINO] for row in fewer)
    assert len(list((tmp_path / "cache" / "openvino").glob("*/openvino_model.xml"))) == 1
