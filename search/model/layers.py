"""The layers of a model that are searched, and the backend that scores and serves them."""

from __future__ import annotations

import sys

import torch

import kernels.dispatch as dispatch
from artifacts import HeadwiseError, ModelInfo
from kernels.attention import sparse_attention
from kernels.breaker import CannotBuildError
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
    index = dense_index(1, 1, TILE, TILE, probe.device)
    reasons = dispatch.why_not(probe, probe, probe)
    if backend == "auto":
        names = [name for name, reason in reasons.items() if reason is None]
    else:
        names = [backend]
    for name in names:
        try:
            # The first call shows whether a kernel compiles.
            sparse_attention(probe, probe, probe, index, backend=name)
            break
        except ValueError as error:
            if backend != "auto":
                raise HeadwiseError(f"--backend {backend}: {error}") from None
            if not isinstance(error.__cause__, CannotBuildError):
                raise
            reasons[name] = str(error.__cause__)
    if name == "reference" != backend and not quiet:
        if probe.device.type == "cpu":
            fastest = "cpu"
        else:
            fastest = "triton"
        print(
            "only the reference backend serves here, many times slower than the kernels: "
            f"{reasons[fastest]}",
            file=sys.stderr,
        )
    return name
