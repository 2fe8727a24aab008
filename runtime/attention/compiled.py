"""Calls between the graphs of torch.compile, uncompiled.

Importing this module imports torch's compiler: only code that is being compiled does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def between_graphs(function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Result of function(*args, **more); the graph that is being compiled breaks here."""
    return function(*args, **more)
