"""Each finding of lint on an artifact that has that one fault, and none on a good one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import artifacts
from artifacts import Imported, VerticalSlash
from artifacts.analysis.findings import Case
from artifacts.analysis.lint import lint
from artifacts.cli.arguments import STDOUT
from artifacts.commands.validate import Config, run
from artifacts.schema.validation import to_artifact
from tests.artifacts.conftest import build, replace_field

ROWS = [
    [cell.strip() for cell in row.split("|", 1)]
    for row in (Path(__file__).parent / "odd_fields.txt").read_text().splitlines()
    if not row.startswith("#")
]


def good(**changes: Any) -> artifacts.Artifact:
    """An artifact that lint has nothing to say of."""
    artifact = build()
    lengths = {"lengths": (4096, 8192), "samples": 3}
    calibration = artifact.search.calibration.model_copy(update=lengths)
    patterns = {name: artifact.patterns[name] for name in ("a_64_512", "bs_9", "dense")}
    first = ("vs_64_256", "vs_64_256", "a_64_512")
    rows = ((*first, "bs_9"), None, (*first, "dense"))
    good = {
        "search": artifact.search.model_copy(update={"calibration": calibration}),
        "patterns": {"vs_64_256": VerticalSlash(vertical=64, slash=256), **patterns},
        "prefill": artifact.prefill.model_copy(update={"layers": rows}),
    }
    return artifact.model_copy(update=good | changes)


def good_arrays() -> dict[str, np.ndarray]:
    recall = np.full((3, 4), 0.93, dtype=np.float32)
    recall[1] = np.nan
    return {
        "chosen.recall": recall,
        "chosen.density": np.where(np.isnan(recall), np.nan, 0.24).astype(np.float32),
    }


def codes(artifact: artifacts.Artifact, arrays: dict[str, np.ndarray] | None = None) -> list[str]:
    case = Case(artifact=artifact, arrays=good_arrays() if arrays is None else arrays)
    return [finding.code for finding in lint(case)]


def test_nothing_odd():
    winners = {"vertical_slash": 4, "a_shape": 2, "block_sparse": 1, "dense": 1}
    assert good().search.summary.winners == winners
    assert codes(good()) == []


@pytest.mark.parametrize(
    ("code", "changes"), ROWS, ids=[f"{i} {row[0]}" for i, row in enumerate(ROWS)]
)
def test_each_finding(code, changes):
    fields = good().model_dump(mode="json")
    for path, value in json.loads(changes).items():
        replace_field(fields, path, value)
    expected = not code.startswith("not ")
    assert (code.removeprefix("not ") in codes(to_artifact(fields))) == expected
    assert code not in codes(good())


def test_a_front_says_less_than_it_seems_to_where_it_is_of_shorter_prompts():
    point = artifacts.Point(cost=1.0, speedup=2.0, kl=0.1, recall=0.9, density=0.2)
    front = artifacts.Front(
        length=8192, unit="flops", dense_cost=2.0, measured_on="held_out", points=(point,)
    )
    for length, expected in ((8192, []), (4000, ["front-below"])):
        at_length = front.model_copy(update={"length": length})
        prefill = good().prefill.model_copy(update={"front": at_length})
        assert codes(good(prefill=prefill)) == expected


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"chosen.recall": np.ones((4, 4), dtype=np.float32)}, "head-counts"),
        ({"candidates.0.a.recall": np.ones((3, 5), dtype=np.float32)}, "head-counts"),
        ({"chosen.recall": np.full((3, 4), 0.93, dtype=np.float32)}, "score-gap"),
        ({"chosen.density": np.full((3, 4), np.nan, dtype=np.float32)}, "score-gap"),
    ],
)
def test_arrays(change, code):
    assert code in codes(good(), good_arrays() | change)


@pytest.mark.parametrize(("head", "expected"), [(3, False), (2, True)])
def test_low_recall_spares_dense_heads(head, expected):
    arrays = good_arrays()
    arrays["chosen.recall"][2, head] = 0.2
    assert ("low-recall" in codes(good(), arrays)) == expected


@pytest.mark.parametrize(
    ("scores", "code"),
    [
        ([0.9, 0.8, 30, 2], "mixed-scales"),
        ([0, 1, 336, 14994473], "foreign-scores"),
        ([0.921, 0.934, 0.875, 0.913], "mixed-precision"),
    ],
)
def test_scores_of_imports(scores, code):
    arrays = {"imported.score": np.array([scores, scores, scores], dtype=np.float64)}
    kind = "other" if max(scores) > 1.0001 else "recall"
    imported = Imported(format="minference", file="x.json", sha256="a" * 64, scores=kind)
    artifact = good(prefill=good().prefill.model_copy(update={"imported": imported}))
    found = codes(artifact, arrays)
    assert [c for c in found if "score" in c or "mixed" in c] == [code]


def test_the_command(saved):
    data = json.loads(run(Config(file=saved, as_json=STDOUT)).text)
    assert sum(data["counts"].values()) == len(data["findings"]) > 0
    every = {finding["code"] for finding in data["findings"]}
    quiet = run(Config(file=saved, ignore=tuple(every)))
    assert quiet.status == 0 and quiet.text.endswith("): nothing odd\n")
    severities = {finding["severity"] for finding in data["findings"]}
    assert run(Config(file=saved, level="error")).status == (3 if "error" in severities else 0)
    assert run(Config(file=saved, level="note")).status == 3
    for finding in data["findings"]:
        assert finding["message"] in run(Config(file=saved)).text


def test_the_page_names_every_code():
    page = (Path(__file__).parents[2] / "docs" / "artifact.md").read_text()
    section = page[page.index("## Lint") : page.index("## Other tools")]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    listed = {code for cell in cells for code in re.findall(r"`([a-z-]+)`", cell)}
    rules = (Path(__file__).parents[2] / "artifacts" / "analysis").glob("lint*.py")
    code = "".join(path.read_text() for path in rules)
    assert listed == set(re.findall(r"(?:error|warning|note)\(\s*\"([a-z-]+)\"", code))
