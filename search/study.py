"""An Optuna study of a search's measurements, kept in a storage that optuna-dashboard opens.

Each allocation of `headwise search`, each section of `headwise kv` and each choice of `headwise
filters` is one trial. Its losses are the values, all to be minimized, so that the dashboard shows
their Pareto front and the importance of each parameter.
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from artifacts import HeadwiseError
from artifacts.cli.passwords import passwords, without_password
from artifacts.errors import shorten

STORAGE_HELP = "keep each measurement as a trial of an Optuna study, such as sqlite:///study.db"

# Characters of a file's name in the name of its study.
_LONGEST = 100


def check_storage(url: str | None) -> None:
    """Raise HeadwiseError where Optuna cannot open this storage; the error shows no password."""
    if url is None:
        return
    import optuna

    shown = f"cannot use the storage {without_password(url)!r}"
    if re.search("://(?!/)[^:@]*:[^@]*@[^?]*@", url):
        # SQLAlchemy would look up the rest of the password as a host.
        raise HeadwiseError(f"{shown}: its password has an @, which must be written %40")
    try:
        optuna.get_all_study_summaries(url)
    # Whatever the database's driver raises, one that is missing included.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        for password in passwords(url):
            reason = reason.replace(password, "***")
        raise HeadwiseError(
            f"{shown}: {shorten(reason)}; it is a URL such as sqlite:///study.db"
        ) from None


def study_name(command: str, out: Path) -> str:
    """The name of a command's study for an output file, unlike that of any other file or command.

    Args:
        command: search, kv or filters.
        out: the artifact that the command writes.
    """
    path = str(out.resolve())
    # Databases limit a name.
    digest = hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{command} {out.stem[:_LONGEST]} {digest}"


class Study:
    """A study that is written trial by trial; without a storage nothing is."""

    def __init__(
        self, storage: str | None, name: str, space: Mapping[str, Any], losses: Sequence[str]
    ) -> None:
        """Create the study in place of an older one: a resumed search adds all trials again.

        Args:
            storage: any URL that Optuna takes; None keeps no study.
            name: of the study, see study_name.
            space: of each parameter (low, high), or a list of its values.
            losses: names of the values.
        """
        self._space = space
        self._losses = losses
        self._study = None
        if storage is None:
            return
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        if name in optuna.get_all_study_names(storage):
            optuna.delete_study(study_name=name, storage=storage)
        self._study = optuna.create_study(
            study_name=name, storage=storage, directions=["minimize"] * len(losses)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study.set_metric_names(list(losses))

    def add(
        self, params: Mapping[str, Any], losses: Mapping[str, float], **attributes: Any
    ) -> None:
        """Add a trial.

        Args:
            params: a value for each name in the space. A trial with one outside of the space is
                added as failed, without this parameter.
            losses: by name; all are user attributes, too. A trial that lacks one of the study's,
                or has one that is not finite, is added as failed, without values.
            attributes: user attributes, as JSON takes them.
        """
        if self._study is None:
            return
        from optuna.distributions import CategoricalDistribution, FloatDistribution
        from optuna.trial import TrialState, create_trial

        values = [float(losses.get(name, math.nan)) for name in self._losses]
        inside = {name: value for name, value in params.items() if self._has(name, value)}
        complete = all(map(math.isfinite, values)) and len(inside) == len(params)
        trial = create_trial(
            state=TrialState.COMPLETE if complete else TrialState.FAIL,
            params=inside,
            distributions={
                name: CategoricalDistribution(space)
                if isinstance(space, list)
                else FloatDistribution(*space)
                for name, space in self._space.items()
                if name in inside
            },
            values=values if complete else None,
            user_attrs={name: _as_json(value) for name, value in {**losses, **attributes}.items()},
        )
        self._study.add_trial(trial)

    def _has(self, name: str, value: Any) -> bool:
        """True if a parameter's value is in the space."""
        space = self._space[name]
        if isinstance(space, list):
            return value in space
        low, high = space
        return bool(low <= value <= high)


def _as_json(value: Any) -> Any:
    """A number that JSON has no form for as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
