"""What it costs each KV head to keep a share of its tokens as H2O would: the curves that budgets are chosen by.

Shapes: L layers, G KV heads, H query heads, N shares, S prompt length, K keys so far, D head dim, E value dim.

A prompt is walked once. Every query adds to the accumulated scores (H2O, section 3.1); at some places the next few
queries attend both to everything and, for each share, to the heavy hitters and the latest tokens of that moment. What
earlier evictions would have changed is not followed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from artifacts import HeadwiseError
from kernels.decode import MAX_QUERIES, decode_attention
from profiling.capture import LayerInputs, capture
from profiling.models import LoadedModel
from profiling.prompts import Prompt
from runtime.layers import attention_layers

SHARES = (1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
# Places in a prompt where is measured, after its first part.
_PLACES = 12
_FIRST = 0.25


@dataclass(frozen=True, eq=False, kw_only=True)
class BudgetCurves:
    """Means over prompts and places; NaN for layers that slide or have no attention.

    error (L, G, N): squared error that a head leaves in the residual stream, as a share of the stream's square.
    kept (L, G, N): attention mass on what is kept, as a mean over the query heads.
    shares (N): half heavy hitters, half the latest tokens.
    """

    shares: tuple[float, ...]
    error: np.ndarray
    kept: np.ndarray

    @property
    def layers(self) -> list[int]:
        """The layers that were measured."""
        return [int(layer) for layer in np.flatnonzero(np.isfinite(self.error).all((1, 2)))]


def measure(loaded: LoadedModel, prompts: Sequence[Prompt], shares: Sequence[float] = SHARES) -> BudgetCurves:
    """Walk the prompts; the model is left as it was.

    Raises:
        HeadwiseError: every layer slides.
    """
    model, modules = loaded.model, attention_layers(loaded.model)
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    shape = (config.num_hidden_layers, heads, len(shares))
    error, kept = np.zeros(shape), np.zeros(shape)
    measured: set[int] = set()
    with tqdm(total=len(prompts) * len(modules), desc="budget curves", unit="layer", disable=None) as progress:
        for prompt in prompts:
            with _stream_squares(model, modules) as squares:

                def visit(inputs: LayerInputs, squares: dict[int, Tensor] = squares) -> None:
                    progress.update()
                    if inputs.sliding_window is not None or inputs.sinks is not None:
                        return
                    missed, mass = _walk(inputs, _projection(modules[inputs.layer]), squares[inputs.layer], shares)
                    error[inputs.layer] += missed / len(prompts)
                    kept[inputs.layer] += mass / len(prompts)
                    measured.add(inputs.layer)

                capture(model, torch.tensor([prompt.input_ids], device=model.device), visit)
    if not measured:
        raise HeadwiseError(f"every layer of {loaded.name} slides over a window: there is no budget to choose")
    for layer in set(range(shape[0])) - measured:
        error[layer] = kept[layer] = np.nan
    return BudgetCurves(shares=tuple(shares), error=error, kept=kept)


def _walk(
    inputs: LayerInputs, project: nn.Linear | None, squares: Tensor, shares: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Error and mass kept (G, N) of one layer. squares (S): of the residual stream at each token."""
    q, k, v, s_len = inputs.q, inputs.k, inputs.v, inputs.q.shape[2]
    how: dict[str, Any] = {"scale": inputs.scale, "softcap": inputs.softcap}
    scores = torch.zeros(k.shape[:3], device=k.device)
    blocks = math.ceil(s_len / MAX_QUERIES)
    first = min(blocks - 1, math.ceil(blocks * _FIRST))
    places = {int(place) for place in np.linspace(first, blocks - 1, _PLACES)}
    error = np.zeros((k.shape[1], len(shares)))
    kept = np.zeros_like(error)
    for block in range(blocks):
        begin, end = block * MAX_QUERIES, min((block + 1) * MAX_QUERIES, s_len)
        some, keys, values = q[:, :, begin:end], k[:, :, :end], v[:, :, :end]
        whole = decode_attention(some, keys, values, scores="sum", **how)
        if block in places:
            for at, share in enumerate(shares):
                tokens = _held(scores[:, :, :begin], share, end)
                part = decode_attention(some, keys, values, tokens=tokens, **how)
                error[:, at] += _energy(part.out - whole.out, project, k.shape[1], squares[begin:end]) / len(places)
                mass = (part.lse - whole.lse).exp().unflatten(1, (k.shape[1], -1)).mean((0, 2, 3))
                kept[:, at] += mass.double().cpu().numpy() / len(places)
        assert whole.scores is not None
        scores[:, :, :end] += whole.scores
    return error, kept


def _held(scores: Tensor, share: float, k_len: int) -> Tensor:
    """The tokens (1, G, C) int32 held of `k_len`: half of the share by score, half the latest; scores (1, G, K)."""
    recent = math.ceil(share / 2 * k_len)
    old = max(0, min(scores.shape[2], k_len - recent))
    heavy = min(math.ceil(share / 2 * k_len), old)
    best = scores[:, :, :old].topk(heavy, dim=-1).indices
    latest = torch.arange(old, k_len, device=scores.device).expand(*best.shape[:2], -1)
    return torch.cat([best, latest], dim=-1).sort(-1).values.to(torch.int32)


def _energy(missed: Tensor, project: nn.Linear | None, kv_heads: int, squares: Tensor) -> np.ndarray:
    """Mean over queries of each KV head's squared error (G), as shares of `squares` (Q). missed (1, H, Q, E)."""
    group, dim = missed.shape[1] // kv_heads, missed.shape[3]
    errors = missed[0].float().unflatten(0, (kv_heads, group)).permute(0, 2, 1, 3).flatten(2)
    if project is not None:
        weight = project.weight.float().unflatten(1, (kv_heads, group * dim)).transpose(0, 1)
        errors = errors @ weight.transpose(1, 2)
    return (errors.square().sum(-1) / squares.to(errors.device)).mean(-1).double().cpu().numpy()


def _projection(module: nn.Module) -> nn.Linear | None:
    """What takes the heads' outputs into the residual stream; None where it goes by no known name."""
    for name in ("o_proj", "out_proj", "dense", "c_proj", "wo"):
        found = getattr(module, name, None)
        if isinstance(found, nn.Linear):
            return found
    return None


@contextmanager
def _stream_squares(model: nn.Module, modules: dict[int, nn.Module]) -> Any:
    """{layer: squared length of the residual stream (S) before it}, filled as the model runs."""
    squares: dict[int, Tensor] = {}
    names = {module: name for name, module in model.named_modules()}
    hooks = []
    for layer, module in modules.items():
        block = model.get_submodule(names[module].rpartition(".")[0])

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], layer: int = layer) -> None:
            stream = args[0] if args else kwargs["hidden_states"]
            squares[layer] = stream[0].float().square().sum(-1).clamp(min=1e-12)

        hooks.append(block.register_forward_pre_hook(before, with_kwargs=True))
    try:
        yield squares
    finally:
        for hook in hooks:
            hook.remove()
