"""Trials of a study that is shared, interrupted and killed: as many as asked for, and the same ones for a seed."""

from __future__ import annotations

import ast
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from artifacts import HeadwiseError
from search.claims import Claims
from search.storage import open_storage
from search.study import open_study, succeeded
from search.trials import run_trials
from tests.search.work_runs import Runs

BASELINES = [{"x": 0.5, "y": 5}, {"x": 0.1, "y": 1}]
TRIALS = 10


@pytest.fixture(params=["journal", "sqlite"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> BaseStorage:
    url = None if request.param == "journal" else f"sqlite:///{tmp_path}/study.db"
    return open_storage(url, tmp_path / "cfg.yaml")


@pytest.fixture
def journal(tmp_path: Path) -> BaseStorage:
    return open_storage(None, tmp_path / "cfg.yaml")


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    started = Runs(tmp_path)
    yield started
    started.close()


def study_of(storage: BaseStorage, name: str = "study") -> optuna.Study:
    return open_study(storage, name, {"version": 1}, directions=("minimize", "minimize"))


def objective(trial: optuna.Trial) -> tuple[float, float]:
    x, y = trial.suggest_float("x", 0, 1), trial.suggest_int("y", 0, 10)
    return (x - 0.3) ** 2, x + y


class Counted:
    """The objective, with what `at` does at each number of calls."""

    def __init__(self, at: Callable[[int], None] = lambda call: None) -> None:
        self.calls = 0
        self._at = at

    def __call__(self, trial: optuna.Trial) -> tuple[float, float]:
        self.calls += 1
        values = objective(trial)
        self._at(self.calls)
        return values


def found(study: optuna.Study) -> list[Any]:
    return [(trial.params, trial.values) for trial in succeeded(study)]


def test_the_total_counts_baselines_and_what_there_was_before(storage: BaseStorage) -> None:
    study, counted = study_of(storage), Counted()
    trials = run_trials(study, counted, n_trials=4, baselines=BASELINES)
    assert counted.calls == len(trials) == 4
    assert [trial.params for trial in trials[:2]] == BASELINES
    again = run_trials(study_of(storage), counted, n_trials=4, baselines=BASELINES)
    assert counted.calls == 4
    assert [trial.params for trial in again] == [trial.params for trial in trials]
    assert len(run_trials(study_of(storage), counted, n_trials=6, baselines=BASELINES)) == 6
    assert counted.calls == 6


def test_baselines_run_even_if_fewer_trials_are_asked_for(journal: BaseStorage) -> None:
    trials = run_trials(study_of(journal), objective, n_trials=1, baselines=BASELINES)
    assert [trial.params for trial in trials] == BASELINES


@pytest.mark.parametrize("make", [None, lambda seed: optuna.samplers.RandomSampler(seed=seed)], ids=["tpe", "random"])
def test_the_seed_decides_whatever_interrupts(journal: BaseStorage, make: Any) -> None:
    whole, other = study_of(journal, "whole"), study_of(journal, "other")
    run_trials(whole, objective, n_trials=12, seed=7, baselines=BASELINES, sampler=make)
    run_trials(other, objective, n_trials=12, seed=8, baselines=BASELINES, sampler=make)
    assert found(other) != found(whole)
    pieces = study_of(journal, "pieces")

    def interrupt(call: int) -> None:
        if call % 3 == 0:
            raise KeyboardInterrupt

    counted = Counted(interrupt)
    interruptions = 0
    while len(found(pieces)) < 12:
        try:
            run_trials(pieces, counted, n_trials=12, seed=7, baselines=BASELINES, sampler=make)
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions >= 4
    assert found(pieces) == found(whole)
    # A generator for each place: none repeats another's draws.
    assert len({trial.params["x"] for trial in succeeded(whole)}) == 12


def test_a_sampler_with_populations_serves_too(journal: BaseStorage) -> None:
    seeds = []

    def make(seed: int) -> optuna.samplers.BaseSampler:
        seeds.append(seed)
        return optuna.samplers.NSGAIISampler(seed=seed, population_size=4)

    trials = run_trials(study_of(journal), objective, n_trials=12, sampler=make)
    assert len(trials) == 12
    assert len({(*trial.params.values(),) for trial in trials}) > 6
    assert len(set(seeds)) == 13


def test_an_interruption_says_how_to_go_on(journal: BaseStorage, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(call: int) -> None:
        if call == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_trials(study_of(journal), Counted(interrupt), n_trials=5)
    assert capsys.readouterr().err == "2 of 5 trials are finished; the same command goes on from there\n"


def test_a_failed_trial_is_told_and_does_not_stop_the_others(
    storage: BaseStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(call: int) -> None:
        if call in (2, 4):
            raise RuntimeError("out of\nmemory")

    study, counted = study_of(storage), Counted(fail)
    trials = run_trials(study, counted, n_trials=6)
    assert counted.calls == 6 and len(trials) == 4
    assert "trial 1 failed: 'RuntimeError: out of\\\\nmemory'\n" in capsys.readouterr().err
    # It is over: nobody tries it again.
    run_trials(study_of(storage), counted, n_trials=6)
    assert counted.calls == 6


def test_values_that_are_no_numbers_fail(journal: BaseStorage, capsys: pytest.CaptureFixture[str]) -> None:
    def values(trial: optuna.Trial) -> tuple[float, float]:
        seconds, _ = objective(trial)
        return seconds, math.nan if trial.user_attrs["key"] == "1" else 1.0

    assert len(run_trials(study_of(journal), values, n_trials=3)) == 2
    assert "trial 1 failed: 'ArithmeticError: values must be finite" in capsys.readouterr().err


def test_an_objective_that_always_fails_ends_with_its_error(storage: BaseStorage) -> None:
    def fail(call: int) -> None:
        raise RuntimeError(f"call {call}")

    study, counted = study_of(storage), Counted(fail)
    with pytest.raises(RuntimeError, match="call 3"):
        run_trials(study, counted, n_trials=20)
    assert not Claims(storage, study.study_name).survey().busy


def test_a_mistake_of_the_user_ends_the_search_and_leaves_the_trial_free(journal: BaseStorage) -> None:
    def mistake(call: int) -> None:
        raise HeadwiseError("no such file")

    study = study_of(journal)
    with pytest.raises(HeadwiseError, match="no such file"):
        run_trials(study, Counted(mistake), n_trials=3)
    assert not Claims(journal, study.study_name).survey().done
    assert len(run_trials(study, objective, n_trials=3)) == 3


def test_no_trial_starts_after_the_timeout(journal: BaseStorage) -> None:
    study, counted = study_of(journal), Counted(lambda call: time.sleep(0.05))
    run_trials(study, counted, n_trials=10_000, timeout=0.5)
    assert 0 < counted.calls < 100
    with pytest.raises(HeadwiseError, match="no trial succeeded within 0 s"):
        run_trials(study_of(journal, "other"), counted, n_trials=10, timeout=0)


def test_the_timeout_waits_for_what_others_had_begun(journal: BaseStorage) -> None:
    study = study_of(journal)
    other = Claims(journal, study.study_name)
    trial_id = other.take("0")
    assert trial_id is not None
    waited: list[float] = []

    def finish_the_other(call: int) -> None:
        waited.append(time.monotonic())

    polls = 0
    survey = Claims.survey

    def finishing(claims: Claims) -> Any:
        nonlocal polls
        polls += 1
        if polls == 3:
            assert other.finish(trial_id, TrialState.COMPLETE, [1.0, 1.0], {})
        return survey(claims)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Claims, "survey", finishing)
        trials = run_trials(study, Counted(finish_the_other), n_trials=5, timeout=0)
    assert [trial.values for trial in trials] == [[1.0, 1.0]]
    assert not waited


def test_a_trial_that_others_gave_up_on_is_theirs(storage: BaseStorage) -> None:
    study = study_of(storage)
    claims = Claims(storage, study.study_name)

    def give_up(call: int) -> None:
        if call in (1, 3, 5):
            (trial,) = claims.survey().busy.values()
            claims.give_up(trial._trial_id)

    counted = Counted(give_up)

    def late(trial: optuna.Trial) -> tuple[float, float]:
        values = counted(trial)
        if counted.calls == 3:
            trial.set_user_attr("too", "late")
        return values

    assert len(run_trials(study, late, n_trials=4)) == 4
    assert counted.calls == 7


def test_callbacks_see_each_trial_that_this_process_finished(journal: BaseStorage) -> None:
    seen = []
    run_trials(study_of(journal), objective, n_trials=3, callbacks=[lambda study, trial: seen.append(trial.state)])
    assert seen == [TrialState.COMPLETE] * 3


def test_trials_of_others_count_and_their_failures_are_told(
    storage: BaseStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    study, counted = study_of(storage), Counted()
    other = Claims(storage, study.study_name)
    failed, done = other.take("0"), other.take("1")
    assert failed is not None and done is not None
    other.finish(failed, TrialState.FAIL, None, {"error": "elsewhere"})
    other.finish(done, TrialState.COMPLETE, [1.0, 2.0], {})
    assert len(run_trials(study, counted, n_trials=4)) == 3
    assert counted.calls == 2
    assert capsys.readouterr().err == "trial 0 failed: elsewhere\n"


@pytest.mark.slow
def test_what_two_killed_processes_had_in_hand_is_run_again_and_nothing_else(runs: Runs) -> None:
    both = [runs.start("--together", "2", "--seconds", "0.2") for _ in range(2)]
    runs.wait_for("begin trial", "trial 5")
    for process in both:
        runs.kill(process)
    before = runs.begun()
    assert {pid for _, pid in runs.lines("begin trial")} == {process.pid for process in both}
    runs.finish(runs.start())
    units, trials = ast.literal_eval(runs.out.read_text())
    assert len(units) == 8 and len(trials) == TRIALS
    assert [trial[:2] for trial in trials[:2]] == [(0.5, 5), (0.1, 1)]
    again = {key for key, count in runs.begun().items() if count > 1}
    assert len(again) <= 2
    assert max(runs.begun().values()) == 2
    assert {key for key in runs.begun() if key.startswith("trial")} == {f"trial {place}" for place in range(TRIALS)}
    assert again <= set(before)


@pytest.mark.slow
def test_a_killed_search_ends_as_one_that_ran_through(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole, killed = Runs(tmp_path / "whole"), Runs(tmp_path / "killed")
    try:
        whole.finish(whole.start())
        for at in ("unit 5", "trial 1", "trial 7"):
            process = killed.start("--hang", at)
            killed.wait_for(f"begin {at.split()[0]}", at)
            killed.kill(process)
        killed.finish(killed.start())
        assert killed.out.read_text() == whole.out.read_text()
        assert {key for key, count in killed.begun().items() if count > 1} == {"unit 5", "trial 1", "trial 7"}
    finally:
        whole.close()
        killed.close()
