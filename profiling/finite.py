"""Figures that are not finite: a command ends at the first, for no mean or limit holds with it."""

from __future__ import annotations

from typing import Any

import numpy as np

from artifacts import HeadwiseError


def check_finite(values: Any, what: str, model: Any) -> None:
    """Raise HeadwiseError if one of the values is NaN or infinite.

    Args:
        values: numbers, or an array of them.
        what: says what the values are, such as "passkey: the losses are".
        model: the model that they were measured on.
    """
    if not np.isfinite(np.asarray(values, dtype=np.float64)).all():
        raise not_finite(what, model)


def not_finite(what: str, model: Any, where: str = "") -> HeadwiseError:
    """The error of values that are not finite; see check_finite.

    Args:
        what: says what the values are.
        model: the model that they were measured on.
        where: the first part of it whose values are not finite, if known.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    if where:
        dtype += f" (first in {where})"
    return HeadwiseError(f"{what} not finite in {dtype}: try another --dtype")
