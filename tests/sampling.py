"""Large sets of cases: `make test` runs those that stand for the others, `make test-all` all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """The cases as parameters of a test, all but the `kept` ones marked `exhaustive`.

    Raises ValueError where a kept one is none of the cases: nothing would stand for them.
    """
    cases = list(cases)
    if missing := [one for one in kept if one not in cases]:
        raise ValueError(f"{missing[0]!r} is none of the cases")
    return [
        case
        if case in kept
        else pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.exhaustive, pytest.mark.slow]
        )
        for case in cases
    ]


def names_in_this_run(request: pytest.FixtureRequest) -> list[str]:
    """The parameter `name` of every test of this run that uses the fixture, for what serves them all at once."""
    return [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and request.fixturename in item.fixturenames
    ]
