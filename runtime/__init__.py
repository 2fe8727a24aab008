"""Applies an artifact to a transformers model: sparse prefill through its attention interface.

    from runtime import load

    with load("cfg.yaml").apply(model):
        model.generate(...)

Importing this package and loading an artifact import neither torch nor transformers.
"""

from runtime.headwise import Handle, Headwise, apply_dense, load, memory_report, warm_up

__all__ = ["Handle", "Headwise", "apply_dense", "load", "memory_report", "warm_up"]
