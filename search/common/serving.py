"""Which backend will serve what a search finds."""

from __future__ import annotations

import torch

import kernels.dispatch as dispatch
from artifacts import HeadwiseError, ModelInfo


def serving_backend(backend: str, model: ModelInfo, dtype: str, device: str) -> str:
    """The name of the backend that scores candidates, and so of the one to serve.

    Raises:
        HeadwiseError: the backend that was asked for cannot.
    """
    probe = torch.empty(1, 1, 1, model.head_dim, dtype=getattr(torch, dtype), device=device)
    try:
        return dispatch.choose(backend, probe, probe, probe).__name__.rpartition(".")[2]
    except ValueError as error:
        raise HeadwiseError(f"--backend {backend}: {error}") from None
