"""Headwise in Python: finds an artifact for a loaded model, loads it, and applies it to the model.

    import headwise

    model, tokenizer = headwise.load_model("smollm2")
    headwise.search(model, tokenizer, out="cfg.yaml")
    with headwise.load("cfg.yaml").apply(model) as handle:
        model.generate(**inputs)

Importing this package or loading an artifact imports neither torch nor transformers; load_model,
search, gate and evaluate import them when called.
"""

from typing import TYPE_CHECKING, Any

from artifacts import HeadwiseError
from headwise.loaded_models import evaluate, gate, search
from headwise.models import load_model
from runtime import load

if TYPE_CHECKING:
    from runtime import apply_dense, undo

    __version__: str

__all__ = [
    "HeadwiseError",
    "__version__",
    "apply_dense",
    "evaluate",
    "gate",
    "load",
    "load_model",
    "search",
    "undo",
]


def __getattr__(name: str) -> Any:
    if name in ("apply_dense", "undo"):
        # They import torch.
        import runtime

        return getattr(runtime, name)
    if name == "__version__":
        from importlib.metadata import version

        return version("headwise")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
