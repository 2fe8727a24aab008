"""Which tasks tell patterns apart: the rule, and the command on a model that knows nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from artifacts import HeadwiseError
from profiling import separation
from profiling.evaluation.intervals import student_p
from profiling.evaluation.separation import Row, Unit, earns, rows_of, text_table
from search.published.config import HeadSearch
from search.published.head_budget import run as search
from tests.search.conftest import save_tiny

BASE = [0.5, 0.7, 0.4, 0.6, 0.8, 0.5, 0.9, 0.6]
NOISE = [0.01, -0.01, 0.02, 0.0, -0.02, 0.01, 0.0, -0.01]


def units(*losses: float) -> list[Unit]:
    return [Unit(nll=loss, right=float(loss < 1), answers=3) for loss in losses]


def rows(worse: float, oracle: float, contexts: int = 8) -> list[Row]:
    shifted = [[loss + more + off for loss, off in zip(BASE, NOISE, strict=True)] for more in (worse, oracle)]
    made = {"dense": units(*BASE), "a_shape": units(*shifted[0]), "oracle 0.2": units(*shifted[1])}
    return rows_of({"kv": {name: some[:contexts] for name, some in made.items()}})


@pytest.mark.parametrize(
    ("worse", "oracle", "earned"),
    [(1.0, 0.0, True), (1.0, 0.2, True), (1.0, 0.5, False), (0.03, 0.0, False), (-1.0, 0.0, False)],
)
def test_a_task_earns_its_place_where_a_shape_loses_and_oracle_does_not(
    worse: float, oracle: float, earned: bool
) -> None:
    assert earns(rows(worse, oracle), "kv", "a_shape", "oracle 0.2") is earned


def test_one_context_proves_nothing() -> None:
    assert not earns(rows(1.0, 0.0, contexts=1), "kv", "a_shape", "oracle 0.2")


def test_contexts_are_the_units_and_p_values_are_corrected_for_all_rows() -> None:
    found = {(row.method, row.measure): row for row in rows(0.02, 0.0)}
    worse = found["a_shape", "nll"]
    assert (worse.count, worse.answers) == (8, 24) and worse.difference == pytest.approx(0.02)
    gaps = [0.02 + off for off in NOISE]
    half = 2.365 * float(np.std(gaps, ddof=1)) / 8**0.5
    assert (worse.low, worse.high) == pytest.approx((0.02 - half, 0.02 + half), rel=2e-3)
    # Of four rows this one is the surest.
    assert worse.p == pytest.approx(4 * student_p(gaps)) and worse.apart and not found["oracle 0.2", "nll"].apart


def test_a_text_may_earn_it_by_its_copies_alone() -> None:
    base = [Unit(nll=3.0 + at / 10, copies=0.5) for at in range(6)] + [Unit(nll=3.0)]
    lost = [Unit(nll=one.nll, copies=None if one.copies is None else 2.0 + at / 9) for at, one in enumerate(base)]
    found = rows_of({"prose": {"dense": base, "a_shape": lost, "oracle 0.2": base}})
    assert earns(found, "prose", "a_shape", "oracle 0.2")
    by = {(row.method, row.measure): row for row in found}
    assert by["a_shape", "copies"].count == 6 and by["a_shape", "nll"].count == 7
    assert by["a_shape", "copies"].apart and not by["a_shape", "nll"].apart
    assert ("dense", "right") not in by
    assert "a_shape          0.200  nll" in text_table(found, {"a_shape": 0.2})


def test_the_command_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, config, out = save_tiny(tmp_path / "tiny"), tmp_path / "cfg.yaml", tmp_path / "separation.json"
    search(HeadSearch(model=str(model), out=config, length=1024, budget="0.6", dtype="float32", command="x"))
    monkeypatch.setattr(separation, "METHODS", ("dense", "headwise", "a_shape"))
    monkeypatch.setattr(separation, "earns", lambda *_: True)
    arguments = ["--model", str(model), str(config), "--out", str(out), "--length", "2000"]
    arguments += ["--task", "line_turns@questions=3", "--task", "repeats", "--contexts", "1", "--oracles", "0.2", "0.5"]
    arguments += ["--dtype", "float32", "--density", "0.5"]
    assert separation.main(arguments) == 0
    record = json.loads(out.read_text())
    counts = {(row["task"], row["method"]): row["count"] for row in record["rows"] if row["measure"] == "nll"}
    methods = ("dense", "headwise", "a_shape", "oracle 0.5", "oracle 0.2")
    assert {method for _, method in counts} == set(methods)
    assert {counts["line_turns@questions=3", method] for method in methods} == {1}
    assert "earn their place: line_turns@questions=3, repeats" in capsys.readouterr().out

    def refuse(*_: Any) -> None:
        raise AssertionError("run again")

    monkeypatch.setattr(separation, "records_of", refuse)
    separation.main(arguments)
    assert json.loads(out.read_text())["rows"] == record["rows"]
    with pytest.raises(HeadwiseError, match=r"its density is 0\.5, not 0\.4"):
        separation.main([*arguments[:-1], "0.4"])


@pytest.mark.parametrize(
    ("option", "says"),
    [(("--contexts", "0"), "--contexts must be at least 1"), (("--oracles", "0"), "must be above 0 and at most 1")],
)
def test_bad_use_is_one_line(option: tuple[str, str], says: str) -> None:
    with pytest.raises(HeadwiseError, match=says):
        separation.main(["--model", "x", "cfg.yaml", "--out", "o.json", *option])
