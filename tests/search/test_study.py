"""The Optuna study of a search's measurements."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from artifacts import HeadwiseError
from search.study import Study, check_storage, passwords, study_name, without_password

SPACE = {"cost": (0.0, 1.0), "dense_tail": [64, 256]}


def test_study_in_storage_holds_params_losses_and_attributes(tmp_path):
    import optuna

    url = f"sqlite:///{tmp_path}/study.db"
    check_storage(url)
    # The second study of the name replaces the first.
    for _ in range(2):
        study = Study(storage=url, name="cfg", space=SPACE, losses=("text", "cost"))
        study.add(
            {"cost": 0.25, "dense_tail": 64}, {"text": 2.0, "more": 4.0, "cost": 0.25}, density=0.3
        )
        study.add({"cost": 0.5, "dense_tail": 256}, {"text": 1.0, "cost": 0.5})
        study.add({"cost": 0.4, "dense_tail": 256}, {"text": 3.0, "cost": 0.4})
        study.add({"cost": 0.4, "dense_tail": 256}, {"cost": 0.4}, prompts="failed early")
    stored = optuna.load_study(study_name="cfg", storage=url)
    assert stored.metric_names == ["text", "cost"]
    assert [trial.state.name for trial in stored.trials] == 3 * ["COMPLETE"] + ["FAIL"]
    assert stored.trials[0].params == {"cost": 0.25, "dense_tail": 64}
    assert stored.trials[0].values == [2.0, 0.25]
    # A loss that is none of the values, such as of a task without held-out prompts.
    attributes = {"text": 2.0, "more": 4.0, "cost": 0.25, "density": 0.3}
    assert stored.trials[0].user_attrs == attributes
    assert stored.trials[3].user_attrs["prompts"] == "failed early"
    # The third costs more than the first and loses more.
    assert {trial.number for trial in stored.best_trials} == {0, 1}
    importance = optuna.importance.get_param_importances(stored, target=lambda t: t.values[0])
    assert set(importance) == set(SPACE)


# Each has "secret" and "hidden" in passwords alone.
SECRET_URLS = [
    "nosuch://me:secret@nowhere/db",
    "nosuch://me:secret@hidden@nowhere/db",
    "nosuch://me:secret:hidden@nowhere:3306/db",
    "nosuch://me:secret/hidden?a=b#c@nowhere/db",
    "nosuch://me:secret%40hidden@nowhere/db",
    "nosuch://:secret@nowhere/db",
    "nosuch://me@here.org:secret@nowhere/db",
    "nosuch://me:secret@nowhere/db?a=b&password=secret@hidden",
    "sqlite://me:secret@/db?sslpassword=secrethidden",
    "nosuch://nowhere/db?Passwd=secret%20hidden&a=b",
    "nosuch://nowhere/db?auth_token=secret/hidden",
]


def test_study_with_unreachable_storage_reports_one_line_without_password():
    for url in ("study", *SECRET_URLS):
        with pytest.raises(HeadwiseError, match="cannot use the storage") as error:
            check_storage(url)
        message = str(error.value)
        assert "\n" not in message and "secret" not in message and "hidden" not in message


def test_storage_password_with_at_sign_is_rejected_before_connecting():
    with pytest.raises(HeadwiseError, match=r"'mysql://me@db:3306/x': .* must be written %40"):
        check_storage("mysql://me:secret@hidden@db:3306/x")


@pytest.mark.parametrize("url", SECRET_URLS)
def test_without_password_shows_no_part_of_a_password(url):
    for word in (url, f"--storage={url}"):
        shown = without_password(word)
        assert "secret" not in shown and "hidden" not in shown and shown.startswith(word[:6])
    assert any("secret" in password for password in passwords(url))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:secret@db:5432/x?timeout=3", "postgresql://me@db:5432/x?timeout=3"),
        ("postgresql://me:s%40cret@db/x", "postgresql://me@db/x"),
        ("postgresql://me@db:5432/x", "postgresql://me@db:5432/x"),
        (
            "postgresql://db/x?user=me&PASSWORD=secret&a=b",
            "postgresql://db/x?user=me&PASSWORD=***&a=b",
        ),
        ("sqlite:///study.db", "sqlite:///study.db"),
        ("sqlite:////home/a:b@c/study.db", "sqlite:////home/a:b@c/study.db"),
        ("passkey@depth=0.5:text.txt", "passkey@depth=0.5:text.txt"),
    ],
)
def test_without_password_preserves_the_rest_of_a_url(url, shown):
    assert without_password(url) == shown


@pytest.mark.parametrize(
    ("params", "losses"),
    [
        ({"cost": 0.5, "dense_tail": 64}, {"text": math.nan, "cost": 0.5}),
        ({"cost": 0.5, "dense_tail": 64}, {"text": math.inf, "cost": 0.5}),
        ({"cost": math.nan, "dense_tail": 64}, {"text": 1.0, "cost": math.nan}),
        ({"cost": 1.5, "dense_tail": 64}, {"text": 1.0, "cost": 1.5}),
        ({"cost": 0.5, "dense_tail": 65}, {"text": 1.0, "cost": 0.5}),
    ],
)
def test_study_of_a_loss_that_is_no_number_adds_a_failed_trial(params, losses, tmp_path):
    import optuna

    url = f"sqlite:///{tmp_path}/study.db"
    study = Study(storage=url, name="cfg", space=SPACE, losses=("text", "cost"))
    study.add(params, losses, density=math.nan)
    study.add({"cost": 0.5, "dense_tail": 64}, {"text": 1.0, "cost": 0.5})
    failed, complete = optuna.load_study(study_name="cfg", storage=url).trials
    assert (failed.state.name, complete.state.name) == ("FAIL", "COMPLETE")
    # Dashboards read JSON, which has no NaN.
    assert failed.user_attrs["density"] == "nan"
    assert failed.user_attrs["text"] in ("nan", "inf", 1.0)


def test_study_name_differs_by_command_and_folder(tmp_path, monkeypatch):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    names = {
        study_name(command, tmp_path / folder / "cfg.yaml")
        for command in ("search", "kv", "filters")
        for folder in ("a", "b")
    }
    assert len(names) == 6 and all("cfg" in name for name in names)
    monkeypatch.chdir(tmp_path / "a")
    assert study_name("kv", Path("cfg.yaml")) in names
    assert len(study_name("filters", tmp_path / f"{'x' * 240}.yaml")) < 200
