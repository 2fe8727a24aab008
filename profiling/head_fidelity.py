"""How near each head's sparse attention comes to dense attention on a prompt, whatever the artifact was searched on.

Shapes: L layers, H query heads, S prompt length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from artifacts import Artifact
from kernels.attention import sparse_attention
from kernels.patterns import LayerPlan
from kernels.patterns.dense import dense_index
from profiling.capture import LayerInputs, capture
from profiling.prompts import Prompt
from runtime.patterns import kernel_patterns


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """Per head, (L, H) fp32, NaN in layers left alone.

    error: relative L2 distance of the output; recall: attention mass kept; density: share of the causal tiles computed.
    """

    error: np.ndarray
    recall: np.ndarray
    density: np.ndarray


def fidelity(
    model: Any, artifact: Artifact, prompt: Prompt, arrays: Mapping[str, np.ndarray] | None = None
) -> Fidelity:
    """Measure an artifact's patterns on one dense forward pass: each layer on the inputs that dense attention gives.

    arrays: those of the artifact's sidecar, which static patterns are read from.
    """
    patterns = kernel_patterns(artifact, arrays)
    shape = (artifact.model.num_layers, artifact.model.num_heads)
    tables = {name: np.full(shape, np.nan, dtype=np.float32) for name in ("error", "recall", "density")}

    def visit(inputs: LayerInputs) -> None:
        row = artifact.prefill.layers[inputs.layer]
        if row is None:
            return
        plan = LayerPlan([patterns[name] for name in row], inputs.k.shape[1], dense_tail=artifact.prefill.dense_tail)
        index = plan.build(inputs.q, inputs.k, scale=inputs.scale)
        whole = dense_index(1, len(row), inputs.q.shape[2], inputs.k.shape[2], inputs.q.device)
        (dense, dense_lse), (sparse, lse) = (
            sparse_attention(
                inputs.q,
                inputs.k,
                inputs.v,
                which,
                scale=inputs.scale,
                softcap=inputs.softcap,
                return_lse=True,
            )
            for which in (whole, index)
        )
        for head in range(len(row)):
            expected = dense[0, head].float()
            distance = (sparse[0, head].float() - expected).norm() / expected.norm().clamp_min(1e-30)
            tables["error"][inputs.layer, head] = distance.item()
        tables["recall"][inputs.layer] = (lse - dense_lse)[0].exp().clamp(max=1.0).mean(-1).cpu().numpy()
        tables["density"][inputs.layer] = index.density()[0].cpu().numpy()

    capture(model, torch.tensor([prompt.input_ids], device=model.device), visit)
    return Fidelity(**tables)
