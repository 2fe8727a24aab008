"""The layers that a search looks at, and the backend that scores them."""

from __future__ import annotations

import sys

import torch

import kernels.dispatch as dispatch
from artifacts import HeadwiseError, ModelInfo
from kernels.attention import sparse_attention
from kernels.index import TILE
from kernels.patterns.dense import dense_index
from profiling.models.loading import LoadedModel
from runtime.layers import attention_layers, sliding_layers


def searched_layers(loaded: LoadedModel) -> tuple[int, ...]:
    """Those that see the whole prompt, in order.

    Raises:
        HeadwiseError: there is none.
    """
    modules = attention_layers(loaded.model)
    searched = tuple(sorted(modules.keys() - sliding_layers(modules)))
    if not searched:
        raise HeadwiseError(
            f"every layer of {loaded.name} slides over a window already: nothing to search"
        )
    return searched


def serving_backend(
    backend: str, model: ModelInfo, dtype: str, device: str, *, quiet: bool = False
) -> str:
    """The name of the backend that scores candidates, and so of the one to serve; says where only
    the reference can.

    Raises:
        HeadwiseError: the backend that was asked for cannot.
    """
    probe = torch.zeros(1, 1, TILE, model.head_dim, dtype=getattr(torch, dtype), device=device)
    while True:
        reasons = dispatch.why_not(probe, probe, probe)
        found = (
            next(name for name in reasons if reasons[name] is None)
            if backend == "auto"
            else backend
        )
        try:
            # That a kernel does not compile is known from its first call.
            sparse_attention(
                probe, probe, probe, dense_index(1, 1, TILE, TILE, probe.device), backend=found
            )
            break
        except ValueError as error:
            if backend != "auto":
                raise HeadwiseError(f"--backend {backend}: {error}") from None
    if found == "reference" != backend and not quiet:
        why = reasons["cpu" if probe.device.type == "cpu" else "triton"]
        print(
            f"only the reference backend serves here, many times slower than the kernels: {why}",
            file=sys.stderr,
        )
    return found
