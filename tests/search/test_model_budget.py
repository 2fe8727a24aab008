"""python -m search.heads with one budget for the model, as its users run it, on a tiny model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from optuna.trial import TrialState

import artifacts
from artifacts import HeadwiseError
from profiling.bench import environment
from profiling.inside.head_fidelity import fidelity
from profiling.models.loading import load_model
from profiling.prompts.held_out import held_out
from profiling.prompts.prompt import make_prompts
from profiling.quality.logits import DenseLogits, Drift
from profiling.speed.cost_table import save as save_table
from runtime import Headwise, load
from search.heads import main
from search.refine import Problem
from search.storage import open_storage
from tests.search.conftest import save_tiny
from tests.search.tables import linear_table

LENGTH = 1000
TASKS = ("passkey", "prose")
ROOT = Path(__file__).resolve().parents[2]


def options(model: Path, out: Path, **changes: str | None) -> list[str]:
    told = {
        "--model": str(model),
        "--out": str(out),
        "--length": str(LENGTH),
        "--calibration": " ".join(TASKS),
        "--budget": "0.6",
        "--cost": "flops",
        "--n-trials": "8",
        "--dtype": "float32",
        # A random model has no head that can do without much.
        "--max-kl": "9",
        "--max-drop": "9",
        **{f"--{name.replace('_', '-')}": value for name, value in changes.items()},
    }
    words = [word for name, value in told.items() if value is not None for word in (name, *value.split())]
    return [*words, "--no-picture"]


@pytest.fixture(scope="module")
def found(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("found") / "cfg.yaml"
    assert main(options(tiny_model, out)) == 0
    return out


def test_it_writes_a_valid_pair_and_keeps_its_journal(found: Path) -> None:
    artifact = artifacts.load(found)
    assert artifact.sidecar is not None and artifact.search is not None
    assert {path.name for path in found.parent.iterdir()} == {"cfg.yaml", artifact.sidecar.file, "cfg.study.journal"}
    search = artifact.search
    assert (search.allocation, search.n_trials, search.cost.unit) == ("model", 8, "flops")
    assert search.calibration.tasks == TASKS and search.calibration.lengths == (LENGTH,)
    assert sum(search.summary.winners.values()) == 18
    assert artifact.prefill.dense_below == LENGTH // 2 and artifact.costs == ()


def test_the_front_ascends_and_what_is_served_keeps_to_the_budget(found: Path) -> None:
    artifact, arrays = artifacts.load_pair(found)
    front = artifact.prefill.front
    assert front is not None and len(front.points) > 1 and front.measured_on == "held_out"
    for cheap, dear in pairwise(front.points):
        assert cheap.cost < dear.cost and cheap.kl > dear.kl and cheap.speedup > dear.speedup
    spent = float(arrays["chosen.flops"].sum())
    assert spent <= 0.6 * front.dense_cost * (1 + 1e-6)
    served = next(point for point in front.points if point.layers == artifact.prefill.layers)
    assert served.cost == pytest.approx(spent, rel=1e-5)
    assert max(p.cost for p in front.points if p.cost <= 0.6 * front.dense_cost) == served.cost
    np.testing.assert_allclose(artifact.search.summary.density, np.nanmean(arrays["chosen.density"]), rtol=1e-5)


def test_it_loses_less_than_a_budget_for_each_head(found: Path) -> None:
    """By the curves and at no more cost: the objective is what is spent for."""
    arrays = artifacts.load_arrays(found)
    by_place = sorted(
        (n for n in arrays if n.endswith(".objective") and "candidates" in n), key=lambda n: int(n.split(".")[1])
    )
    lost = np.stack([arrays[name] for name in by_place], axis=-1)
    error = np.stack([arrays[name.removesuffix("objective") + "error"] for name in by_place], axis=-1)
    flops = np.stack([arrays[name.removesuffix("objective") + "flops"] for name in by_place], axis=-1)
    weight = arrays["allocation.weight"][:, None]
    spent = float(arrays["chosen.flops"].sum())
    each = spent / 18
    uniform = np.where(flops <= each, error, np.inf).argmin(-1)[..., None]
    assert (arrays["chosen.objective"] * weight).sum() < (np.take_along_axis(lost, uniform, -1)[..., 0] * weight).sum()


def test_evidence_is_what_held_out_prompts_say(found: Path, tiny_model: Path) -> None:
    artifact = artifacts.load(found)
    loaded = load_model(str(tiny_model), dtype="float32")
    seen = [p for t in TASKS for p in make_prompts(t, loaded.tokenizer, length=LENGTH, samples=1, seed=0)]
    prompts = held_out(TASKS, loaded.tokenizer, length=LENGTH, samples=1, seed=0, seen=seen)
    logits = DenseLogits(loaded.model, prompts)
    with Headwise(artifact).apply(loaded.model):
        drift = logits.drift()
    told = {measured.unit: measured.value for measured in artifact.evidence.measurements}
    assert told["nats a token"] == pytest.approx(drift.mean_kl, rel=1e-4)
    assert told["times that of dense attention"] == pytest.approx(drift.perplexity_ratio, rel=1e-4)
    # The scores in the sidecar are means over the prompts of calibration.
    errors = [fidelity(loaded.model, artifact, prompt).error for prompt in seen]
    np.testing.assert_allclose(
        artifacts.load_arrays(found)["chosen.error"], np.mean(errors, axis=0), rtol=1e-3, atol=1e-5
    )


def test_what_the_gate_gave_is_judged_by_other_prompts(
    found: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kl = next(
        measured.value for measured in artifacts.load(found).evidence.measurements if measured.unit == "nats a token"
    )
    out, limit = tmp_path / "cfg.yaml", f"{0.75 * kl:.6f}"
    assert main(options(tiny_model, out, budget="0.5", max_kl=limit)) == 0
    assert "the gate: KL to dense attention is" in (said := capsys.readouterr().err) and "times the budget" in said
    artifact = artifacts.load(out)
    front = artifact.prefill.front
    assert front is not None and front.measured_on == "held_out"
    assert float(artifacts.load_arrays(out)["chosen.flops"].sum()) > 0.5 * front.dense_cost
    told = next(measured for measured in artifact.evidence.measurements if measured.unit == "nats a token")
    assert told.name.startswith("KL to dense attention on held-out") and told.value <= float(limit)
    loaded = load_model(str(tiny_model), dtype="float32")
    seen = [p for t in TASKS for p in make_prompts(t, loaded.tokenizer, length=LENGTH, samples=1, seed=0)]
    by_set = []
    for number in range(3):
        how = {"length": LENGTH, "samples": 1, "seed": 0, "number": number}
        seen += (prompts := held_out(TASKS, loaded.tokenizer, **how, seen=seen))
        logits = DenseLogits(loaded.model, prompts)
        with Headwise(artifact).apply(loaded.model):
            by_set.append(logits.drift().mean_kl)
    assert len(set(by_set)) == 3 and by_set[0] <= float(limit)
    assert told.value in (pytest.approx(by_set[1], rel=1e-4), pytest.approx(by_set[2], rel=1e-4))


def test_points_of_the_front_are_served(found: Path, tiny_model: Path) -> None:
    loaded = load_model(str(tiny_model), dtype="float32")
    front = artifacts.load(found).prefill.front
    assert front is not None
    ids = torch.randint(0, 250, (1, LENGTH))
    dense = loaded.model(ids).logits.detach()
    far = []
    for point in (front.points[0], front.points[-1]):
        with torch.no_grad(), load(found, target_kl=point.kl).apply(loaded.model, strict=True):
            far.append(float((loaded.model(ids).logits - dense).norm()))
    assert far[0] > far[1]


def test_the_same_seed_gives_the_same_hash_and_the_command_again_measures_nothing_anew(
    found: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "cfg.yaml"
    assert main(options(tiny_model, out, storage=f"sqlite:///{tmp_path}/study.db")) == 0
    assert artifacts.load(out).content_sha256 == artifacts.load(found).content_sha256
    monkeypatch.setattr("search.model_phases.score_prompt", lambda *args, **kwargs: pytest.fail("scored again"))
    monkeypatch.setattr("search.refine.Problem.drift", lambda *args, **kwargs: pytest.fail("measured again"))
    monkeypatch.setattr(DenseLogits, "learn", lambda *args: pytest.fail("run again"))
    assert main(options(tiny_model, out, storage=f"sqlite:///{tmp_path}/study.db")) == 0
    assert artifacts.load(out).content_sha256 == artifacts.load(found).content_sha256


def test_seconds_come_from_a_table_and_are_scaled_on_its_own_machine_only(
    found: Path, tiny_model: Path, tmp_path: Path
) -> None:
    for name, device in (("far", "Abacus 3000"), ("here", environment("cpu")["device"])):
        table, out = linear_table(device=device), tmp_path / f"{name}.yaml"
        save_table(table, tmp_path / f"{name}.safetensors")
        told = {"cost": "seconds", "cost_table": str(tmp_path / f"{name}.safetensors"), "budget": "0.9"}
        assert main(options(tiny_model, out, **told)) == 0
        artifact = artifacts.load(out)
        assert artifact.search.cost == artifacts.SearchCost(unit="seconds", device=device)
        assert [(entry.device, entry.optimised) for entry in artifact.costs] == [(device, True)]
        units = [measured.unit for measured in artifact.evidence.measurements]
        # What was measured of 1,024 tokens, brought to those that are asked for.
        assert artifact.prefill.front.dense_cost == pytest.approx(18 * 2e-3 * (LENGTH / 1024) ** 2)
        if name == "far":
            # 1e-4 s and 1 us for each of 136 tiles.
            everything = 18 * (1e-4 + 136e-6)
            spent = float(artifacts.load_arrays(out)["chosen.seconds"].sum())
            assert 0.5 * everything < spent <= 0.9 * everything * 1.01
            assert "s" not in units and artifact.prefill.dense_below == LENGTH // 2
        else:
            seconds = [measured for measured in artifact.evidence.measurements if measured.unit == "s"]
            assert [m.name for m in seconds] == [
                "attention of one prefill, index build included",
                "attention of one prefill with a budget for each head, index build included",
            ]
            assert all(measured.value > 0 and measured.baseline > 0 for measured in seconds)


def test_a_timeout_ends_the_trials(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "cfg.yaml"
    with pytest.raises(HeadwiseError, match=r"no trial (succeeded within|but the paper's was finished)"):
        main(options(tiny_model, out, timeout="0.0001"))
    assert not out.exists()
    # With more time it goes on from what is there.
    assert main(options(tiny_model, out, timeout="600", n_trials="1")) == 0
    assert artifacts.load(out).search.n_trials == 6


def test_a_failed_gate_writes_nothing_and_another_budget_starts_from_the_curves(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "cfg.yaml"
    strict = {"max_kl": "0.0000001", "n_trials": "1", "calibration": "passkey"}
    with pytest.raises(HeadwiseError, match="the gate: on held-out prompts KL to dense attention is") as error:
        main(options(tiny_model, out, **strict))
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["cfg.study.journal"]
    monkeypatch.setattr("search.model_phases.score_prompt", lambda *args, **kwargs: pytest.fail("scored again"))
    assert main(options(tiny_model, out, n_trials="1", budget="0.7", calibration="passkey")) == 0


def test_interrupted_at_the_held_out_prompts_it_loses_nothing_and_others_may_start(
    found: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real, measured, most = tmp_path / "cfg.yaml", Problem.drift, [], 3

    def drift(self: Problem, *args: Any, which: Sequence[int] | None = None) -> Drift:
        if which is not None:
            if len(measured) == most:
                raise KeyboardInterrupt
            measured.append(which)
        return real(self, *args, which=which)

    monkeypatch.setattr(Problem, "drift", drift)
    with pytest.raises(KeyboardInterrupt):
        main(options(tiny_model, out))
    assert not out.exists() and len(measured) == 3
    monkeypatch.setattr(Problem, "drift", real)
    assert main(options(tiny_model, out, calibration="prose", n_trials="1")) == 0
    monkeypatch.setattr(Problem, "drift", drift)
    most = -1
    assert main(options(tiny_model, out)) == 0
    assert artifacts.load(out).content_sha256 == artifacts.load(found).content_sha256
    storage = open_storage(None, out)
    held_out = {s.study_name: s for s in storage.get_all_studies() if ".drifts_0." in s.study_name}
    done = [
        trial
        for study in held_out.values()
        if study.user_attrs["settings"]["tasks"] == list(TASKS)
        for trial in storage.get_all_trials(study._study_id)
        if trial.state == TrialState.COMPLETE
    ]
    assert len(held_out) == 2 and len(done) == len(measured) > 3


def test_too_small_a_budget_is_told_and_a_larger_one_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "cfg.yaml"
    told = {"length": "400", "calibration": "passkey", "n_trials": "1"}
    with pytest.raises(
        HeadwiseError, match=r"--budget 0\.1 is impossible at 400 tokens: the cheapest candidates cost 0\."
    ):
        main(options(tiny_model, out, **told, budget="0.1"))
    assert main(options(tiny_model, out, **told, budget="0.95")) == 0


def test_lengths_in_any_order_and_repeats_are_one_search_and_sizes_grow(tiny_model: Path, tmp_path: Path) -> None:
    hashes = []
    for name, lengths, tasks in (("a", "500 1000", "passkey prose"), ("b", "1000 500 1000", "passkey prose passkey")):
        out = tmp_path / f"{name}.yaml"
        assert main(options(tiny_model, out, length=lengths, calibration=tasks, n_trials="1")) == 0
        artifact = artifacts.load(out)
        assert artifact.search.calibration.lengths == (500, 1000)
        hashes.append(artifact.content_sha256)
        assert artifact.prefill.growth is None or artifact.prefill.growth.length == 1000
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"calibration": "guessing"}, "unknown task"),
        ({"length": "4000"}, "--beyond-positions"),
        ({"length": "100"}, "--length must be at least 128, got 100"),
        ({"budget": "0"}, "--budget must be above 0"),
        ({"budget": "nan"}, "--budget must be above 0"),
        ({"budget": "a_shape:64,64"}, "goes with --allocation heads"),
        ({"backend": "abacus"}, "abacus"),
        ({"samples": "0"}, "--samples must be at least 1"),
        ({"n_trials": "0"}, "--n-trials must be at least 1"),
        ({"timeout": "0"}, "--timeout must be above 0"),
        ({"max_kl": "0"}, "--max-kl must be above 0"),
        ({"cost_table": "missing.safetensors"}, "--cost is flops"),
        ({"cost_table": "missing.safetensors", "cost": "seconds"}, "missing.safetensors does not exist"),
        ({"storage": "study"}, "cannot use the storage 'study'"),
        ({"calibration": "text:a/x.txt text:b/x.txt"}, "two tasks text:x.txt: give their files different names"),
        ({"preset": "paper", "allocation": "model"}, "--preset paper is a budget for each head"),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_leaves_no_file(
    tiny_model: Path, tmp_path: Path, changes: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(f"{folder} " * 5000)
    with pytest.raises(HeadwiseError, match=says) as error:
        main(options(tiny_model, Path("cfg.yaml"), **changes))
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_model_that_only_slides_has_nothing_to_search(tmp_path: Path) -> None:
    layers = ["sliding_attention"] * 3
    model = save_tiny(
        tmp_path / "m", family="Gemma3", config="Gemma3Text", head_dim=16, sliding_window=64, layer_types=layers
    )
    with pytest.raises(HeadwiseError, match=r"every layer of .* slides over a window already: nothing to search"):
        main(options(model, tmp_path / "cfg.yaml"))
    assert not list(tmp_path.glob("cfg*"))


def started(model: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "search.heads", *options(model, out), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def finished_trials(out: Path) -> int:
    journal = out.with_suffix(".study.journal")
    if not journal.exists():
        return 0
    storage = open_storage(None, out)
    studies = [s for s in storage.get_all_studies() if ".trials." in s.study_name]
    return sum(t.state.is_finished() for s in studies for t in storage.get_all_trials(s._study_id))


@pytest.mark.slow
def test_killed_among_its_trials_it_goes_on_and_finds_the_same(found: Path, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "cfg.yaml"
    process = started(tiny_model, out)
    while finished_trials(out) < 3:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not out.exists() and 3 <= finished_trials(out) < 8
    second = started(tiny_model, out)
    assert second.communicate()[1] is not None and second.returncode == 0
    assert artifacts.load(out).content_sha256 == artifacts.load(found).content_sha256


@pytest.mark.slow
def test_two_workers_find_the_same_curves(found: Path, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "cfg.yaml"
    process = started(tiny_model, out, "--workers", "2", "--fresh")
    said = process.communicate()[1]
    assert process.returncode == 0 and "the others go on" not in said, said
    arrays, alone = artifacts.load_arrays(out), artifacts.load_arrays(found)
    names = [name for name in alone if name.startswith("candidates.")]
    assert names and all(np.array_equal(arrays[name], alone[name]) for name in names)
    assert artifacts.load(out).search.n_trials == 8
