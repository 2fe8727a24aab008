"""Large sets of cases: `make test` runs some of them, `make test-all` all.

Of the cases that need a GPU some are marked `core`: `make gpu` runs them before it times anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """The cases as parameters of a test, all but the `kept` ones marked `exhaustive`.

    Raises ValueError if a kept one is none of the cases.
    """
    marks = pytest.mark.exhaustive, pytest.mark.slow
    return [case if case in kept else _marked(case, *marks) for case in _all(cases, kept)]


def core(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """The cases as parameters of a test, the `kept` ones marked `core`; ValueError where one is
    none of the cases."""
    return [_marked(case, pytest.mark.core) if case in kept else case for case in _all(cases, kept)]


def _all(cases: Iterable[Any], kept: tuple[Any, ...]) -> list[Any]:
    cases = list(cases)
    if missing := [one for one in kept if one not in cases]:
        raise ValueError(f"{missing[0]!r} is none of the cases")
    return cases


def _marked(case: Any, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
