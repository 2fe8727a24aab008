"""headwise search with one budget for the model, as its users run it, on a tiny model."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import artifacts
from artifacts import Finding, HeadwiseError
from headwise.__main__ import main
from profiling.inside.head_fidelity import fidelity
from profiling.ledger import Ledger
from profiling.models.loading import load_model
from profiling.pictures.patterns import figure
from profiling.prompts.held_out import Seen
from profiling.prompts.prompt import digest, make_prompts
from profiling.quality.sequences import Reference, sequences
from profiling.speed.baselines import HEADWISE, KERNEL
from profiling.speed.layer_times import ANCHOR, SDPA
from runtime import load
from search.gate import plans_of
from search.model import scored_prompts, search, timed_costs
from search.model.allocation import spendable
from search.model.config import ModelSearch
from search.model.limits import Limits
from search.model.losses import context_losses, task_figures
from search.model.prompts import held_out_prompts, held_out_sets
from search.model.speed import another_round
from tests.processes import Process
from tests.search.model.made import heads_of

LENGTH = 512
TASKS = ("passkey", "prose")
LIMITS = ("max_kl", "max_perplexity", "max_nll")


def options(model: Path, at: Path, *more: str, **changes: str | None) -> list[str]:
    values = {
        "model": str(model),
        "out": str(at),
        "length": str(LENGTH),
        "task": " ".join(TASKS),
        "budget": "0.65",
        "cost": "flops",
        "dtype": "float32",
        # A random model has no head that can do without much.
        **dict.fromkeys(LIMITS, "9"),
        "max_lost": "1",
        **changes,
    }
    words = ["--no-picture", *more]
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "task":
            words += [word for task in value.split() for word in (flag, task)]
        elif value is not None:
            words += [flag, *value.split()]
    return words


def content(path: Path) -> str | None:
    return artifacts.load(path).content_sha256


def ledger_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.heads.ledger")


@pytest.fixture(scope="module")
def found(tiny_model, tmp_path_factory):
    """Read-only artifact of a search; its resume file and report are next to its folder."""
    folder = tmp_path_factory.mktemp("found")
    out = folder / "out" / "cfg.yaml"
    out.parent.mkdir()
    remove = Ledger.remove

    def kept(ledger: Ledger) -> None:
        shutil.copytree(ledger.folder, folder / "units")
        remove(ledger)

    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output):
        patch.setattr(Ledger, "remove", kept)
        assert main(["search", *options(tiny_model, out)]) == 0
    (folder / "report.txt").write_text(output.getvalue())
    return out


# A search that takes less, for those that are to find the same again.
SMALL: dict[str, str | None] = {"task": "passkey"}


@pytest.fixture(scope="module")
def small(tiny_model, tmp_path_factory):
    """The artifact of a small search; not to be written to."""
    out = tmp_path_factory.mktemp("small") / "cfg.yaml"
    assert main(["search", *options(tiny_model, out, **SMALL)]) == 0
    return out


@pytest.fixture
def out(found, tmp_path):
    """Output file of a search that resumes from the jobs that `found` finished."""
    out = tmp_path / "cfg.yaml"
    shutil.copytree(found.parents[1] / "units", ledger_of(out))
    return out


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
    assert "held-out prompts against dense attention:" in report
    passkey, prose = artifacts.load(found).evidence.tasks
    assert f"passkey {'':18} KL {passkey.kl:.4f}" in report
    assert f"accuracy dense 0.00, artifact 0.00 of {passkey.answers} questions" in report
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
    prompts = held_out_prompts(TASKS, loaded, **sizes, seen=Seen(calibration), number=0)
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


@pytest.mark.parametrize("sets", [2, 1])
def test_prompts_that_raise_the_budget_are_held_out_only_if_others_report(
    sets, found, tiny_model, out, monkeypatch, capsys
):
    """A text may be too short for a second set of prompts."""
    # The first held-out prompts fail, and from there on all pass.
    verdicts = iter(["prose: too much is lost"])
    monkeypatch.setattr(Limits, "violation", lambda self, tasks: next(verdicts, None))
    monkeypatch.setattr(search, "held_out_sets", lambda *args: islice(held_out_sets(*args), sets))
    assert main(["search", *options(tiny_model, out)]) == 0
    artifact, arrays = artifacts.load_pair(out)
    chosen_on = artifact.evidence.chosen_on
    reported_on = artifact.evidence.reported_on
    before = artifacts.load(found).evidence.reported_on
    # Where a task failed the others did not choose.
    assert 0 < chosen_on.prompts < reported_on.prompts == before.prompts
    assert arrays["chosen.flops"].sum() > 0.5 * artifact.prefill.front.dense_cost
    assert (reported_on.sha256 == before.sha256) == (sets == 1)
    output = capsys.readouterr().out
    if sets == 1:
        assert chosen_on.name == reported_on.name == "by which the budget was raised"
        assert artifact.prefill.front.measured_on == "calibration"
        assert "held-out prompts" not in output and f"prompts {reported_on.name}" in output
    else:
        assert (reported_on.name, artifact.prefill.front.measured_on) == ("held-out", "held_out")
        assert "held-out prompts (others raised the budget)" in output


@dataclass
class Clock:
    """A made-up clock: every run is real, and takes as long as this says.

    dense: attention of a layer over every key; sparse: by the patterns that were accepted;
    candidates take 0.1 ms.

    sdpa: by torch, relative to dense. first_token: times as fast as dense attention to the first
    token, round by round, over and over. attention: its timed calls, as (tokens, names,
    whether one turn is not counted). prefills: the ways of each round."""

    dense: float = 1e-3
    sparse: float = 1e-4
    sdpa: float = 1.0
    first_token: tuple[float, ...] = (2.0,)
    attention: list[tuple[int, list[str], bool]] = field(default_factory=list)
    prefills: list[list[str]] = field(default_factory=list)

    def in_turn(
        self, runs: Mapping[str, Callable[[], Any]], *, warm_up: bool, **_: Any
    ) -> dict[str, list[float]]:
        (tokens,) = {run().shape[2] for run in runs.values()}
        self.attention.append((tokens, list(runs), warm_up))
        is_dense = {name: name in (ANCHOR, SDPA) or name.startswith("Dense") for name in runs}
        candidates = {name: [self.dense if is_dense[name] else 1e-4] for name in runs}
        if SDPA in candidates:
            candidates[SDPA] = [self.dense * self.sdpa]
        return candidates | ({"chosen": [self.sparse]} if "chosen" in runs else {})

    def interleaved(
        self, ways: Any, run: Any, *, repeats: int, device: str
    ) -> dict[str, list[float]]:
        for enter in ways.values():
            with enter():
                run()
        taken = self.first_token[len(self.prefills) % len(self.first_token)]
        self.prefills.append(list(ways))
        return {name: [1.0 if name == HEADWISE else taken] for name in ways}


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("profiling.speed.layer_times.in_turn", clock.in_turn)
    monkeypatch.setattr("search.model.speed.interleaved", clock.interleaved)
    # As many rounds as there may be, however quick the search was.
    monkeypatch.setattr("search.model.speed._SHARE", 1e9)
    return clock


# By such a clock an allocation takes as long whatever it computes, so that cheap ones look dear.
TIMED: dict[str, str | None] = {"cost": "seconds", "budget": "0.7"}


def last_block(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines of the report from the verdict on."""
    return capsys.readouterr().out.split("\n\n")[-1].splitlines()


def test_seconds_cost_times_candidates_and_the_result(tiny_model, out, clock, capsys):
    """Dense attention takes ten times as long as patterns, and a full prefill twice as long."""
    assert main(["search", *options(tiny_model, out, **TIMED)]) == 0
    artifact = artifacts.load(out)
    assert artifact.search is not None and artifact.search.cost.unit == "seconds"
    assert artifact.prefill.dense_below == LENGTH // 2
    whole, *attention = artifact.evidence.measurements
    assert whole.name == "seconds to the first token"
    assert (whole.value, whole.baseline, whole.samples) == (1.0, 2.0, 6)
    assert whole.baseline_name == "dense attention by Headwise's kernel"
    assert [one.value for one in attention] == pytest.approx([3e-4] * 3)
    by_baseline = {one.baseline_name: one for one in attention}
    assert by_baseline["dense attention by sdpa"].baseline == pytest.approx(3e-3)
    # Three budgets, and some of every kind, on each layer; then the result, also on half the
    # prompt.
    costs = clock.attention[:3]
    timed = clock.attention[3:]
    kinds = {name.partition("(")[0] for name in costs[0][1]}
    patterns = {"AShape", "VerticalSlash", "BlockSparse", "SkipSoftmax", "Dense"}
    assert kinds == {"0", "1", "2", ANCHOR} | patterns
    # Estimates of more queries are added to these times, so none of them uses more queries.
    assert not any("last_q=256" in name for name in costs[0][1])
    assert [names for _, names, _ in timed[:2]] == [["chosen", ANCHOR, SDPA]] * 2
    assert [tokens for tokens, _, _ in timed] == [LENGTH // 2, LENGTH] * 3
    # One turn is not counted where each length is timed first.
    warm_ups = [first for _, _, first in clock.attention]
    assert warm_ups == [True, False, False, True, True, *[False] * 4]
    # Only against the fastest dense baseline, interleaved.
    assert clock.prefills == [[KERNEL, HEADWISE]] * 6
    block = last_block(capsys)
    assert block[0].startswith(
        "2.0 -> 1.0 s to the first token at 512 tokens (2.00x the fastest dense attention's, 2.00 "
        "to 2.00 in 6 rounds); attention alone 10.00x; not proven: 0 right answers of 4 contexts; "
    )
    assert block[1].startswith("budget asked 0.7, spent 0.")
    assert block[2].startswith(f"wrote {out}, ") and "headwise gate " in block[3]
    verdict = artifacts.Verdict(proven=False, why="0 right answers of 4 contexts")
    assert artifact.evidence.verdict == verdict


@pytest.mark.parametrize(
    ("attention", "first_token", "says"),
    [
        (1.04, (2.0,), "1.04x; "),
        (
            10,
            (0.98, 0.97, 0.99),
            "0.98x to the first token (0.97 to 0.99 in 6 rounds), attention alone 10.00x; ",
        ),
    ],
)
def test_search_without_speedup_writes_only_on_request(
    attention, first_token, says, tiny_model, out, clock, capsys
):
    """Attention gains too little, or the full prefill is slower despite the gain."""
    clock.sparse = clock.dense / attention
    clock.first_token = first_token
    keep = attention == 10
    assert main(["search", *options(tiny_model, out, *["--keep"] * keep, **TIMED)]) == (
        0 if keep else 3
    )
    block = last_block(capsys)
    assert block[0].startswith(f"not worth serving at 512 tokens: {says}") and clock.prefills
    if keep:
        assert block[2].startswith(f"wrote {out}, ") and artifacts.load(out).search is not None
    else:
        assert "--keep" in block[-1] and not list(out.parent.iterdir())


@pytest.mark.parametrize("first_token", [(0.9, 1.2, 1.1), (0.9, 0.95, 1.02)])
def test_search_with_gain_within_noise_is_written_and_exits_3(
    first_token, tiny_model, out, clock, capsys
):
    """If the rounds disagree, no median decides, above or below 1."""
    clock.first_token = first_token
    assert main(["search", *options(tiny_model, out, **TIMED)]) == 3
    block = last_block(capsys)
    assert block[0].startswith("not proven faster: ")
    interval = f"{min(first_token):.2f} to {max(first_token):.2f} in 6 rounds"
    again = f"headwise evaluate {out} --model {tiny_model} --speed-only"
    assert interval in block[0] and again in block[0]
    assert artifacts.load(out).search is not None and block[2].startswith(f"wrote {out}, ")


def test_search_with_gain_within_noise_exits_0_with_keep(tiny_model, out, clock, capsys):
    clock.first_token = (0.9, 1.2)
    assert main(["search", *options(tiny_model, out, "--keep", **TIMED)]) == 0
    assert last_block(capsys)[0].startswith("not proven faster: ")


def test_sdpa_slower_on_half_the_prompt_is_not_timed_on_all(tiny_model, out, clock, capsys):
    clock.sdpa = 2.0
    assert main(["search", *options(tiny_model, out, **TIMED)]) == 0
    timed = [(tokens, SDPA in names) for tokens, names, _ in clock.attention[3:]]
    assert timed[:2] == [(LENGTH // 2, True), (LENGTH, False)]
    assert not any(sdpa for tokens, sdpa in timed if tokens == LENGTH)
    _, *attention = artifacts.load(out).evidence.measurements
    by_baseline = {one.baseline_name: one for one in attention}
    sdpa = by_baseline["dense attention by sdpa"]
    assert (sdpa.length, sdpa.baseline) == (LENGTH // 2, pytest.approx(6e-3))
    assert by_baseline["dense attention by Headwise's kernel"].length == LENGTH
    assert "default attention (sdpa): 2.00 times as long" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("done", "seconds", "limit", "another"),
    [
        (0, 0.0, 0.0, True),
        (2, 60.0, 1.0, True),
        (3, 90.0, 100.0, False),
        (3, 90.0, 120.0, True),
        (5, 5.0, 100.0, True),
        (6, 6.0, 100.0, False),
    ],
)
def test_prefill_rounds_are_three_or_more_within_the_limit(done, seconds, limit, another):
    assert another_round(done, seconds, limit) == another


def test_search_without_gain_suggests_longer_prompt_and_leaves_old_file(
    found, tiny_model, out, clock, capsys
):
    artifact, arrays = artifacts.load_pair(found)
    artifacts.save(artifact, out, arrays)
    before = {path.name: path.read_bytes() for path in out.parent.iterdir() if path.is_file()}
    clock.sparse = clock.dense
    assert main(["search", *options(tiny_model, out, **TIMED | {"budget": None})]) == 3
    block = last_block(capsys)
    # The model has 1,024 positions.
    assert block[0] == "not worth serving at 512 tokens: 1.00x; try --length 1024"
    assert block[1].startswith("budget asked 0.25, spent ")
    # A prefill of which nothing would be sparse is not timed.
    assert not clock.prefills
    assert {path.name: path.read_bytes() for path in out.parent.iterdir()} == before


def test_flops_cost_decides_by_count(tiny_model, out, capsys):
    assert main(["search", *options(tiny_model, out, budget="0.99")]) == 3
    says = (
        r"not worth serving at 512 tokens: 1\.0\dx fewer FLOPs of attention, counted and not "
        r"timed; try a smaller --budget"
    )
    assert re.fullmatch(says, last_block(capsys)[0])
    assert not list(out.parent.iterdir())


def interrupted(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt


def test_resumed_search_reuses_timings(tiny_model, out, clock, monkeypatch):
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
    words = options(tiny_model, out, **SMALL)
    code, _, output = Process("headwise", "search", *words, ranks=2).finish()
    assert code == 0, output
    assert content(out) == content(small) and not ledger_of(out).exists()
    sidecars = [path.with_name(artifacts.load(path).sidecar.file) for path in (out, small)]
    assert sidecars[0].read_bytes() == sidecars[1].read_bytes()


def test_resumed_search_ignores_timings_of_other_machine_or_budget(tiny_model, out, monkeypatch):
    """A resumed search does not use times of another budget or thread count."""
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
        "profiling.speed.layer_times.in_turn", lambda runs, **_: {name: [1e-3] for name in runs}
    )
    # Beyond the times nothing is of interest here.
    monkeypatch.setattr(search, "spendable", interrupted)
    for count, budget in ((1, "0.7"), (1, "0.7"), (2, "0.6")):
        with pytest.raises(KeyboardInterrupt):
            main(["search", *options(tiny_model, out, cost="seconds", budget=budget)])
        assert len(taken) == count
    other = {"device": "cpu", "threads": "64"}
    monkeypatch.setattr(timed_costs, "environment", lambda device: dict(other))
    with pytest.raises(KeyboardInterrupt):
        main(["search", *options(tiny_model, out, cost="seconds", budget="0.7")])
    assert len(taken) == 3


def test_search_with_another_budget_reuses_curves_of_a_failed_one(
    tiny_model, out, scored, monkeypatch
):
    def fails(*args: Any) -> Any:
        raise Finding("the gate: nothing passes")

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
    assert main(["search", *options(tiny_model, out, budget="0.7")]) == 0 and scored == []


def test_search_with_storage_records_each_measured_allocation(tiny_model, out):
    import optuna

    url = f"sqlite:///{out.parent}/study.db"
    assert main(["search", *options(tiny_model, out, storage=url)]) == 0
    study = optuna.load_study(study_name="cfg", storage=url)
    assert study.metric_names == [*TASKS, "cost"]
    artifact, arrays = artifacts.load_pair(out)
    points = artifact.prefill.front.points
    sets = [trial.user_attrs["prompts"] for trial in study.trials]
    # Refinement, the gate's set, and the frontier, whose points that others beat are trials, too.
    assert sets[:2] == ["calibration prompts", "held-out set 1"] and len(sets) >= 2 + len(points)
    assert set(sets[2:]) == {"first contexts of held-out set 1"}
    assert {trial.state.name for trial in study.trials} == {"COMPLETE"}
    measured = {trial.user_attrs["flops"] for trial in study.trials[2:]}
    assert {point.cost for point in points} <= measured
    # The accepted allocation: losses by task and cost, equal to those of the artifact.
    accepted = study.trials[1]
    passkey, prose = artifact.evidence.tasks
    losses = [passkey.kl + max(0.0, passkey.nll_rise), prose.kl]
    assert accepted.values == pytest.approx([*losses, artifact.search.spent], abs=1e-4)
    assert accepted.params["cost"] == accepted.values[2] <= 0.65
    assert accepted.params["dense_tail"] == artifact.prefill.dense_tail
    assert accepted.params["answer_weight"] > 0
    attributes = accepted.user_attrs
    assert [attributes[name] for name in study.metric_names] == accepted.values
    assert attributes["density"] == pytest.approx(artifact.search.summary.density, rel=1e-5)
    assert attributes["flops"] == pytest.approx(float(arrays["chosen.flops"].sum()), rel=1e-5)
    # The dashboard's Pareto front, and the importance of each parameter.
    assert study.best_trials
    importance = optuna.importance.get_param_importances(study, target=lambda t: t.values[1])
    assert "cost" in importance


def test_search_with_storage_records_seconds_and_a_failed_set_without_values(
    tiny_model, out, clock, monkeypatch
):
    import optuna

    url = f"sqlite:///{out.parent}/study.db"
    verdicts = iter(["prose: too much is lost"])
    monkeypatch.setattr(Limits, "violation", lambda self, tasks: next(verdicts, None))
    assert main(["search", *options(tiny_model, out, storage=url, **TIMED)]) == 0
    study = optuna.load_study(study_name="cfg", storage=url)
    _, failed, passed, *_ = study.trials
    # The first task failed, so that the other was not measured.
    assert failed.state.name == "FAIL" and failed.values is None
    assert failed.user_attrs["prompts"] == "held-out set 1" and "prose" in failed.user_attrs
    assert passed.user_attrs["prompts"] == "held-out set 2" and passed.state.name == "COMPLETE"
    spent = artifacts.load(out).search.spent
    assert passed.user_attrs["seconds"] > 0 and passed.values[2] == pytest.approx(spent, abs=1e-4)


def test_search_with_storage_records_losses_of_other_calibration_tasks(
    tiny_model, out, monkeypatch
):
    """Losses of tasks without held-out prompts are not values of the study."""
    import optuna

    url = f"sqlite:///{out.parent}/study.db"
    held_out = property(lambda self: ("prose",))
    monkeypatch.setattr(ModelSearch, "held_out_tasks", held_out)
    assert main(["search", *options(tiny_model, out, "--fresh", storage=url, **SMALL)]) == 0
    study = optuna.load_study(study_name="cfg", storage=url)
    assert study.metric_names == ["prose", "cost"]
    calibration, *trials = study.trials
    assert calibration.values is None and calibration.user_attrs["passkey"] > 0
    assert all(len(trial.values) == 2 for trial in trials)


def test_search_with_layer_streaming_returns_the_same_result(small, tiny_model, tmp_path):
    def load(bytes_: int | None) -> Any:
        return load_model(str(tiny_model), dtype="float32", max_memory=bytes_).model

    model = load(None)
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    layers = [sum(weight.nbytes for weight in layer.parameters()) for layer in model.model.layers]
    some = sum(each.weight.nbytes for each in embeddings) + max(layers) * 3 // 2
    assert load(some).hf_device_map["model.layers.2"] == "disk"
    out = tmp_path / "cfg.yaml"
    assert main(["search", *options(tiny_model, out, "--max-memory", str(some), **SMALL)]) == 0
    assert content(out) == content(small)
    with pytest.raises(HeadwiseError, match="its embeddings take"):
        load(1000)


def test_duplicate_tasks_share_one_search(tiny_model, tmp_path, scored, monkeypatch):
    out = tmp_path / "cfg.yaml"
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "remove", lambda self: None)
        assert main(["search", *options(tiny_model, out, **SMALL)]) == 0
    before = len(scored)
    artifact = artifacts.load(out)
    assert main(["search", *options(tiny_model, out, **SMALL | {"task": "passkey passkey"})]) == 0
    assert len(scored) == before and content(out) == artifact.content_sha256
    assert artifact.prefill.length == artifact.search.calibration.length


def test_search_without_gradients_uses_output_change_and_reports_it(
    tiny_model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("profiling.inside.gradients._head_of", lambda model, ids: None)
    out = tmp_path / "cfg.yaml"
    assert main(["search", *options(tiny_model, out, **SMALL)]) == 0
    assert "no gradients (" in capsys.readouterr().err
    artifact, arrays = artifacts.load_pair(out)
    assert artifact.search is not None and "makes its logits in a way of its own" in (
        artifact.search.gradient_fault or ""
    )
    np.testing.assert_allclose(arrays["chosen.objective"], arrays["chosen.change"], rtol=1e-5)


def test_spendable_budget_exceeds_cheapest_candidates():
    heads = heads_of(0, heads=4, candidates=8)
    costs = {tail: 0.5 + 0.5 * costs / np.nanmax(costs) for tail, costs in heads.costs.items()}
    heads = replace(heads, costs=costs, all_keys=1.0)
    minimum = min(map(heads.least, heads.curves))
    total, why = spendable(heads, 0.25, is_explicit=False, length=128)
    assert minimum < total < heads.total(1.0) and total == pytest.approx(
        minimum + 0.25 * (heads.total(1.0) - minimum)
    )
    assert why is not None and why.startswith("the cheapest candidates cost 0.")
