"""Large sets of cases: `make test` runs some of them, `make test-all` all.

Cases that need a GPU are marked `gpu`, and some of them `core`: `make gpu` runs these first.
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


def on_gpu(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """The cases as parameters of a test, all marked `gpu`, the `kept` ones also `core`.

    Raises ValueError if a kept one is none of the cases.
    """
    core = pytest.mark.gpu, pytest.mark.core
    return [_marked(case, *core[: 1 + (case in kept)]) for case in _all(cases, kept)]


def _all(cases: Iterable[Any], kept: tuple[Any, ...]) -> list[Any]:
    cases = list(cases)
    if missing := [one for one in kept if one not in cases]:
        raise ValueError(f"{missing[0]!r} is none of the cases")
    return cases


def _marked(case: Any, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
