"""The studies of a storage: each belongs to one set of settings, and is never continued with others."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from artifacts import HeadwiseError
from artifacts.errors import shorten
from artifacts.hashing import canonical_json
from search.claims import Claims
from search.workers import is_worker


def open_study(
    storage: BaseStorage,
    name: str,
    settings: Mapping[str, Any],
    *,
    directions: Sequence[str] = ("minimize",),
    fresh: bool = False,
) -> optuna.Study:
    """Start a study, or go on with the one of the same name and settings.

    Args:
        storage: as open_storage returns it.
        name: of this study among others in the storage.
        settings: all that its trials depend on; JSON. Not how many there shall be: that may grow.
        directions: minimize or maximize, one an objective.
        fresh: discard unfinished and finished trials under this name first.

    Raises:
        HeadwiseError: the storage has an unfinished study of that name with other settings.
    """
    full = f"{name}.{hashlib.sha256(canonical_json(dict(settings))).hexdigest()[:16]}"
    same_name = [s for s in storage.get_all_studies() if s.study_name.rpartition(".")[0] == name]
    if fresh and not is_worker():
        for study in same_name:
            optuna.delete_study(study_name=study.study_name, storage=storage)
    else:
        for study in same_name:
            if study.study_name != full and not study.user_attrs.get("finished"):
                raise _other_settings(name, study.user_attrs.get("settings", {}), settings)
    study = optuna.create_study(storage=storage, study_name=full, directions=list(directions), load_if_exists=True)
    if "settings" not in study.user_attrs:
        study.set_user_attr("settings", dict(settings))
    return study


def discard(storage: BaseStorage, names: Sequence[str]) -> None:
    """Forget all studies of these names; the copies of a process leave that to it."""
    if is_worker():
        return
    for study in storage.get_all_studies():
        if study.study_name.rpartition(".")[0] in names:
            optuna.delete_study(study_name=study.study_name, storage=storage)


def succeeded(study: optuna.Study) -> list[FrozenTrial]:
    """The trials of a study that succeeded, by place."""
    done = Claims(study._storage, study.study_name).survey().done
    return [done[key] for key in sorted(done, key=int) if done[key].state == TrialState.COMPLETE]


def finish(study: optuna.Study) -> None:
    """Note that a study is over: one with other settings may start under its name."""
    study.set_user_attr("finished", True)


def _other_settings(name: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> HeadwiseError:
    changed = [key for key in {**wanted, **found} if wanted.get(key) != found.get(key)]
    what = "its settings are others"
    if changed:
        key = changed[0]
        what = f"its {key} is {shorten(found.get(key))}, not {shorten(wanted.get(key))}"
    return HeadwiseError(
        f"the storage has an unfinished search {name!r} with other settings: {what}; repeat that command to finish "
        "it, or pass --fresh to discard it"
    )
