"""The layers of a model that are searched, and the backend that scores and serves them."""

from __future__ import annotations

import sys

import torch

from artifacts import HeadwiseError, ModelInfo
from kernels import registry
from kernels.call import AttentionCall
from kernels.index import TILE
from kernels.patterns.dense import dense_index
from profiling.models.loading import LoadedModel
from runtime.layers import attention_layers, full_layers


def searched_layers(loaded: LoadedModel) -> tuple[int, ...]:
    """The layers that see the whole prompt, in order.

    Raises:
        HeadwiseError: there is none.
    """
    searched = tuple(full_layers(attention_layers(loaded.model)))
    if not searched:
        raise HeadwiseError(f"no layer of {loaded.name} sees every token: nothing to search")
    return searched


def serving_backend(
    backend: str, model: ModelInfo, dtype: str, device: str, *, quiet: bool = False
) -> str:
    """The backend that scores candidates and will serve; reports the reference on stderr.

    Raises:
        HeadwiseError: the backend that was asked for cannot.
    """
    probe = torch.zeros(1, 1, TILE, model.head_dim, dtype=getattr(torch, dtype), device=device)
    # The first call shows whether a kernel compiles.
    call = AttentionCall(probe, probe, probe, dense_index(1, 1, TILE, TILE, probe.device))
    if backend != "auto":
        try:
            registry.run("attention", call, backend)
        except ValueError as error:
            raise HeadwiseError(f"--backend {backend}: {error}") from None
        return backend
    reasons: dict[str, str] = {}
    name, _ = registry.serve("attention", call, reasons.__setitem__)
    if name == "reference" and not quiet:
        print(
            "only the reference backend serves here, many times slower than the kernels: "
            f"{next(iter(reasons.values()))}",
            file=sys.stderr,
        )
    return name
