"""Each finding of lint on an artifact that has that one fault, and none on a good one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import artifacts
from artifacts import (
    AShape,
    BlockSparse,
    Dense,
    Dilated,
    Imported,
    Streaming,
    VerticalSlash,
    pattern_name,
)
from artifacts.analysis.findings import Case
from artifacts.analysis.lint import lint
from artifacts.cli.arguments import STDOUT
from artifacts.commands.validate import Config, run
from tests.artifacts.conftest import build, build_every_kind

IMPORT = Imported(format="minference", file="x.json", sha256="a" * 64, scores="recall")


def good(**changes: Any) -> artifacts.Artifact:
    """An artifact that lint has nothing to say of."""
    artifact = build()
    calibration = artifact.search.calibration.model_copy(
        update={"lengths": (4096, 8192), "samples": 3}
    )
    patterns = (
        VerticalSlash(vertical=64, slash=256),
        AShape(sink=64, window=512),
        BlockSparse(blocks=9),
        Dense(),
    )
    names = [pattern_name(pattern) for pattern in patterns]
    return artifact.model_copy(
        update={
            "search": artifact.search.model_copy(update={"calibration": calibration}),
            "patterns": dict(zip(names, patterns, strict=True)),
            "prefill": artifact.prefill.model_copy(
                update={
                    "layers": (
                        (names[0], names[0], names[1], names[2]),
                        None,
                        (names[0], names[0], names[1], names[3]),
                    )
                }
            ),
        }
        | changes
    )


def good_arrays() -> dict[str, np.ndarray]:
    recall = np.full((3, 4), 0.93, dtype=np.float32)
    recall[1] = np.nan
    return {
        "chosen.recall": recall,
        "chosen.density": np.where(np.isnan(recall), np.nan, 0.24).astype(np.float32),
    }


def uniform(*patterns: artifacts.Pattern) -> dict[str, Any]:
    """Changes that give layer 0 and 2 of good() these patterns, over and over."""
    names = [pattern_name(pattern) for pattern in patterns]
    row = tuple(names[head % len(names)] for head in range(4))
    prefill = artifacts.Prefill(dense_below=4096, dense_tail=64, layers=(row, None, row))
    return {"patterns": dict(zip(names, patterns, strict=True)), "prefill": prefill}


def codes(artifact: artifacts.Artifact, arrays: dict[str, np.ndarray] | None = None) -> list[str]:
    case = Case(artifact=artifact, arrays=good_arrays() if arrays is None else arrays)
    return [finding.code for finding in lint(case)]


def searched(**changes: Any) -> dict[str, Any]:
    return {"search": good().search.model_copy(update=changes)}


def summary(**changes: Any) -> dict[str, Any]:
    return searched(summary=good().search.summary.model_copy(update=changes))


def calibrated(**changes: Any) -> dict[str, Any]:
    return searched(calibration=good().search.calibration.model_copy(update=changes))


def prefilled(**changes: Any) -> dict[str, Any]:
    return {"prefill": good().prefill.model_copy(update=changes)}


def measured(**changes: Any) -> dict[str, Any]:
    return {
        "evidence": artifacts.Evidence(
            measurements=(good().evidence.measurements[0].model_copy(update=changes),)
        )
    }


def decoding(**changes: Any) -> dict[str, Any]:
    omnikv = build_every_kind()[0].decode.omnikv.model_copy(
        update={"filter_layers": (0,), "dense_layers": (), "budget": 512} | changes
    )
    return {"decode": artifacts.Decode(omnikv=omnikv)}


def cached(*layers: Any, **policies: Any) -> dict[str, Any]:
    return {"kv_cache": artifacts.KVCache(policies=policies, layers=layers)}


STREAM = Streaming(sinks=4, window=508)
FULL = artifacts.Full()


def test_nothing_odd():
    artifact = good(evidence=good().evidence)
    winners = {"vertical_slash": 4, "a_shape": 2, "block_sparse": 1, "dense": 1}
    assert artifact.search.summary.winners == winners
    assert codes(artifact) == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        (uniform(VerticalSlash(vertical=64, slash=256)), "uniform"),
        (uniform(Dense()), "nothing-sparse"),
        ({"patterns": {}} | prefilled(layers=(None,) * 3), "nothing-sparse"),
        (uniform(VerticalSlash(vertical=64, slash=8000), Dense()), "near-dense"),
        (uniform(BlockSparse(blocks=200), AShape(sink=64, window=512)), "beyond-model"),
        (prefilled(dense_tail=0) | {"patterns": {"a": AShape(sink=64, window=512)}}, "no-tail"),
        (summary(winners={"vertical_slash": 8}), "stale-summary"),
        ({"model": good().model.model_copy(update={"weights_sha256": None})}, "no-fingerprint"),
        ({"search": None} | prefilled(imported=IMPORT), "unsearched"),
        (prefilled(dense_below=10_000), "searched-below"),
        (calibrated(lengths=(8192,), samples=1), "one-prompt"),
        (calibrated(lengths=(512, 1024)), "short-search"),
        ({"evidence": artifacts.Evidence()}, "no-evidence"),
        (decoding(filter_layers=(0, 1, 2)), "no-sparse-layer"),
        (decoding(budget=8192), "impossible-budget"),
        (cached("f", "f", "f", f=FULL), "nothing-freed"),
        (cached("s", "f", "f", s=Streaming(sinks=0, window=512), f=FULL), "no-sinks"),
        (cached("s", "f", "f", s=Streaming(sinks=4, window=8192), f=FULL), "impossible-budget"),
        (cached(None, "f", "s", s=STREAM, f=FULL), "sliding-layers"),
    ],
)
def test_each_finding(changes, code):
    artifact = good(**changes)
    if code == "no-tail":
        artifact = good(
            **uniform(AShape(sink=64, window=512), Dilated(sink=64, window=512, dilation=2))
        )
        artifact = artifact.model_copy(
            update={"prefill": artifact.prefill.model_copy(update={"dense_tail": 0})}
        )
    assert code in codes(artifact)
    assert code not in codes(good())


@pytest.mark.parametrize(
    ("growth", "lengths", "odd"),
    [
        ({"vertical_slash": {"slash": 0.5}}, (8192,), True),
        ({"vertical_slash": {"slash": 0.5}}, (8192, 8192), True),
        ({"vertical_slash": {"slash": 0.5}}, (4096, 8192), False),
        ({"vertical_slash": {"slash": 0.0}}, (8192,), False),
        ({}, (8192,), False),
    ],
)
def test_powers_that_nobody_fitted(growth, lengths, odd):
    grows = prefilled(growth=artifacts.Growth(length=8192, powers=growth))
    assert ("unfitted-growth" in codes(good(**grows, **calibrated(lengths=lengths)))) == odd


def test_a_pattern_is_looked_at_as_large_as_it_gets():
    """A window of 512 tokens at a length of 64 has grown beyond the model at its longest."""
    powers = artifacts.Growth(length=64, powers={"a_shape": {"window": 1.0}})
    assert "beyond-model" in codes(good(**prefilled(growth=powers)))
    assert "near-dense" in codes(good(**prefilled(growth=powers)))


def fronted(**changes):
    point = artifacts.Point(cost=1.0, speedup=2.0, kl=0.1, recall=0.9, density=0.2)
    front = artifacts.Front(
        length=8192, unit="flops", dense_cost=2.0, measured_on="held_out", points=(point,)
    )
    return prefilled(front=front.model_copy(update=changes))


def test_fronts_that_say_less_than_they_seem_to():
    assert codes(good(**fronted())) == codes(good())
    assert "front-below" in codes(good(**fronted(length=4000)))


def test_names_that_say_other_sizes():
    artifact = good()
    a, b = AShape(sink=64, window=512), AShape(sink=64, window=1024)
    patterns = {"a_64_512": b, "other": a}
    row = ("a_64_512", "other") * 2
    prefill = artifact.prefill.model_copy(update={"layers": (row, None, row)})
    assert "misnamed" in codes(
        artifact.model_copy(update={"patterns": patterns, "prefill": prefill})
    )


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


def test_low_recall_spares_dense_heads():
    arrays = good_arrays()
    arrays["chosen.recall"][2, 3] = 0.2
    assert "low-recall" not in codes(good(), arrays)
    arrays["chosen.recall"][2, 2] = 0.2
    assert "low-recall" in codes(good(), arrays)


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
    artifact = good(**prefilled(imported=IMPORT.model_copy(update={"scores": kind})))
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
