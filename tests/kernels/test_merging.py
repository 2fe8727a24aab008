"""Attention over a few keys merged with that over others, against one softmax over all of them."""

from __future__ import annotations

import pytest
import torch

from kernels.merging import with_few_keys

B, H, G, Q, D, E = 2, 6, 3, 5, 16, 24


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("few", [1, 7])
def test_two_parts_are_one_softmax(few, masked, softcap):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(B, H, Q, D),
        torch.randn(B, G, few + 40, D),
        torch.randn(B, G, few + 40, E),
    )
    seen = torch.ones(Q, few + 40, dtype=torch.bool)
    if masked:
        # The first query sees none of the few, the second none but those.
        seen[0, :few] = False
        seen[1, few:] = False
    logits = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(H // G, 1)) * 0.3
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~seen, float("-inf"))
    values = v.repeat_interleave(H // G, 1)
    lse = logits[..., few:].logsumexp(-1)
    out = (logits[..., few:] - lse[..., None]).exp().nan_to_num() @ values[:, :, few:]
    found = with_few_keys(
        *(out, lse, q, k[:, :, :few], v[:, :, :few]),
        seen=seen[:, :few] if masked else None,
        scale=0.3,
        softcap=softcap,
    )
    torch.testing.assert_close(found, logits.softmax(-1) @ values)
