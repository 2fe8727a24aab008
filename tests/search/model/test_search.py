"""headwise search with one budget for the model, as its users run it, on a tiny model."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import artifacts
from artifacts import Finding, HeadwiseError
from artifacts.schema.evidence import percent
from headwise.__main__ import main
from profiling.inside.head_fidelity import fidelity
from profiling.models.loading import load_model
from profiling.pictures.patterns import figure
from profiling.prompts.held_out import Seen
from profiling.prompts.prompt import digest
from profiling.quality.sequences import Reference, sequences
from runtime import load
from search.gate import plans_of
from search.model import scored_prompts, search, timed_costs
from search.model.allocation import spendable
from search.model.losses import context_losses, task_figures
from search.model.proof import KINDS
from search.study import study_name
from tests.processes import Process
from tests.search.model.conftest import (
    LENGTH,
    SMALL,
    TASKS,
    TIMED,
    UNPROVEN,
    content,
    interrupted,
    last_block,
    ledger_of,
    options,
)
from tests.search.model.made import heads_of
from tests.typed import HeldOut, make_prompts


@pytest.fixture
def scored(monkeypatch):
    """The layers that are scored, as they are."""
    layers: list[int] = []
    real = scored_prompts.score_layer

    def score_layer(layer: Any, *args: Any, **kwargs: Any) -> Any:
        layers.append(layer.inputs.layer)
        return real(layer, *args, **kwargs)

    monkeypatch.setattr(scored_prompts, "score_layer", score_layer)
    return layers


def test_search_writes_a_valid_pair_and_nothing_else(found):
    artifact = artifacts.load(found)
    assert artifact.sidecar is not None and artifact.search is not None
    assert {path.name for path in found.parent.iterdir()} == {"cfg.yaml", artifact.sidecar.file}
    search = artifact.search
    assert (search.allocation, search.cost.unit) == ("model", "flops")
    assert search.calibration.tasks == TASKS and search.calibration.length == LENGTH
    assert sum(search.summary.winners.values()) == 18
    assert artifact.prefill.dense_below == LENGTH // 2


def test_report_shows_result_and_next_command(found, tiny_model):
    report = (found.parents[1] / "report.txt").read_text()
    assert "patterns for 18 heads" in report and "counted and not timed" in report
    assert "held-out prompts against dense attention, with 95% intervals:" in report
    prose, passkey = artifacts.load(found).evidence.tasks
    assert f"passkey {'':18} KL {passkey.kl:.4f}" in report
    assert f"correct of {passkey.answers}: dense 0, artifact 0 (0 lost, 0 won)" in report
    assert f"perplexity {prose.perplexity_ratio - 1:+.2%}" in report
    assert report.endswith(f"headwise gate {found} --model {tiny_model} --task text:FILE\n")


def test_budget_wording_is_equal_in_report_page_and_map(found, capsys):
    artifact, arrays = artifacts.load_pair(found)
    search = artifact.search
    front = artifact.prefill.front
    assert search.budget == "0.65"
    # The budget that the gate spent equals that of the front and the sidecar.
    served = float(arrays["chosen.flops"].sum()) / front.dense_cost
    assert search.spent == pytest.approx(served, abs=1e-4) and search.spent <= 0.65
    spending = f"budget asked 0.65, spent {search.spent:.3f} of dense attention's operations"
    density = f"density {np.nanmean(arrays['chosen.density']):.3f} of tiles"
    report = (found.parents[1] / "report.txt").read_text()
    assert main(["show", str(found)]) == 0
    page = " ".join(capsys.readouterr().out.split())
    title = figure(artifact, None).get_suptitle().replace("\n", " ")
    for text in (report, page, title):
        assert spending in text and density in text


def test_front_is_ascending_and_selection_is_within_budget(found):
    artifact, arrays = artifacts.load_pair(found)
    front = artifact.prefill.front
    assert front is not None and len(front.points) > 1 and front.measured_on == "held_out"
    for cheap, dear in pairwise(front.points):
        assert cheap.cost < dear.cost and cheap.kl > dear.kl and cheap.speedup > dear.speedup
    spent = float(arrays["chosen.flops"].sum())
    assert 0.55 * front.dense_cost < spent <= 0.65 * front.dense_cost * (1 + 1e-6)
    assert artifact.prefill.dense_tail in (64, 256)
    assert any(point.cost == pytest.approx(spent, rel=1e-5) for point in front.points)
    np.testing.assert_allclose(
        artifact.search.summary.density, np.nanmean(arrays["chosen.density"]), rtol=1e-5
    )


def test_evidence_equals_held_out_measurement(found, tiny_model):
    artifact, arrays = artifacts.load_pair(found)
    loaded = load_model(str(tiny_model), dtype="float32")
    sizes: dict[str, Any] = {"length": LENGTH, "samples": 1, "seed": 0}
    calibration = [p for task in TASKS for p in make_prompts(task, loaded.tokenizer, **sizes)]
    held_out = HeldOut(TASKS, loaded, **sizes, seen=Seen(calibration))
    prompts = [prompt for kind in KINDS for prompt in held_out.take(kind, 4)]
    reference = Reference(loaded.model, sequences(prompts, loaded.tokenizer))
    plans = plans_of(artifact, LENGTH)
    losses = [reference.losses(number, plans) for number in range(len(reference.sequences))]
    assert artifact.search is not None and artifact.evidence is not None
    assert artifact.search.calibration.sha256 == digest(calibration)
    assert artifact.evidence.chosen_on is None
    measured = task_figures(context_losses(reference.sequences, losses))
    for figures, task in zip(artifact.evidence.tasks, measured, strict=True):
        assert (figures.task, figures.prompts) == (task.task, task.prompts)
        assert figures.kl == pytest.approx(task.kl, rel=1e-4)
        if task.nll_rise is None:
            assert figures.perplexity_ratio == pytest.approx(task.perplexity_ratio, rel=1e-4)
            assert (figures.nll_rise, figures.dense_right, figures.lost) == (None, None, None)
        else:
            assert figures.nll_rise == pytest.approx(task.nll_rise, rel=1e-4)
            assert (figures.perplexity_ratio, figures.answers) == (None, task.answers)
            assert (figures.dense_right, figures.lost) == (task.dense_right, task.lost)
    # Prompts used by calibration and the gate are identified by their tokens.
    seen = Seen.by([arrays])
    assert all(map(seen.overlaps, [*calibration, *prompts]))
    # Scores are estimates from some tiles; at this length all are taken.
    errors = [fidelity(loaded.model, artifact, prompt).error for prompt in calibration]
    np.testing.assert_allclose(arrays["chosen.error"], np.mean(errors, 0), rtol=2e-3, atol=1e-5)


def test_front_points_can_be_applied(found, tiny_model):
    loaded = load_model(str(tiny_model), dtype="float32")
    front = artifacts.load(found).prefill.front
    assert front is not None
    ids = torch.randint(0, 250, (1, LENGTH))
    far = []
    with torch.no_grad():
        dense = loaded.model(ids).logits
        for point in (front.points[0], front.points[-1]):
            with load(found, point=f"kl={point.kl}").apply(loaded.model, strict=True):
                far.append(float((loaded.model(ids).logits - dense).norm()))
    assert far[0] > far[1]


def test_study_has_each_measured_allocation(found):
    import optuna

    storage = f"sqlite:///{found.parents[1]}/study.db"
    study = optuna.load_study(study_name=study_name("search", found), storage=storage)
    assert study.metric_names == [*reversed(TASKS), "cost"]
    artifact, arrays = artifacts.load_pair(found)
    sets = [trial.user_attrs["prompts"] for trial in study.trials]
    assert sets[:2] == ["calibration prompts", "round 1"]
    assert set(sets[2:]) == {"first contexts of round 1"}
    assert {trial.state.name for trial in study.trials} == {"COMPLETE"}
    measured = {trial.user_attrs["flops"] for trial in study.trials[2:]}
    assert {point.cost for point in artifact.prefill.front.points} <= measured
    # The accepted allocation: losses by task and cost, equal to those of the artifact.
    accepted = study.trials[1]
    prose, passkey = artifact.evidence.tasks
    losses = [prose.kl, passkey.kl + max(0.0, passkey.nll_rise)]
    assert accepted.values == pytest.approx([*losses, artifact.search.spent], abs=1e-4)
    assert accepted.params["cost"] == accepted.values[2] <= accepted.params["budget"] <= 0.65
    assert accepted.params["dense_tail"] == artifact.prefill.dense_tail
    assert accepted.params["answer_weight"] > 0
    attributes = accepted.user_attrs
    assert attributes["density"] == pytest.approx(artifact.search.summary.density, rel=1e-5)
    assert attributes["flops"] == pytest.approx(float(arrays["chosen.flops"].sum()), rel=1e-5)


def test_search_without_a_budget_takes_the_least_that_is_proven(tiny_model, tmp_path, capsys):
    """The limits of a random model are wide; the first budget that is tried may be too small."""
    out = tmp_path / "cfg.yaml"
    words = options(tiny_model, out, budget=None, max_perplexity="0.4", task="prose")
    assert main(["search", *words]) == 0
    artifact, arrays = artifacts.load_pair(out)
    search = artifact.search
    verdict = artifact.evidence.verdict
    assert search.budget is None and verdict.proven
    assert verdict.perplexity <= verdict.perplexity_high <= verdict.max_perplexity == 0.4
    assert search.spent == pytest.approx(
        arrays["chosen.flops"].sum() / artifact.prefill.front.dense_cost, abs=1e-4
    )
    # Every round is a measured point of the frontier; the others are predicted.
    measured = [point for point in search.frontier if point.measured]
    assert any(point.spent == search.spent for point in measured)
    assert 5 <= len(search.frontier) <= 10 and len(measured) < len(search.frontier)
    costs = [point.spent for point in search.frontier]
    assert costs == sorted(costs)
    output = capsys.readouterr().out
    assert "set by the limits" in output and "measured, in the artifact" in output
    assert f"at most {percent(verdict.perplexity_high)} more perplexity" in output


@pytest.mark.parametrize(("budget", "max_lost"), [(None, "0.05"), (None, "1"), ("0.65", "1")])
def test_search_of_a_model_that_answers_nothing_is_written_as_not_proven(
    budget, max_lost, tiny_model, out, capsys
):
    """There is no correct answer to lose, so no budget can be better than another."""
    words = options(tiny_model, out, budget=budget, max_lost=max_lost)
    assert main(["search", *words]) == 3
    first, *_ = last_block(capsys)
    assert re.match(
        r"result: not proven: dense attention answers none of \d+ questions corr", first
    )
    assert not artifacts.load(out).evidence.verdict.proven


def test_cheaper_budget_is_not_proven_by_the_texts_that_are_left(
    tiny_model, tmp_path, monkeypatch, capsys
):
    """Calibration and first round use own.txt up: what is left is prose alone."""
    monkeypatch.chdir(tmp_path)
    text = "".join(f"{number}. " for number in range(2000))
    Path("own.txt").write_text(text[: 5 * LENGTH])
    changes = {"budget": None, "task": "text:own.txt prose", "max_perplexity": "0.2"}
    assert main(["search", *options(tiny_model, tmp_path / "cfg.yaml", **changes)]) == 0
    says = "a cheaper budget cannot be tested: text:own.txt has no text left that the search has no"
    assert says in capsys.readouterr().err
    evidence = artifacts.load(tmp_path / "cfg.yaml").evidence
    assert evidence.verdict.proven and evidence.chosen_on is None
    assert {task.task for task in evidence.tasks} == {"text:own.txt", "prose"}


def test_budget_that_is_not_proven_is_written_and_says_so_first(tiny_model, out, capsys):
    assert main(["search", *options(tiny_model, out, max_perplexity="0.0001")]) == 3
    first, *_ = last_block(capsys)
    assert first.startswith("result: not proven: ") and "--max-perplexity" in first
    artifact = artifacts.load(out)
    assert not artifact.evidence.verdict.proven and artifact.search.budget == "0.65"
    assert main(["search", "--keep", *options(tiny_model, out, max_perplexity="0.0001")]) == 0


def test_resumed_search_reuses_timings(tiny_model, tmp_path, clock, monkeypatch):
    out = tmp_path / "cfg.yaml"
    with monkeypatch.context() as patch:
        patch.setattr("search.model.record.save_searched", interrupted)
        with pytest.raises(KeyboardInterrupt):
            main(["search", *options(tiny_model, out, **TIMED)])
    assert not out.exists() and len(clock.attention) == 9
    assert main(["search", *options(tiny_model, out, **TIMED)]) == 0
    assert (len(clock.attention), len(clock.prefills)) == (9, 6) and not ledger_of(out).exists()


@pytest.mark.slow
def test_search_result_is_independent_of_rank_count(small, tiny_model, tmp_path):
    out = tmp_path / "cfg.yaml"
    words = [*options(tiny_model, out, **SMALL), "--keep"]
    code, _, output = Process("headwise", "search", *words, ranks=2).finish()
    assert code == 0, output
    assert content(out) == content(small) and not ledger_of(out).exists()
    sidecars = [path.with_name(artifacts.load(path).sidecar.file) for path in (out, small)]
    assert sidecars[0].read_bytes() == sidecars[1].read_bytes()


def test_resumed_search_ignores_timings_of_another_machine(tiny_model, out, monkeypatch):
    """A resumed search does not use times of another thread count; they serve all budgets."""
    taken: list[int] = []
    real = timed_costs._time
    times: list[Any] = []

    def timed(*args: Any) -> Any:
        taken.append(1)
        if not times:
            times.append(real(*args))
        return times[0]

    monkeypatch.setattr(timed_costs, "_time", timed)
    monkeypatch.setattr(
        "profiling.speed.layer_times.time_calls", lambda runs, **_: {name: [1e-3] for name in runs}
    )
    # Beyond the times nothing is of interest here.
    monkeypatch.setattr(search, "spendable", interrupted)
    for count, budget in ((1, "0.7"), (1, "0.7"), (1, "0.6")):
        with pytest.raises(KeyboardInterrupt):
            main(["search", *options(tiny_model, out, cost="seconds", budget=budget)])
        assert len(taken) == count
    other = {"device": "cpu", "threads": "64"}
    monkeypatch.setattr(timed_costs, "environment", lambda device: dict(other))
    with pytest.raises(KeyboardInterrupt):
        main(["search", *options(tiny_model, out, cost="seconds", budget="0.7")])
    assert len(taken) == 2


def test_search_with_another_budget_reuses_curves_of_a_failed_one(
    tiny_model, out, scored, monkeypatch
):
    def fails(*args: Any, **options: Any) -> Any:
        raise Finding("not proven")

    with monkeypatch.context() as patch:
        patch.setattr(search, "gate", fails)
        with pytest.raises(Finding):
            main(["search", *options(tiny_model, out)])
    for changes, says in (
        (
            {"budget": "0.05"},
            r"--budget 0\.05 is impossible at 512 tokens: the cheapest candidates cost 0\.",
        ),
        ({"task": "passkey"}, r"its tasks is .* not .*passkey.*; repeat that command.*--fresh"),
        ({"dtype": "bfloat16"}, "its dtype is 'float32', not 'bfloat16'"),
    ):
        with pytest.raises(HeadwiseError, match=says) as error:
            main(["search", *options(tiny_model, out, **changes)])
        assert "\n" not in str(error.value)
    assert list(out.parent.iterdir()) == [ledger_of(out)]
    assert main(["search", *options(tiny_model, out, budget="0.7")]) == UNPROVEN
    assert scored == []


def test_search_with_layer_streaming_returns_the_same_result(small, tiny_model, tmp_path):
    def load(bytes_: int | None) -> Any:
        return load_model(str(tiny_model), dtype="float32", max_memory=bytes_).model

    model = load(None)
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    layers = [sum(weight.nbytes for weight in layer.parameters()) for layer in model.model.layers]
    some = sum(each.weight.nbytes for each in embeddings) + max(layers) * 3 // 2
    assert load(some).hf_device_map["model.layers.2"] == "disk"
    out = tmp_path / "cfg.yaml"
    assert (
        main(["search", *options(tiny_model, out, "--max-memory", str(some), **SMALL)]) == UNPROVEN
    )
    assert content(out) == content(small)
    with pytest.raises(HeadwiseError, match="its embeddings take"):
        load(1000)


def test_duplicate_tasks_share_one_search(small, tiny_model, tmp_path, scored):
    out = tmp_path / "cfg.yaml"
    words = options(tiny_model, out, **SMALL | {"task": "passkey passkey"})
    assert main(["search", *words]) == UNPROVEN
    assert len(scored) == 3 and content(out) == content(small)


def test_search_without_gradients_uses_output_change_and_reports_it(
    tiny_model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("profiling.inside.gradients._head_of", lambda model, ids: None)
    out = tmp_path / "cfg.yaml"
    assert main(["search", *options(tiny_model, out, **SMALL)]) == UNPROVEN
    assert "no gradients (" in capsys.readouterr().err
    artifact, arrays = artifacts.load_pair(out)
    assert artifact.search is not None and "makes its logits in a way of its own" in (
        artifact.search.gradient_fault or ""
    )
    np.testing.assert_allclose(arrays["chosen.objective"], arrays["chosen.change"], rtol=1e-5)


def test_budget_below_the_cheapest_candidates_is_refused():
    heads = heads_of(0, heads=4, candidates=8)
    costs = {tail: 0.5 + 0.5 * costs / np.nanmax(costs) for tail, costs in heads.costs.items()}
    heads = replace(heads, costs=costs, all_keys=1.0)
    minimum = min(map(heads.least, heads.curves))
    share = heads.share(minimum)
    assert spendable(heads, 1.1 * share, length=128) == pytest.approx(1.1 * minimum)
    says = r"--budget .* is impossible at 128 tokens: the cheapest candidates cost 0\."
    with pytest.raises(HeadwiseError, match=says):
        spendable(heads, share, length=128)
