"""An Optuna study of a search's measurements, kept in a storage that optuna-dashboard opens.

Each allocation of `headwise search`, each section of `headwise kv` and each choice of `headwise
filters` is one trial. Its losses are the values, all to be minimized, so that the dashboard shows
their Pareto front and the importance of each parameter."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from artifacts import HeadwiseError
from artifacts.errors import shorten

if TYPE_CHECKING:
    import optuna

STORAGE_HELP = "keep each measurement as a trial of an Optuna study, such as sqlite:///study.db"

# The password of a URL ends at the last @, as unescaped ones may be in it.
_PASSWORD = re.compile(r"(?P<user>://(?!/)[^:]*):(?P<secret>.*)@", re.DOTALL)
_QUERY_PASSWORD = re.compile(
    r"(?P<name>[?&][^=&]*(?:pass|pwd|secret|token|key|credential)[^=&]*=)(?P<secret>[^&]*)",
    re.DOTALL | re.IGNORECASE,
)


def without_password(url: str) -> str:
    """A storage's URL with `user:password@` cut to `user@`, and passwords of its query to `***`."""
    return _PASSWORD.sub(r"\g<user>@", _QUERY_PASSWORD.sub(r"\g<name>***", url))


def passwords(url: str) -> list[str]:
    """The passwords in a storage's URL, as they are written and as they are read."""
    without_query = _QUERY_PASSWORD.sub(r"\g<name>", url)
    secrets = [match["secret"] for match in _QUERY_PASSWORD.finditer(url)]
    secrets += [match["secret"] for match in _PASSWORD.finditer(without_query)]
    return [each for secret in secrets if secret for each in (secret, unquote(secret))]


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


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study that is written trial by trial; nothing without a storage.

    A resumed search measures nothing twice but records everything again, so an older study of the
    name is replaced.

    Attributes:
        storage: any URL that Optuna takes; None keeps no study.
        name: of the study.
        space: the range of each numeric parameter, (low, high), and the options of each other one,
            a list.
        losses: names of the values.
    """

    storage: str | None
    name: str
    space: Mapping[str, tuple[float, float] | list[Any]]
    losses: Sequence[str]

    def __post_init__(self) -> None:
        if self.storage is None:
            return
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        names = [each.study_name for each in optuna.get_all_study_summaries(self.storage)]
        if self.name in names:
            optuna.delete_study(study_name=self.name, storage=self.storage)
        study = optuna.create_study(
            study_name=self.name,
            storage=self.storage,
            directions=["minimize"] * len(self.losses),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(list(self.losses))

    def add(
        self, params: Mapping[str, Any], losses: Mapping[str, float], **attributes: Any
    ) -> None:
        """Add a trial.

        Args:
            params: a value for each name in `space`.
            losses: by name. A trial that lacks one of them is added as failed, without values.
            attributes: user attributes, as JSON takes them.
        """
        if self.storage is None:
            return
        import optuna

        state = optuna.trial.TrialState.COMPLETE
        values: list[float] | None = None
        if set(self.losses) <= set(losses):
            values = [losses[name] for name in self.losses]
        else:
            state = optuna.trial.TrialState.FAIL
        trial = optuna.trial.create_trial(
            state=state,
            params=dict(params),
            distributions={name: _distribution(each) for name, each in self.space.items()},
            values=values,
            user_attrs={**losses, **attributes},
        )
        optuna.load_study(study_name=self.name, storage=self.storage).add_trial(trial)


def _distribution(
    space: tuple[float, float] | list[Any],
) -> optuna.distributions.BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    if isinstance(space, list):
        return CategoricalDistribution(space)
    return FloatDistribution(*space)
