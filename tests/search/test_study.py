"""Studies belong to one set of settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from optuna.storages import BaseStorage

from artifacts import HeadwiseError
from search.storage import open_storage
from search.study import finish, open_study


@pytest.fixture(params=["journal", "sqlite"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> BaseStorage:
    url = None if request.param == "journal" else f"sqlite:///{tmp_path}/study.db"
    return open_storage(url, tmp_path / "cfg.yaml")


def names(storage: BaseStorage) -> set[str]:
    return {study.study_name for study in storage.get_all_studies()}


def test_the_same_settings_are_the_same_study(storage: BaseStorage) -> None:
    first = open_study(storage, "heads", {"seed": 1, "length": 64})
    assert open_study(storage, "heads", {"length": 64, "seed": 1}).study_name == first.study_name
    assert first.study_name.startswith("heads.")
    assert len(names(storage)) == 1


def test_directions_are_the_study_s(storage: BaseStorage) -> None:
    study = open_study(storage, "heads", {}, directions=("minimize", "maximize"))
    assert [direction.name for direction in study.directions] == ["MINIMIZE", "MAXIMIZE"]


def test_other_settings_name_what_differs(storage: BaseStorage) -> None:
    open_study(storage, "heads", {"length": 64, "seed": 1})
    with pytest.raises(HeadwiseError) as raised:
        open_study(storage, "heads", {"length": 64, "seed": 2})
    assert str(raised.value) == (
        "the storage has an unfinished search 'heads' with other settings: its seed is 1, not 2; repeat that command "
        "to finish it, or pass --fresh to discard it"
    )
    with pytest.raises(HeadwiseError, match="its task is None, not 'passkey'"):
        open_study(storage, "heads", {"length": 64, "seed": 1, "task": "passkey"})


def test_a_finished_study_is_in_nobodys_way(storage: BaseStorage) -> None:
    first = open_study(storage, "heads", {"seed": 1})
    finish(first)
    second = open_study(storage, "heads", {"seed": 2})
    assert names(storage) == {first.study_name, second.study_name}


def test_fresh_discards_all_of_that_name_and_no_other(storage: BaseStorage) -> None:
    old = open_study(storage, "heads", {"seed": 1})
    other = open_study(storage, "heads.units", {"seed": 1})
    new = open_study(storage, "heads", {"seed": 2}, fresh=True)
    assert names(storage) == {new.study_name, other.study_name}
    assert old.study_name != new.study_name


def test_a_copy_leaves_discarding_to_the_first_process(storage: BaseStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    open_study(storage, "heads", {"seed": 1}).set_user_attr("kept", True)
    monkeypatch.setenv("HEADWISE_WORKER", "2:1")
    assert open_study(storage, "heads", {"seed": 1}, fresh=True).user_attrs["kept"]


def test_settings_without_a_form_in_json_are_refused(storage: BaseStorage) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        open_study(storage, "heads", {"budget": float("nan")})
