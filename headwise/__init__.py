"""Headwise in Python: loads an artifact, applies it to a model, and gives the model back as it was.

    import headwise

    with headwise.load("cfg.yaml").apply(model) as handle:
        model.generate(**inputs)

Importing it and loading an artifact import neither torch nor transformers.
"""

from typing import TYPE_CHECKING, Any

from artifacts import HeadwiseError
from runtime import load

if TYPE_CHECKING:
    from runtime import apply_dense

    __version__: str

__all__ = ["HeadwiseError", "__version__", "apply_dense", "load"]


def __getattr__(name: str) -> Any:
    if name == "apply_dense":
        # It imports torch.
        from runtime import apply_dense

        return apply_dense
    if name == "__version__":
        from importlib.metadata import version

        return version("headwise")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
