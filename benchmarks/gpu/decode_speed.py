"""Time one token's decode attention over all and over selected keys; wrong results are refused.

Shapes: B batch (1 here), H query heads, G KV heads, K key length, C selected keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels.decode import Decoded, decode_attention
from profiling.speed.attention_speed import Size
from profiling.speed.latency import medians, time_calls

# Largest error that still counts as right, in rounding steps of the dtype at the largest output.
_ROUNDING_STEPS = 4
# Largest error of one query head's summed probabilities.
_MASS_ERROR = 1e-3


@dataclass(frozen=True, kw_only=True)
class DecodeSpeed:
    """One size: median seconds of a call, and the bytes of the keys and values that it has to read.

    Attributes:
        chosen: selected keys of a KV head.
        sdpa_seconds: torch's attention as models call it.
        dense_seconds: the fastest of torch's ways to compute it.
    """

    chosen: int
    sdpa_seconds: float
    dense_seconds: float
    all_seconds: float
    all_scores_seconds: float
    chosen_seconds: float
    chosen_scores_seconds: float
    all_bytes: int
    chosen_bytes: int


@torch.no_grad()
def measure_decode(size: Size, *, keys: int, repeats: int) -> DecodeSpeed:
    """Time dense SDPA, all keys, and `keys` random keys of each KV head, interleaved.

    Calls read as much as each other, so each one finds the processor's caches as a model's other
    layers and weights leave them.

    Raises:
        HeadwiseError: a result is not that of the fp32 reference.
    """
    generator = torch.Generator(size.device).manual_seed(size.seed)
    shape = (1, size.kv_heads, size.length, size.head_dim)
    q = torch.randn(
        1,
        size.heads,
        1,
        size.head_dim,
        generator=generator,
        device=size.device,
        dtype=torch.float32,
    )
    k, v = (
        torch.randn(shape, generator=generator, device=size.device, dtype=torch.float32)
        for _ in range(2)
    )
    q, k, v = (x.to(getattr(torch, size.dtype)) for x in (q, k, v))
    keys = min(keys, size.length)
    order = torch.rand(
        shape[:3], generator=generator, device=size.device, dtype=torch.float32
    ).argsort(-1)[..., :keys]
    tokens = order.sort(-1).values.to(torch.int32)
    for name, rows in (("all keys", None), ("selected keys", tokens)):
        _check(decode_attention(q, k, v, tokens=rows, scores="sum"), q, k, v, rows, name)
    torch_runs = _in_torch(q, k, v)
    seconds = medians(
        time_calls(
            {
                **torch_runs,
                "all": lambda: decode_attention(q, k, v),
                "all, scores": lambda: decode_attention(q, k, v, scores="sum"),
                "chosen": lambda: decode_attention(q, k, v, tokens=tokens),
                "chosen, scores": lambda: decode_attention(q, k, v, tokens=tokens, scores="sum"),
            },
            repeats=repeats,
            device=size.device,
        )
    )
    row = 2 * size.kv_heads * size.head_dim * k.element_size()
    return DecodeSpeed(
        chosen=keys,
        sdpa_seconds=seconds["sdpa"],
        dense_seconds=min(seconds[name] for name in torch_runs),
        all_seconds=seconds["all"],
        all_scores_seconds=seconds["all, scores"],
        chosen_seconds=seconds["chosen"],
        chosen_scores_seconds=seconds["chosen, scores"],
        all_bytes=row * size.length,
        chosen_bytes=row * keys,
    )


def _in_torch(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    """One query's dense attention in torch, as models call it and in two shared-key ways."""
    # The query heads of a KV head as queries of one head: the same for a query that sees every key.
    rows = q.view(1, k.shape[1], -1, q.shape[-1])
    scale = q.shape[-1] ** -0.5
    attention = torch.nn.functional.scaled_dot_product_attention
    return {
        "sdpa": lambda: attention(q, k, v, enable_gqa=True),
        "sdpa, heads as queries": lambda: attention(rows, k, v),
        "products": lambda: torch.softmax(rows @ k.transpose(2, 3) * scale, -1) @ v,
    }


def _check(
    decoded: Decoded, q: Tensor, k: Tensor, v: Tensor, tokens: Tensor | None, name: str
) -> None:
    """Compare the first KV head with the fp32 reference: no speed of a wrong result."""
    group = q.shape[1] // k.shape[1]
    if tokens is None:
        first = None
    else:
        first = tokens[:, :1]
    expected, _, mass = decode_attention(
        *(x.float() for x in (q[:, :group], k[:, :1], v[:, :1])),
        tokens=first,
        scores="sum",
        backend="reference",
    )
    assert decoded.scores is not None and mass is not None
    largest = max(1.0, float(expected.abs().max()))
    for part, actual, wanted, allowed in (
        (
            "",
            decoded.out[:, :group],
            expected,
            _ROUNDING_STEPS * torch.finfo(q.dtype).eps * largest,
        ),
        (" in its scores", decoded.scores[:, :1], mass, _MASS_ERROR * group),
    ):
        error = float((actual.float() - wanted).abs().max())
        if not error <= allowed:
            raise HeadwiseError(
                f"decode over {name} is wrong{part}: "
                f"largest error {error:.3g}, allowed {allowed:.3g}; no speed is shown"
            )
