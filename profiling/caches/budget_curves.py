"""Error of each KV head by the fraction of its tokens that it keeps as H2O would.

Shapes: L layers, G KV heads, H query heads, N shares, S prompt length, K keys so far, D head dim, E
value dim.

A prompt is walked once. Every query adds to the accumulated scores (H2O, section 3.1); at some
places the next few queries attend both to everything and, for each share, to the heavy hitters and
the latest tokens of that moment. What earlier evictions would have changed is not followed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels import registry
from kernels.call import MAX_QUERIES, Operands
from kernels.decode import decode_attention
from profiling.finite import check_finite
from profiling.inside.capture import LayerInputs, capture
from profiling.inside.residual import ResidualStream
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel
from profiling.progress import Phase, phase
from profiling.prompts.prompt import Prompt, digest
from runtime.devices import execution_device
from runtime.layers import attention_layers, heads_of, text_config

SHARES = (1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
# Places in a prompt where is measured, after its first part.
_PLACES = 12
_FIRST = 0.25


@dataclass(frozen=True, eq=False, kw_only=True)
class BudgetCurves:
    """Means over prompts and places; NaN for sliding-window layers and layers without attention.

    Attributes:
        shares: (N) budgets as fractions of the prompt: half heavy hitters, half the latest tokens.
        error: (L, G, N) squared error of a head in the residual stream, as a fraction of the
            stream's squared norm.
        kept: (L, G, N) attention mass on the retained tokens, the mean over the query heads.
    """

    shares: tuple[float, ...]
    error: np.ndarray
    kept: np.ndarray

    @property
    def layers(self) -> list[int]:
        """The layers that were measured."""
        return [int(layer) for layer in np.flatnonzero(np.isfinite(self.error).all((1, 2)))]


def measure(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    shares: Sequence[float] = SHARES,
    ledger: Ledger | None = None,
) -> BudgetCurves:
    """Measure the curves on the prompts; the model is left unchanged.

    Args:
        loaded: the model.
        prompts: each is measured alone; the curves are their means.
        shares: fractions of the keys to measure at.
        ledger: keeps each prompt's curves; its settings say which model they are of.

    Raises:
        HeadwiseError: every layer slides.
    """
    by_prompt = []
    layers = len(attention_layers(loaded.model))
    with phase("budget curves", len(prompts) * layers, "layers") as shown:
        for prompt in prompts:
            if ledger is None:
                by_prompt.append(_of_prompt(loaded, prompt, shares, shown))
                continue
            unit = ledger.unit("curves", {"prompt": digest([prompt]), "shares": shares})
            curves = ledger.get(unit)
            if curves is None:
                curves = ledger.put(unit, _of_prompt(loaded, prompt, shares, shown))
            else:
                shown.skip(layers)
            by_prompt.append(curves)
    error, retained = (
        np.sum([curves[name] / len(prompts) for curves in by_prompt], axis=0)
        for name in ("error", "kept")
    )
    if not np.isfinite(error).any():
        raise HeadwiseError(
            f"no layer of {loaded.name} sees every token: there is no budget to choose"
        )
    return BudgetCurves(shares=tuple(shares), error=error, kept=retained)


def _of_prompt(
    loaded: LoadedModel, prompt: Prompt, shares: Sequence[float], shown: Phase
) -> dict[str, np.ndarray]:
    """Error and mass kept on one prompt, each (L, G, N), NaN where nothing is measured."""
    model = loaded.model
    _, kv_heads = heads_of(model)
    error = np.full((text_config(model).num_hidden_layers, kv_heads, len(shares)), np.nan)
    retained = error.copy()
    with ResidualStream(model) as stream:

        def visit(inputs: LayerInputs) -> None:
            shown.update()
            if inputs.sliding_window is None and inputs.logits.sinks is None:
                walked = error[inputs.layer], retained[inputs.layer] = _walk(inputs, stream, shares)
                what = f"{prompt.task}: errors of budgets in layer {inputs.layer} are"
                check_finite(walked, what, model)

        capture(
            model,
            torch.tensor([prompt.input_ids], device=execution_device(model), dtype=torch.long),
            visit,
        )
    # The effect of a norm after the attention is known only once the block has run.
    for layer in np.flatnonzero(np.isfinite(retained).all((1, 2))):
        error[layer] *= float(stream.gain(int(layer)))
    return {"error": error, "kept": retained}


def _walk(
    inputs: LayerInputs, stream: ResidualStream, shares: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Error and mass kept (G, N) of one layer."""
    q = inputs.q
    k = inputs.k
    v = inputs.v
    s_len = inputs.q.shape[2]
    # As a search does: slow where there is no kernel.
    backend = registry.fast("decode", Operands(q, k, v))[0] or "reference"
    options: dict[str, Any] = {"logits": inputs.logits, "backend": backend}
    scores = torch.zeros(k.shape[:3], device=k.device, dtype=torch.float32)
    blocks = math.ceil(s_len / MAX_QUERIES)
    first = min(blocks - 1, math.ceil(blocks * _FIRST))
    places = {int(place) for place in np.linspace(first, blocks - 1, _PLACES)}
    error = np.zeros((k.shape[1], len(shares)))
    retained = np.zeros_like(error)
    for block in range(blocks):
        begin = block * MAX_QUERIES
        end = min((block + 1) * MAX_QUERIES, s_len)
        queries = q[:, :, begin:end]
        keys = k[:, :, :end]
        values = v[:, :, :end]
        whole = decode_attention(queries, keys, values, scores="sum", **options)
        if block in places:
            for at, share in enumerate(shares):
                tokens = _held(scores[:, :, :begin], share, end)
                part = decode_attention(queries, keys, values, tokens=tokens, **options)
                missed = stream.relative(
                    inputs.layer, _changes(part.out - whole.out, k.shape[1]), slice(begin, end)
                )
                error[:, at] += missed.mean(-1).double().cpu().numpy() / len(places)
                mass = (part.lse - whole.lse).exp().unflatten(1, (k.shape[1], -1)).mean((0, 2, 3))
                retained[:, at] += mass.double().cpu().numpy() / len(places)
        assert whole.scores is not None
        scores[:, :, :end] += whole.scores
    return error, retained


def _held(scores: Tensor, share: float, k_len: int) -> Tensor:
    """Choose the tokens (1, G, C) int32 held of `k_len`.

    Half of the fraction by score, half the latest; scores (1, G, K).
    """
    recent = math.ceil(share / 2 * k_len)
    old = max(0, min(scores.shape[2], k_len - recent))
    heavy = min(math.ceil(share / 2 * k_len), old)
    best = scores[:, :, :old].topk(heavy, dim=-1).indices
    latest = torch.arange(old, k_len, device=scores.device).expand(*best.shape[:2], -1)
    return torch.cat([best, latest], dim=-1).sort(-1).values.to(torch.int32)


def _changes(missed: Tensor, kv_heads: int) -> Tensor:
    """Split a change (1, H, Q, E) of outputs by KV head: (G, Q, H * E), zero elsewhere."""
    _, heads, q_len, dim = missed.shape
    alone = missed.new_zeros(kv_heads, q_len, kv_heads, heads // kv_heads * dim)
    own = missed[0].unflatten(0, (kv_heads, -1)).transpose(1, 2).flatten(2)
    for head in range(kv_heads):
        alone[head, :, head] = own[head]
    return alone.flatten(2)
