"""Numbers of bytes as people write them."""

from __future__ import annotations

import re

from artifacts import HeadwiseError

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def bytes_of(text: str, option: str) -> int:
    """Bytes in a text such as 67108864 or 64MiB, given to a command as `option`.

    Raises:
        HeadwiseError: it is no positive number with a known unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise HeadwiseError(
            f"{option} must be a number of bytes such as 67108864 or 64MiB, got {text!r}"
        )
    return int(float(match[1]) * _UNITS[match[2]])
