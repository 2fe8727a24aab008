"""What attention of a whole prefill takes: index builds and kernels of every layer, on the inputs of a real prompt."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from kernels.attention import sparse_attention
from kernels.patterns import LayerPlan
from profiling.inside.capture import LayerInputs, capture
from profiling.inside.head_fidelity import dense_attention
from profiling.models.loading import LoadedModel
from profiling.prompts.prompt import Prompt
from profiling.speed.baselines import KERNEL, MODEL


def attention_seconds(
    loaded: LoadedModel,
    prompt: Prompt,
    plans: Mapping[str, Mapping[int, LayerPlan]],
    *,
    backend: str = "auto",
    repeats: int = 3,
    dense: bool = False,
    builds: bool = False,
) -> dict[str, float]:
    """Seconds of each set of plans by layer, index build included: the sum over the layers of their medians.

    In each layer all sets take turns, so that a noisy machine is noisy for all. With `dense` both dense attentions of
    the same layers are among them, under the names of profiling.speed.baselines; torch's is left out where a layer
    has a soft-cap, which it does not do.
    """
    on_gpu = loaded.model.device.type == "cuda"
    layers = {layer for by_layer in plans.values() for layer in by_layer}
    sums = dict.fromkeys(plans, 0.0)

    def visit(inputs: LayerInputs) -> None:
        if inputs.layer not in layers:
            return
        runs: dict[str, Callable[[], object]] = {}
        for name, by_layer in plans.items():
            runs[name] = by_plan(inputs, by_layer[inputs.layer], backend)
            if builds:
                runs[build_of(name)] = partial(by_layer[inputs.layer].build, inputs.q, inputs.k, scale=inputs.scale)
        if dense:
            runs[KERNEL] = lambda: dense_attention(inputs, backend=backend)[0]
            if inputs.softcap is None:
                runs[MODEL] = by_sdpa(inputs)
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(repeats + 1):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                if on_gpu:
                    torch.cuda.synchronize()
                if turn:
                    taken[name].append(time.perf_counter() - start)
        for name, seconds in taken.items():
            sums[name] = sums.get(name, 0.0) + statistics.median(seconds)

    capture(loaded.model, torch.tensor([prompt.input_ids], device=loaded.model.device), visit)
    return sums


def build_of(name: str) -> str:
    """Under which name the index builds of a set of plans are."""
    return f"{name}, index"


def by_plan(inputs: LayerInputs, plan: LayerPlan, backend: str) -> Callable[[], Tensor]:
    """A layer's attention by its patterns, index build included, ready to be timed."""
    q, k, v = inputs.q, inputs.k, inputs.v

    def run() -> Tensor:
        index = plan.build(q, k, scale=inputs.scale)
        out: Tensor = sparse_attention(q, k, v, index, scale=inputs.scale, softcap=inputs.softcap, backend=backend)
        return out

    return run


def by_sdpa(inputs: LayerInputs) -> Callable[[], Tensor]:
    """A layer's dense attention by torch, ready to be timed; without its soft-cap."""

    def run() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            inputs.q, inputs.k, inputs.v, is_causal=True, scale=inputs.scale, enable_gqa=True
        )

    return run
