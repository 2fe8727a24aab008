"""Keys and values of 8 bits in native code: each of their 256 codes arrives.

What the conformance suites compare with the reference is drawn at random; here every code is met.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.attention import cpu as attention
from kernels.checks import EIGHT_BITS
from kernels.decode import cpu as decode
from kernels.patterns.dense import dense_index
from tests.conformance.test_kernel_backends import SERVERS, skip_without

NOTHING = dict.fromkeys(("tokens", "starts", "ends", "window", "block_table")) | {"scores": "none"}


def served(op: str, q: Tensor, k: Tensor, v: Tensor, engine: str) -> tuple[Tensor, Tensor]:
    """out and lse of queries of one key, with a scale of 1."""
    if op == "decode":
        return decode.decode_attention(q, k, v, scale=1.0, softcap=None, engine=engine, **NOTHING)[
            :2
        ]
    index = dense_index(1, q.shape[1], 1, 1, q.device)
    return attention.sparse_attention(q, k, v, index, scale=1.0, softcap=None, engine=engine)


@pytest.mark.parametrize("op", ["attention", "decode"])
@pytest.mark.parametrize(("dtype", "server"), SERVERS)
@pytest.mark.parametrize("stored", EIGHT_BITS)
def test_every_code_is_what_torch_reads(op, dtype, server, stored):
    engine = skip_without(server, {"attention": attention, "decode": decode}[op].engines(dtype))
    codes = torch.arange(256, dtype=torch.uint8).view(stored)[None, None, None]
    wide = codes.float()
    finite = codes.where(wide.isfinite(), torch.zeros((), dtype=stored))
    # Head i asks for code i of the key; a softmax over one key gives its value, bit by bit.
    q = torch.eye(256, dtype=dtype)[None, :, None]
    out, lse = served(op, q, finite, codes, engine)
    assert torch.equal(lse[0, :, 0], finite.float()[0, 0, 0])
    expected = wide.to(dtype).expand(1, 256, 1, 256)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    # Values that are all finite go another way.
    out, _ = served(op, q, finite, finite, engine)
    assert torch.equal(out, finite.to(dtype).expand_as(out))
