"""Units of work that several processes share: results as they were put, and each done once."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optuna.storages import BaseStorage
from optuna.trial import TrialState

import search.alive as alive
import search.units
from artifacts import HeadwiseError
from search.claims import Claims
from search.storage import open_storage
from search.study import open_study
from search.units import Units
from tests.search.work_runs import Runs

UNITS = {f"unit {number}" for number in range(8)}


@pytest.fixture(params=["journal", "sqlite"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> BaseStorage:
    url = None if request.param == "journal" else f"sqlite:///{tmp_path}/study.db"
    return open_storage(url, tmp_path / "cfg.yaml")


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    started = Runs(tmp_path)
    yield started
    started.close()


def units_of(storage: BaseStorage, keys: str = "abc", **options: Any) -> Units:
    return Units(storage, "units", list(keys), {"length": 64}, **options)


def test_results_come_back_as_they_were_put(storage: BaseStorage) -> None:
    results = {
        "a": {"text": 'q"\\\n' * 40_000, "none": None, "floats": [0.1, 1e-300], "nested": {"list": [1, [2]]}},
        "b": {"x": np.array([[1.5, np.nan], [-np.inf, 0]], np.float32), "none at all": np.zeros((0, 3), np.int64)},
        "c": [np.array(True), np.arange(200_000)[::2], np.float64(0.1)],
    }
    units = units_of(storage)
    for key in units.claim():
        units.put(key, results[key])
    for found in (units.results(), units_of(storage).results()):
        assert list(found) == ["a", "b", "c"]
        assert found["a"] == results["a"]
        for name, array in results["b"].items():  # type: ignore[union-attr]
            np.testing.assert_array_equal(found["b"][name], array)
            assert found["b"][name].dtype == array.dtype and found["b"][name].shape == array.shape
        assert found["c"][0].dtype == bool and found["c"][0].shape == ()
        np.testing.assert_array_equal(found["c"][1], np.arange(0, 200_000, 2))
        assert found["c"][2] == 0.1


def test_no_piece_of_a_result_is_longer_than_the_columns_of_databases(storage: BaseStorage) -> None:
    units = units_of(storage, "a")
    for key in units.claim():
        units.put(key, {"noise": np.random.default_rng(0).random(50_000)})
    (trial,) = storage.get_all_trials(storage.get_study_id_from_name(units.study_name))
    assert max(len(str(value)) for value in trial.user_attrs.values()) < 65_535
    assert trial.user_attrs["pieces"] > 1


def test_what_cannot_be_kept_is_refused_and_the_unit_is_free(storage: BaseStorage) -> None:
    units = units_of(storage, "a")
    claims = units.claim()
    key = next(claims)
    with pytest.raises(TypeError, match="must be JSON or arrays of numbers, got set"):
        units.put(key, {"x": {1}})
    claims.close()
    assert units.results() == {}
    again = units_of(storage, "a")
    for key in again.claim():
        again.put(key, 1)
    assert again.results() == {"a": 1}


def test_a_process_may_choose_among_what_is_free(storage: BaseStorage) -> None:
    units, offered = units_of(storage), []

    def choose(free: Sequence[str]) -> str:
        offered.append(list(free))
        return free[-1]

    done = []
    for key in units.claim(choose=choose):
        units.put(key, 1)
        done.append(key)
    assert done == ["c", "b", "a"] and offered == [["a", "b", "c"], ["a", "b"], ["a"]]


def test_while_others_work_a_process_does_what_is_its_own(storage: BaseStorage) -> None:
    others, own = units_of(storage, "ab"), ["first", "second"]
    theirs = others.claim()
    others.put(next(theirs), 1)
    assert next(theirs) == "b"

    def idle() -> bool:
        if not own:
            others.put("b", 2)
            return False
        own.pop()
        return True

    units = units_of(storage, "ab")
    assert list(units.claim(idle=idle)) == [] and not own
    assert units.results() == {"a": 1, "b": 2}
    theirs.close()


def test_nobody_leaves_while_another_uses_its_wait(storage: BaseStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after the units, as timing is, has the machine for itself."""
    first, second = units_of(storage, "a"), units_of(storage, "a")
    theirs = first.claim()
    key, seen = next(theirs), []
    monkeypatch.setattr(search.units, "_POLL_SECONDS", 0.01)

    def idle() -> bool:
        # The last unit is done while this piece is under way.
        first.put(key, 1)
        leaving = threading.Thread(target=lambda: seen.extend(theirs))
        leaving.start()
        leaving.join(0.3)
        assert leaving.is_alive()
        threads.append(leaving)
        return True

    threads: list[threading.Thread] = []
    assert list(second.claim(idle=idle)) == []
    threads[0].join(10)
    assert not threads[0].is_alive() and seen == [] and first.results() == {"a": 1}


def test_a_wait_that_is_over_is_not_used(storage: BaseStorage) -> None:
    first, second = units_of(storage, "a"), units_of(storage, "a")
    theirs = first.claim()
    key, take = next(theirs), second._claims.take

    def late(claimed: str, **options: Any) -> int | None:
        if claimed.startswith("idle/"):
            first.put(key, 1)
        return take(claimed, **options)

    second._claims.take = late  # type: ignore[method-assign]
    assert list(second.claim(idle=lambda: pytest.fail("too late"))) == []
    theirs.close()


def test_a_unit_without_a_result_is_an_error(storage: BaseStorage) -> None:
    units = units_of(storage)
    with pytest.raises(ValueError, match="a was claimed and has no result"):
        for _ in units.claim():
            pass
    assert units.results() == {}


def test_an_error_frees_the_unit_and_says_how_to_go_on(
    storage: BaseStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    units = units_of(storage)
    claims = units.claim()
    units.put(next(claims), 1)
    assert next(claims) == "b"
    assert set(Claims(storage, units.study_name).survey().busy) == {"b"}
    claims.close()
    assert not Claims(storage, units.study_name).survey().busy
    assert "1 of 3 units are finished; the same command goes on from there" in capsys.readouterr().err


def test_an_interrupted_claim_leaves_nothing_of_it_in_the_results(storage: BaseStorage) -> None:
    units = units_of(storage, "a")
    claims = units.claim()
    next(claims)
    study = storage.get_study_id_from_name(units.study_name)
    (trial,) = storage.get_all_trials(study)
    # Killed between the pieces of a result.
    storage.set_trial_user_attr(trial._trial_id, "result.0", '{"half')
    claims.close()
    assert units.results() == {}


def test_finished_units_are_not_handed_out_again(storage: BaseStorage) -> None:
    for expected in ("abc", ""):
        units = units_of(storage)
        handed_out = ""
        for key in units.claim():
            handed_out += key
            units.put(key, key)
        assert handed_out == expected
        assert units.results() == {"a": "a", "b": "b", "c": "c"}


def test_other_settings_are_an_error_until_discarded_or_finished(storage: BaseStorage) -> None:
    first = units_of(storage)
    claims = first.claim()
    first.put(next(claims), 1)
    claims.close()
    with pytest.raises(HeadwiseError, match=r"'units' with other settings: its length is 64, not 128; .* --fresh"):
        Units(storage, "units", ["a"], {"length": 128})
    # Another name is another search.
    assert Units(storage, "others", ["a"], {"length": 128}).results() == {}
    assert units_of(storage).results() == {"a": 1}
    assert units_of(storage, fresh=True).results() == {}
    units_of(storage).finish()
    assert Units(storage, "units", ["a"], {"length": 128}).results() == {}


def test_units_that_were_discarded_say_so(storage: BaseStorage) -> None:
    units = units_of(storage)
    Units(storage, "units", ["a"], {"length": 128}, fresh=True)
    with pytest.raises(HeadwiseError, match="the study is gone: another process discarded it"):
        units.results()


def test_two_keys_that_are_the_same_are_refused(storage: BaseStorage) -> None:
    with pytest.raises(ValueError, match="keys must differ"):
        units_of(storage, "aba")


def test_the_older_claim_of_two_stands(storage: BaseStorage) -> None:
    study = open_study(storage, "study", {})
    one, other = Claims(storage, study.study_name), Claims(storage, study.study_name)
    first = one.take("a")
    assert first is not None
    assert other.take("a") is None
    assert other.take("b") is not None
    one.give_up(first)
    again = other.take("a")
    assert again is not None
    assert other.finish(again, TrialState.COMPLETE, [0.0], {})
    assert one.take("a") is None
    assert set(one.survey().done) == {"a"} and set(one.survey().busy) == {"b"}


def test_a_result_after_others_gave_up_on_its_process_is_dropped(storage: BaseStorage) -> None:
    units = units_of(storage, "a")
    claims = units.claim()
    key = next(claims)
    (trial,) = storage.get_all_trials(storage.get_study_id_from_name(units.study_name))
    Claims(storage, units.study_name).give_up(trial._trial_id)
    other = units_of(storage, "a")
    for key in other.claim():
        other.put(key, "other")
    units.put(key, "late")
    assert next(claims, None) is None
    assert units.results() == {"a": "other"}


def claimed_by(storage: BaseStorage, monkeypatch: pytest.MonkeyPatch, **worker: Any) -> Claims:
    """The claims of a study in which another worker has claimed "a"."""
    study = open_study(storage, "study", {})
    with monkeypatch.context() as patch:
        other = {**alive._me(), "id": "other", **worker}
        patch.setattr(alive, "_me", lambda: other)
        claims = Claims(storage, study.study_name)
        with claims.working():
            claims.take("a")
    return Claims(storage, study.study_name, stale=60)


@pytest.mark.parametrize("worker", [{"started": "0"}, {"pid": 2**22 + 1}], ids=["number given out again", "ended"])
def test_a_process_of_this_machine_that_ended_loses_its_claims_at_once(
    storage: BaseStorage, monkeypatch: pytest.MonkeyPatch, worker: dict[str, Any]
) -> None:
    assert not claimed_by(storage, monkeypatch, **worker).survey().busy


def test_a_process_that_runs_keeps_its_claims(storage: BaseStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(claimed_by(storage, monkeypatch).survey().busy) == {"a"}


def test_a_process_elsewhere_loses_its_claims_when_its_beats_stop(
    storage: BaseStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(alive.time, "monotonic", lambda: clock[0])
    claims = claimed_by(storage, monkeypatch, machine="elsewhere", pid=os.getpid())
    assert set(claims.survey().busy) == {"a"}
    study = storage.get_study_id_from_name(open_study(storage, "study", {}).study_name)
    record = storage.get_study_system_attrs(study)["headwise:other"]
    clock[0] += 50
    storage.set_study_system_attr(study, "headwise:other", {**record, "beat": record["beat"] + 1})
    assert set(claims.survey().busy) == {"a"}
    clock[0] += 50
    # It beat less than 60 s ago.
    assert set(claims.survey().busy) == {"a"}
    clock[0] += 11
    assert not claims.survey().busy


def test_two_processes_share_the_units_and_do_each_once(runs: Runs) -> None:
    both = [runs.start("--together", "2", "--seconds", "0.2") for _ in range(2)]
    for process in both:
        runs.finish(process)
    assert {key: count for key, count in runs.begun().items() if key in UNITS} == dict.fromkeys(UNITS, 1)
    assert {pid for _, pid in runs.lines("begin unit")} == {process.pid for process in both}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["journal", "sqlite"])
def test_the_unit_of_a_killed_process_is_taken_over_and_no_other_is_repeated(tmp_path: Path, kind: str) -> None:
    runs = Runs(tmp_path, None if kind == "journal" else f"sqlite:///{tmp_path}/study.db")
    try:
        killed = runs.start("--hang", "unit 3")
        runs.wait_for("begin unit", "unit 3")
        other = runs.start()
        runs.wait_for("end unit", "unit 7")
        assert runs.begun()["unit 3"] == 1
        runs.kill(killed)
        runs.finish(other)
        expected = {key: 2 if key == "unit 3" else 1 for key in UNITS}
        assert {key: count for key, count in runs.begun().items() if key in UNITS} == expected
        # All are dead; one starts anew.
        before = runs.begun()
        runs.out.unlink()
        runs.finish(runs.start())
        assert runs.begun() == before
        assert "'unit 0', 'unit 1'" in runs.out.read_text()
    finally:
        runs.close()
