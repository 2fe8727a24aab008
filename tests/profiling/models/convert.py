"""Converts a GGUF file as a process of its own; one that is to die ends before its last rename."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from profiling.models import gguf


def die(*_: Any) -> NoReturn:
    os._exit(9)


if __name__ == "__main__":
    file, cache, *more = sys.argv[1:]
    os.environ["HEADWISE_CACHE"] = cache
    if more == ["die"]:
        os.rename = die
    print(gguf.converted([Path(file)], name="x", dtype="float32"))
