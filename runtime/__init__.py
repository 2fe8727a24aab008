"""Applies an artifact to a transformers model: sparse prefill through its attention interface.

    from runtime import load

    with load("cfg.yaml").apply(model):
        model.generate(...)

Importing this package and loading an artifact import neither torch nor transformers.
"""

from typing import TYPE_CHECKING, Any

from runtime.headwise import Headwise, apply_dense, load, memory_report, warm_up

if TYPE_CHECKING:
    from runtime.handle import Handle

__all__ = ["Handle", "Headwise", "apply_dense", "load", "memory_report", "warm_up"]


def __getattr__(name: str) -> Any:
    if name == "Handle":
        from runtime.handle import Handle

        return Handle
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
