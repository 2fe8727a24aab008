"""Cases of summed probabilities; as a script it interprets the Triton kernels.

TRITON_INTERPRET=1 python -m tests.kernels.sums_cases [NAME ...]

prints one JSON object: case -> launches, errors.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.decode import Decoded, decode_attention, reference
from tests.kernels import bfloat16
from tests.kernels.decode_cases import errors, poison_memory
from tests.kernels.triton_memory import memory_checked


@dataclass(frozen=True, kw_only=True)
class Case:
    """sizes are (B, H, G, Q, K, D, E). Keys and values are of dtype `cache`, or of the queries'.

    With `room` they are slices of a larger cache, and the heads of queries come after their
    positions; `bad` values are NaN; queries are multiplied by `factor`."""

    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None
    softcap: float | None = None
    scale: float | None = None
    room: bool = False
    bad: bool = False
    factor: float = 1.5


# B, H, G, Q, K, D, E
SIZES = [
    (2, 4, 2, 1, 70, 64, 64),
    (1, 4, 1, 16, 16, 16, 16),
    (2, 4, 2, 70, 70, 64, 64),
    (1, 9, 3, 100, 333, 64, 64),
    (1, 4, 1, 17, 65, 24, 40),
    (2, 2, 2, 600, 1201, 80, 80),
    (1, 4, 2, 64, 64, 16, 16),
    (1, 2, 1, 129, 640, 128, 64),
]
# Three query heads a KV head, two tiles of queries: as small as tells the cases below apart.
GROUPED = (1, 6, 2, 70, 200, 64, 64)
CASES = {
    **{str(sizes): Case(sizes=sizes) for sizes in SIZES[2:] if sizes[3] < 600},
    **{
        f"{q} of {k}": Case(sizes=(1, 2, 1, q, k, 32, 32))
        for q, k in ((17, 300), (33, 33), (200, 201), (97, 160))
    },
    **{f"D {d}": Case(sizes=(1, 2, 1, 70, 100, d, 64)) for d in (96, 192, 256, 300)},
    "float16": Case(sizes=GROUPED, dtype=torch.float16),
    "bfloat16": Case(sizes=GROUPED, dtype=torch.bfloat16),
    "float8": Case(sizes=GROUPED, dtype=torch.float16, cache=torch.float8_e4m3fn),
    "soft-cap 3": Case(sizes=GROUPED, softcap=3.0),
    "own scale": Case(sizes=GROUPED, scale=0.5),
    "slices of a cache": Case(sizes=GROUPED, room=True, softcap=20.0),
    "float16, slices of a cache": Case(
        sizes=(2, 6, 2, 130, 200, 80, 80), dtype=torch.float16, room=True
    ),
    "NaN among values": Case(sizes=GROUPED, bad=True),
    "huge logits": Case(sizes=GROUPED, factor=3e9),
}


def inputs(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values, each time the same."""
    batch, heads, kv_heads, q_len, k_len, dim, value_dim = case.sizes
    generator = torch.Generator().manual_seed(sum(case.sizes))
    shapes = (
        (batch, heads, q_len, dim),
        (batch, kv_heads, k_len, dim),
        (batch, kv_heads, k_len, value_dim),
    )
    q, k, v = (torch.randn(*shape, generator=generator) for shape in shapes)
    if case.bad:
        v[0, -1, k_len // 2, 3] = float("nan")
    q = (q * case.factor).to(device, case.dtype)
    k, v = (x.to(device, case.cache or case.dtype) for x in (k, v))
    if case.room:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        k, v = (torch.cat([x, torch.full_like(x, torch.nan)], dim=2)[:, :, :k_len] for x in (k, v))
    return q, k, v


def expected(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, softcap: float | None = None
) -> Decoded:
    """Results of the reference for the rounded inputs, in fp32."""
    how: dict[str, Any] = dict.fromkeys(("tokens", "starts", "ends", "window", "block_table"))
    how |= {"scale": scale or q.shape[3] ** -0.5, "softcap": softcap, "scores": "sum"}
    return Decoded(*reference.decode_attention(q.float(), k.float(), v.float(), **how))


def run(case: Case, device: torch.device, backend: str = "triton") -> tuple[float, float, float]:
    """Largest errors of out, log-sum-exp and scores, the last for each row that adds to them."""
    q, k, v = inputs(case, device)
    found = decode_attention(
        q, k, v, scale=case.scale, softcap=case.softcap, scores="sum", backend=backend
    )
    assert found.out.dtype == case.dtype and found.scores is not None
    right = expected(q, k, v, scale=case.scale, softcap=case.softcap)
    if case.bad:
        assert torch.equal(found.out.isnan(), right.out.isnan())
        found, right = (x._replace(out=x.out.nan_to_num(nan=0.0)) for x in (found, right))
    rows = case.sizes[3] * case.sizes[1] // case.sizes[2]
    if case.factor > 1e3:
        # The largest key takes all, up to what fp32 rounds off its logit; its share is 1 at most
        # all the same.
        assert float(found.scores.max()) <= rows
        right = right._replace(lse=right.lse / case.factor, scores=found.scores)
        found = found._replace(lse=found.lse / case.factor)
    return errors(found, right, rows)


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    poison_memory()
    found = {}
    for name in CASES:
        if not names or name in names:
            with bfloat16.as_on_a_device(), memory_checked() as launched:
                error = run(CASES[name], torch.device("cpu"))
            found[name] = {"launches": launched, "errors": error}
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
