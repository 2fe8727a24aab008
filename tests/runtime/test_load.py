"""From an artifact's file to built patterns: front points, every kind, arrays of the sidecar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import artifacts
from artifacts import Front, HeadwiseError, Point
from kernels.patterns import make
from runtime import apply_dense, load
from runtime.layers import make_plans
from tests.runtime.conftest import search_info

FAST, MIDDLE, EXACT = "a_64_64", "bs_2", "vs_70_70"


def rows(model: Any, name: str) -> tuple[tuple[str, ...], ...]:
    return ((name,) * model.config.num_attention_heads,) * model.config.num_hidden_layers


@pytest.fixture
def saved(build, artifact_for, tmp_path):
    """Return a model and an artifact file whose rows are the middle point of its front."""
    model = build()
    artifact = artifact_for(model)
    patterns = {name: artifact.patterns[name] for name in (FAST, MIDDLE, EXACT)}
    figures = [(FAST, 1.0, 0.3, 0.7), (MIDDLE, 2.0, 0.2, 0.95), (EXACT, 4.0, 0.1, 0.9)]
    points = tuple(
        Point(
            cost=cost,
            speedup=8.0 / cost,
            kl=kl,
            recall=recall,
            density=0.5,
            layers=None if name == MIDDLE else rows(model, name),
        )
        for name, cost, kl, recall in figures
    )
    front = Front(length=200, unit="flops", dense_cost=8.0, measured_on="held_out", points=points)
    cost = artifacts.SearchCost(unit="flops", device="any")
    prefill = artifact.prefill.model_copy(update={"layers": rows(model, MIDDLE), "front": front})
    search = search_info(prefill.layers, patterns).model_copy(update={"cost": cost})
    changes = {"patterns": patterns, "search": search, "prefill": prefill}
    artifacts.save(artifact.model_copy(update=changes), tmp_path / "cfg.yaml")
    return model, tmp_path / "cfg.yaml"


@pytest.mark.parametrize(
    ("point", "name"),
    [
        (None, MIDDLE),
        ("speedup=4.1", FAST),
        ("speedup=4", MIDDLE),
        ("speedup=0.0", EXACT),
        ("kl=0.35", FAST),
        ("kl=0.2", MIDDLE),
        ("kl=0.19", EXACT),
        ("recall=0.5", FAST),
        ("recall=0.9", MIDDLE),
    ],
)
def test_load_with_point_uses_its_rows(saved, point, name):
    model, path = saved
    prefill = load(path, point=point).artifact.prefill
    assert prefill.layers == rows(model, name)
    assert (prefill.front is None) == (point is not None)


def test_load_warns_of_a_point_that_no_gate_measured(saved, tmp_path, caplog):
    verdict = artifacts.Verdict(proven=True, contexts=4, lost=0.0, lost_high=0.01, max_lost=0.05)
    artifact = artifacts.load(saved[1])
    evidence = artifacts.Evidence(verdict=verdict)
    path = tmp_path / "proven.yaml"
    artifacts.save(artifact.model_copy(update={"evidence": evidence}), path)
    for point in (None, "recall=0.9"):
        assert load(path, point=point).artifact.evidence == evidence
    assert not caplog.records
    assert load(path, point="speedup=8").artifact.evidence == artifacts.Evidence()
    assert "proven.yaml at speedup=8 is not proven: no gate has run" in caplog.text


@pytest.mark.parametrize(
    ("point", "values"),
    [
        ("speedup=9", ["cfg.yaml", "meets speedup=9", "from 2 to 8"]),
        ("kl=0.05", ["meets kl=0.05", "from 0.1 to 0.3"]),
        ("recall=0.99", ["meets recall=0.99", "from 0.7 to 0.95"]),
        ("kl=0.1,recall=0.9", ["point must be lost=X, speedup=X", "got 'kl=0.1,recall=0.9'"]),
        ("kl=-1.0", ["point must be", "got 'kl=-1.0'"]),
        ("kl=nan", ["point must be", "got 'kl=nan'"]),
        ("speedup=2x", ["point must be", "got 'speedup=2x'"]),
        ("cost=2", ["point must be", "got 'cost=2'"]),
        ("kl", ["point must be", "got 'kl'"]),
        (0.1, ["point must be", "got 0.1"]),
        ("kl=\n0", ["meets kl=0:"]),
    ],
)
def test_load_rejects_point_in_one_line(saved, point, values):
    with pytest.raises(HeadwiseError) as caught:
        load(saved[1], point=point)
    text = str(caught.value)
    assert text.isprintable() and all(value in text for value in values)


def test_handle_repr_names_model_artifact_and_sparse_layers(build, artifact_for, tmp_path):
    model = build(num_hidden_layers=4)
    rows = [["a_64_64"] * 3 + ["dense"], ["dense"] * 4, None, ["bs_2"] * 4]
    saved = artifacts.save(artifact_for(model, rows=rows), tmp_path / "cfg.yaml")
    model.name_or_path = "a/model"
    with load(tmp_path / "cfg.yaml").apply(model) as handle:
        text = repr(handle)
    assert "LlamaForCausalLM a/model" in text and "2 of 4 layers" in text
    assert saved.content_sha256[:12] in text
    assert repr(handle) == "<Handle: undone>"
    with apply_dense(model) as handle:
        assert "no artifact" in repr(handle) and "0 of 4 layers" in repr(handle)


def test_load_rejects_point_without_front(build, artifact_for, tmp_path):
    artifacts.save(artifact_for(build()), tmp_path / "cfg.yaml")
    why = r"cfg\.yaml: point 'kl=0\.1': the artifact has no front to choose from"
    with pytest.raises(HeadwiseError, match=why):
        load(tmp_path / "cfg.yaml", point="kl=0.1")


GOLDEN = Path(__file__).parents[1] / "artifacts" / "golden" / "v1.yaml"


def test_plan_builds_every_pattern_kind():
    """Check the golden artifact, which has every kind."""
    artifact = load(GOLDEN).artifact
    plans = make_plans(artifact)
    for layer, row in enumerate(artifact.prefill.layers):
        if row is None:
            assert layer not in plans
            continue
        written = [artifact.patterns[name].model_dump() for name in row]
        assert list(plans[layer].patterns) == [make(**fields) for fields in written]
    assert plans[3].patterns[1] == make("vertical_slash", vertical=100, slash=1800, coverage=0.95)
    assert plans[0].patterns[3] == make("block_sparse", blocks=9)
