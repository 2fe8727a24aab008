"""NaN, infinity and huge logits: which outputs they reach, on any backend.

Every query that sees NaN in a query or a key is NaN, and no other. NaN or infinity in a value
reaches every query that sees it and may reach the other queries of its KV head, in its own column:
a weight of zero times NaN is NaN, as in torch's sdpa.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention import AttentionCall, attend, triton
from kernels.decode import decode_attention
from kernels.index import no_lists
from kernels.logits import Logits
from kernels.patterns import LayerPlan, make
from tests.conformance.attention_cases import TOLERANCES
from tests.conformance.tensors import difference

NAN = float("nan")
INF = float("inf")
OPS = ("attention", "decode", "scores")
PLAN = LayerPlan(
    [
        make("vertical_slash", vertical=70, slash=64),
        make("dense"),
        make("block_sparse", blocks=2),
        make("a_shape", sink=64, window=70),
    ],
    2,
)
Op = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Call(NamedTuple):
    """Tensors of a call, the keys that each query sees (B, H, Q, K), and the op: (out, lse)."""

    q: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor
    op: Op


def call(
    op: str,
    backend: str,
    *,
    q_len: int,
    k_len: int,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
    window: int | None = None,
    batch: int = 2,
    form: str = "",
) -> Call:
    """A call of two KV heads; form: "no lists", or "parts" of the keys, which is Triton's."""
    torch.manual_seed(0)
    q = torch.randn(batch, 4, q_len, 32).to(dtype)
    k, v = (torch.randn(batch, 2, k_len, 32).to(dtype) for _ in range(2))
    distance = torch.arange(k_len - q_len, k_len)[:, None] - torch.arange(k_len)
    seen = (distance >= 0).expand(batch, 4, -1, -1)
    if op == "attention":
        index = PLAN.build(q, k, window=window)
        if form == "no lists":
            index = replace(index, **no_lists(batch, 4, index.num_rows, device=q.device))
        seen = index.to_mask()
    elif op == "decode" and window is not None:
        seen = seen & (distance < window)
    k, v = (x.to(stored or dtype) for x in (k, v))
    scores = "sum" if op == "scores" else "none"

    def served(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if op != "attention":
            logits = Logits(window=None if op == "scores" else window)
            result = decode_attention(q, k, v, logits=logits, scores=scores, backend=backend)
            assert result.scores is None or result.scores.shape == k.shape[:3]
            return result.out, result.lse
        attention = AttentionCall(q, k, v, index)
        if form == "parts":
            return triton.run(attention, splits=3)
        return attend(attention, backend)

    return Call(q, k, v, seen, served)


def faults(
    inputs: Call, clean: tuple[Tensor, Tensor], place: str, at: int, bad: float
) -> list[str]:
    """Faults of a call with a bad number of the first sequence: in query head 1, or KV head 1."""
    q, k, v = (x.clone() for x in inputs[:3])
    reached = torch.zeros(q.shape[:3], dtype=torch.bool)
    may_differ = torch.zeros_like(clean[0], dtype=torch.bool)
    if place == "query":
        q[0, 1, at, 5] = bad
        reached[0, 1, at] = True
    else:
        (k if place == "key" else v)[0, 1, at, 5] = bad
        reached[0, 2:] = inputs.seen[0, 2:, :, at]
    assert bool(reached.any()) and not bool(reached.all())
    out, lse = inputs.op(q, k, v)
    clean_out, clean_lse = clean
    touched = torch.zeros(out.shape, dtype=torch.bool)
    if place == "value":
        touched[..., 5] = reached
        may_differ[0, 2:, :, 5] = True
        reached = torch.zeros_like(reached)
    else:
        touched |= reached[..., None]
        may_differ = touched
    out_differs, lse_differs = (
        difference(x, y) > TOLERANCES[name, q.dtype][0]
        for name, x, y in (("out", out, clean_out), ("lse", lse, clean_lse))
    )
    result = {
        "a query that sees it is finite": bool(out[touched].isfinite().any()),
        "another output differs": bool(out_differs[~may_differ].any()),
        "a log-sum-exp is not NaN": not bool(lse[reached].isnan().all()),
        "another log-sum-exp differs": bool(lse_differs[~reached].any()),
    }
    return [f"{place} {at}, {bad}: {name}" for name, wrong in result.items() if wrong]


def reached(inputs: Call, *places: tuple[str, int, float]) -> Iterator[str]:
    """All faults of bad numbers: each ("query", "key" or "value", its row, the number)."""
    clean = inputs.op(*inputs[:3])
    assert all(bool(x.isfinite().all()) for x in clean)
    for place, at, bad in places:
        yield from faults(inputs, clean, place, at, bad)


def wrong_where_huge(op: str, backend: str, length: int, factor: float, dtype: torch.dtype) -> str:
    """Fault of a backend if the largest key takes all the weight; empty if it is right."""
    q_len = 5 if op == "decode" else length
    inputs, expected = (
        call(op, name, q_len=q_len, k_len=length, dtype=dtype, batch=1)
        for name in (backend, "reference")
    )
    big = inputs.q * factor
    out, lse = inputs.op(big, *inputs[1:3])
    right, right_lse = expected.op(big, *inputs[1:3])
    if not (out.isfinite().all() and lse.isfinite().all() and out.abs().max() > 1):
        return f"{op}: not finite, or nothing"
    if not torch.allclose(lse, right_lse, rtol=1e-4, atol=1e-4):
        return f"{op}: log-sum-exp"
    # Where two keys are as near as rounding, either may take all.
    same = (out - right).abs().amax(-1) < 0.05
    return "" if same.float().mean() > 0.99 else f"{op}: output"
