"""The start of a search: its layers, the backend that scores and serves them, its resume file."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from artifacts import HeadwiseError, ModelInfo
from kernels import registry
from kernels.call import AttentionCall
from kernels.index import TILE
from kernels.patterns import Pattern
from kernels.patterns.dense import dense_index
from profiling.ledger import Ledger
from profiling.models.identity import identity_of
from profiling.models.loading import LoadedModel
from profiling.prompts.held_out import Seen
from profiling.prompts.prompt import Prompt, digest
from profiling.ranks import Ranks
from runtime.layers import attention_layers, full_layers
from search.model.config import ModelSearch
from search.model.run import SearchRun

# Raised where the resume file would keep another value under the same name.
_VERSION = 7


@contextmanager
def start_run(
    config: ModelSearch,
    loaded: LoadedModel,
    model: ModelInfo,
    prompts: list[Prompt],
    candidates: tuple[Pattern, ...],
    *,
    length: int,
    tails: tuple[int, ...],
    seen: Seen,
    ranks: Ranks,
    began: float,
    **settings: Any,
) -> Iterator[SearchRun]:
    """Open the resume file of a search, and yield its run.

    Args:
        config: with the model's device and dtype.
        loaded: the model.
        model: its fingerprint.
        prompts: of the calibration.
        candidates: patterns that heads try.
        length: tokens of a prompt.
        tails: dense tails that are compared.
        seen: windows of the prompts.
        ranks: of this launch.
        began: when the search began, by time.monotonic().
        settings: others that every job depends on.

    Raises:
        HeadwiseError: no layer sees every token, or the backend that was asked for cannot serve.
    """
    layers = searched_layers(loaded)
    backend = serving_backend(
        config.backend, model, config.dtype, config.device, quiet=not ranks.is_first
    )
    # Files are in it by name and contents, for paths differ between machines.
    settings = {
        "version": _VERSION,
        **settings,
        "length": length,
        "prompts": digest(prompts),
        "dtype": config.dtype,
        "device": config.device.partition(":")[0],
        "backend": backend,
        "dense tails": list(tails),
        "candidates": hashlib.sha256(repr(candidates).encode()).hexdigest()[:16],
    }
    identity = identity_of(loaded.model, model.name)
    with Ledger(
        config.out, "heads", identity, settings=settings, fresh=config.fresh, ranks=ranks
    ) as ledger:
        yield SearchRun(
            loaded=loaded,
            model=model,
            length=length,
            prompts=prompts,
            candidates=candidates,
            layers=layers,
            tails=tails,
            dtype=config.dtype,
            device=config.device,
            backend=backend,
            seen=seen,
            ranks=ranks,
            ledger=ledger,
            began=began,
        )


def searched_layers(loaded: LoadedModel) -> tuple[int, ...]:
    """The layers that see the whole prompt, in order.

    Raises:
        HeadwiseError: there is none.
    """
    searched = tuple(full_layers(attention_layers(loaded.model)))
    if not searched:
        raise HeadwiseError(f"no layer of {loaded.name} sees every token: nothing to search")
    return searched


def check_backend(backend: str) -> None:
    """Raise HeadwiseError for the name of no backend; serving_backend asks one for the device."""
    if backend == "auto":
        return
    try:
        registry.implementation("attention", backend)
    except ValueError as error:
        raise HeadwiseError(f"--backend {backend}: {error}") from None


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
    try:
        name, _ = registry.serve("attention", call, reasons.__setitem__)
    except registry.NoKernelError:
        if not quiet:
            print(
                "only the reference backend serves here, many times slower than the kernels: "
                f"{next(iter(reasons.values()))}",
                file=sys.stderr,
            )
        return "reference"
    return name
