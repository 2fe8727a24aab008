"""Applies an artifact to a transformers model: sparse prefill through its attention interface.

    from headwise import load

    with load("cfg.yaml").apply(model):
        model.generate(...)

Importing this package and loading an artifact import neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

from runtime.load import LoadedArtifact, load

if TYPE_CHECKING:
    from runtime.apply import Handle, apply_dense, undo
    from runtime.memory import memory_report

__all__ = ["Handle", "LoadedArtifact", "apply_dense", "load", "memory_report", "undo"]

# These import torch.
_LATER = {
    "Handle": "runtime.apply",
    "apply_dense": "runtime.apply",
    "memory_report": "runtime.memory",
    "undo": "runtime.apply",
}


def __getattr__(name: str) -> Any:
    if name == "dense":
        return importlib.import_module("runtime.attention.dense")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
