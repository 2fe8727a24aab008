"""Peers: both libraries' answers are scored and kept, whatever kvpress says; what cannot be is one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from artifacts import HeadwiseError
from profiling import peers
from tests.search.conftest import save_tiny

METHODS = ["dense_kernel", "snapkv", "random", "h2o", "streaming"]


def asked(model: Path, out: Path, *more: str) -> list[str]:
    words = ["--model", str(model), "--out", str(out), "--python", sys.executable, "--dtype", "float32"]
    return [*words, "--length", "500", "--samples", "2", "--share", "0.5", "--presses", "SnapKVPress", *more]


def test_rows_of_both_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    model, out = save_tiny(tmp_path / "tiny"), tmp_path / "out.json"
    jobs: list[tuple[str, int]] = []

    def worker(config: Any, loaded: Any, presses: dict[str, Any], contexts: Any) -> Any:
        ((name, press),) = presses.items()
        assert press in (None, ("SnapKVPress", {"compression_ratio": 0.5}))
        jobs.append((name, len(contexts)))
        for at, each in enumerate(contexts):
            right = [f" {prompt.answer}\n" if press is None else "?" for prompt in each.prompts]
            yield {"press": name, "context": at, "answers": right, "bytes": 100 if press is None else 50}

    monkeypatch.setattr(peers, "_worker", worker)
    monkeypatch.setattr(peers, "_versions", lambda python: {"kvpress": "0"})
    words = asked(model, out, "--task", "line_turns@questions=3", "--task", "passkey")
    assert peers.main(words) == 0
    rows = json.loads(out.read_text())["rows"]
    names = [*METHODS, "kvpress: none", "kvpress: SnapKVPress"]
    assert [(r["task"], r["method"]) for r in rows] == [
        (task, name) for task in ("line_turns@questions=3", "passkey") for name in names
    ]
    found = {row["method"]: row for row in rows if row["task"] == "passkey"}
    assert (found["kvpress: none"]["score"], found["kvpress: SnapKVPress"]["difference"]) == (1.0, -1.0)
    assert found["kvpress: SnapKVPress"]["of_full"] == 0.5 and "p" not in found["dense_kernel"]
    assert all(found[name]["of_full"] == pytest.approx(0.5, abs=0.01) for name in METHODS[1:])
    assert jobs == [("kvpress: none", 4), ("kvpress: SnapKVPress", 4)]
    assert "kvpress: SnapKVPress" in capsys.readouterr().out
    assert peers.main(words) == 0 and len(jobs) == 2
    assert json.loads(out.read_text())["rows"] == rows


def test_an_error_of_kvpress_is_one_line(tmp_path: Path) -> None:
    # This environment has none: the worker ends with Python's own line.
    with pytest.raises(HeadwiseError, match=r"kvpress in .* failed: .*No module named 'kvpress'"):
        config = peers.Peers(model=str(tmp_path), tasks=(), out=tmp_path / "x", python=Path(sys.executable))
        list(peers._worker(config, None, {"none": None}, []))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ((), "say what to ask: --task TASK, one or more"),
        (
            ("--task", "chain", "--length", "1000"),
            "--task chain asks nothing after its prompts: take one",
        ),
        (("--task", "passkey", "--share", "1"), "--share must be between 0 and 1, got 1"),
        (("--task", "passkey", "--python", "none/python"), "--python 'none/python' is not there: make kvpress"),
    ],
)
def test_bad_use(tmp_path: Path, more: tuple[str, ...], line: str) -> None:
    with pytest.raises(HeadwiseError, match=line):
        peers.main(asked(save_tiny(tmp_path / "tiny"), tmp_path / "out.json", *more))
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
