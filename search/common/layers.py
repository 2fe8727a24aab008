"""The layers that a search looks at, the backend that scores them, and their scores on prompts, a dense pass each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import kernels.dispatch as dispatch
from artifacts import HeadwiseError, ModelInfo
from kernels.attention import sparse_attention
from kernels.index import TILE
from kernels.patterns.dense import dense_index
from profiling.inside.capture import LayerInputs, capture
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel
from profiling.progress import phase
from profiling.prompts.prompt import Prompt
from runtime.layers import attention_layers, sliding_layers


def searched_layers(loaded: LoadedModel) -> tuple[int, ...]:
    """Those that see the whole prompt, in order.

    Raises:
        HeadwiseError: there is none.
    """
    modules = attention_layers(loaded.model)
    searched = tuple(sorted(modules.keys() - sliding_layers(modules)))
    if not searched:
        raise HeadwiseError(f"every layer of {loaded.name} slides over a window already: nothing to search")
    return searched


def serving_backend(backend: str, model: ModelInfo, dtype: str, device: str, *, quiet: bool = False) -> str:
    """The name of the backend that scores candidates, and so of the one to serve; says where only the reference can.

    Raises:
        HeadwiseError: the backend that was asked for cannot.
    """
    probe = torch.zeros(1, 1, TILE, model.head_dim, dtype=getattr(torch, dtype), device=device)
    while True:
        reasons = dispatch.why_not(probe, probe, probe)
        found = next(name for name in reasons if reasons[name] is None) if backend == "auto" else backend
        try:
            # That a kernel does not compile is known from its first call.
            sparse_attention(probe, probe, probe, dense_index(1, 1, TILE, TILE, probe.device), backend=found)
            break
        except ValueError as error:
            if backend != "auto":
                raise HeadwiseError(f"--backend {backend}: {error}") from None
    if found == "reference" != backend and not quiet:
        why = reasons["cpu" if probe.device.type == "cpu" else "triton"]
        print(f"only the reference backend serves here, many times slower than the kernels: {why}", file=sys.stderr)
    return found


def score_layers(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    layers: Mapping[int, Mapping[str, Any]],
    score: Callable[[LayerInputs, Mapping[str, Any] | None], Mapping[str, Any]],
    ledger: Ledger,
    name: str,
) -> dict[int, list[Any]]:
    """What `score` returns for each layer on every prompt; what the ledger has is not scored again.

    Args:
        loaded, prompts: the model, and what it runs on.
        layers: with what each one's scores depend on besides the ledger's settings.
        score: of a layer's inputs and its scores on the first prompt, None on that one.
        ledger: keeps each layer of each prompt.
        name: of the phase.
    """
    found: dict[int, list[Any]] = {layer: [] for layer in layers}
    with phase(name, len(layers) * len(prompts), "layers") as shown:
        for number, prompt in enumerate(prompts):
            units = {layer: ledger.unit(f"{name} {number}.{layer}", depends) for layer, depends in layers.items()}
            left = {layer: unit for layer, unit in units.items() if unit not in ledger}
            shown.skip(len(units) - len(left))

            def visit(inputs: LayerInputs, left: Mapping[int, Any] = left) -> None:
                if inputs.layer in left:
                    first = next(iter(found[inputs.layer]), None)
                    ledger.put(left[inputs.layer], score(inputs, first))
                    shown.update()

            if left:
                capture(loaded.model, torch.tensor([prompt.input_ids], device=loaded.model.device), visit)
            for layer, unit in units.items():
                found[layer].append(ledger.get(unit))
    return found
