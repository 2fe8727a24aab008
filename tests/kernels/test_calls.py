"""Calls of attention and decode that are odd and right: what serves them, and what comes out.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim.
"""

from __future__ import annotations

import mmap
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from kernels import registry
from kernels.attention import AttentionCall, attend, cpu, sparse_attention
from kernels.call import Operands
from kernels.checks import EIGHT_BITS
from kernels.decode import DecodeCall, decode_attention
from kernels.decode import cpu as decode_cpu
from kernels.dense import dense_attention
from kernels.index import PAD, SparseIndex, lists
from kernels.logits import Logits
from kernels.patterns import LayerPlan, make
from kernels.patterns.dense import dense_index
from kernels.ragged import Ragged
from tests.conformance.test_kernel_backends import SERVERS, skip_without
from tests.kernels.test_refusals import int32

NO_COMPILER = "no C++ compiler found (install g++, or set CXX)"


def inputs(
    heads: int = 2, kv_heads: int = 1, length: int = 200, **options: Any
) -> tuple[Tensor, Tensor, Tensor, SparseIndex]:
    torch.manual_seed(0)
    q = torch.randn(1, heads, length, 64, **options)
    k, v = (torch.randn(1, kv_heads, length, 64, **options) for _ in range(2))
    patterns = [make("vertical_slash", vertical=70, slash=64), make("dense")] * (heads // 2)
    return q, k, v, LayerPlan(patterns, kv_heads).build(q, k)


def test_attention_defaults_equal_causal_softmax():
    q, k, v, _ = inputs()
    index = LayerPlan([make("dense")] * 2, 1).build(q, k)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(sparse_attention(q, k, v, index), expected, rtol=1e-5, atol=1e-5)
    out, lse, scores = decode_attention(q[:, :, -1:], k, v)
    torch.testing.assert_close(out, expected[:, :, -1:], rtol=1e-5, atol=1e-5)
    assert lse.shape == (1, 2, 1) and scores is None


def test_attention_with_broken_index_stays_in_bounds():
    """Bypass the op's checks: native code must stop at out-of-range columns and tiles."""
    q, k, v, index = inputs()
    for columns, wild in ((int32(-5, 3), -5), (int32(3, 80, -7, 90), -7)):
        broken = index.changed(columns=columns.expand(1, 2, -1))
        with pytest.raises(ValueError, match=f"column {wild} is none of the 200 keys"):
            cpu.run(AttentionCall(q, k, v, broken))
    wild_entries = index.changed(
        diagonals=int32(0, -(2**31), PAD).expand(1, 2, 3),
        **lists(int32(-1, -(10**9), PAD).expand(1, 2, 4, 3)),
        columns=int32(3, PAD).expand(1, 2, 2),
    )
    offsets = torch.tensor([-5, 10**12, 3, -(10**12), 1]).expand(1, 2, 5)
    beyond = wild_entries.changed(offsets=offsets)
    for broken in (wild_entries, beyond):
        out, _ = cpu.run(AttentionCall(q, k, v, broken))
        assert out.isfinite().all()
    with pytest.raises(ValueError, match="offsets must be ascending from 0 to at most 24"):
        sparse_attention(q, k, v, replace(beyond))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_attention_ignores_padding_and_accepts_views(backend):
    q, k, v, index = inputs()
    pad = torch.nn.functional.pad
    padded = replace(
        index,
        diagonals=pad(index.diagonals, (0, 3), value=PAD),
        **lists(pad(index.padded_tiles(), (0, 2), value=PAD)),
        columns=pad(index.columns, (0, 70), value=PAD),
    )
    padded.validate()
    viewed = replace(index, columns=torch.stack([index.columns, index.columns + 1], dim=-1)[..., 0])
    expected = sparse_attention(q, k, v, index, backend=backend)
    for other in (padded, viewed):
        assert torch.equal(sparse_attention(q, k, v, other, backend=backend), expected)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_attention_with_empty_batch_returns_empty_output(backend):
    q, k, v, _ = inputs()
    index = LayerPlan([make("dense")] * 2, 1).build(q[:0], k[:0])
    out, lse = attend(AttentionCall(q[:0], k[:0], v[:0], index), backend)
    assert out.shape == (0, 2, 200, 64) and lse.shape == (0, 2, 200)


def test_attention_with_infinite_score_returns_nan():
    q, k, v, index = inputs()
    q[0, 0, :, 5], k[0, 0, 3, 5] = 1.0, float("inf")
    out = sparse_attention(q, k, v, index, backend="cpu")
    assert out[0, 0, 3:].isnan().all() and out[0, 0, :3].isfinite().all()


@pytest.mark.parametrize("softcap", [1e-3, 30.0])
def test_soft_cap_with_extreme_logits_bounds_both_ends(softcap):
    q, k, v, index = inputs()
    logits = Logits(softcap=softcap)
    for factor in (1e-4, 1e3):
        (out, lse), (expected, expected_lse) = (
            attend(AttentionCall(q * factor, k * factor, v, index, logits=logits), backend)
            for backend in ("cpu", "reference")
        )
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse, expected_lse, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offsets_beyond_two_billion_elements_are_correct(dtype):
    """Use strides past 2^31 over address space that is hardly touched."""
    q, k, _, index = inputs(4, 2, dtype=dtype)
    far = 3 * 2**30
    row, head, batch = far // 300, far, far + 64
    size = (batch + head + far) * dtype.itemsize
    no_reserve = 0x4000
    space = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    storage = torch.frombuffer(space, dtype=dtype)
    wide_k = storage.as_strided((2, 2, 200, 64), (batch, head, row, 1))
    wide_k.copy_(k.expand(2, -1, -1, -1))
    plan = LayerPlan([make("vertical_slash", vertical=70, slash=64), make("dense")] * 2, 2)
    two = plan.build(q.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1))
    out = sparse_attention(q.expand(2, -1, -1, -1), wide_k, wide_k, two, backend="cpu")
    expected = sparse_attention(q, k, k, index, backend="cpu")
    assert torch.equal(out, expected.expand(2, -1, -1, -1))


def test_auto_without_a_kernel_raises_reasons(monkeypatch):
    q, k, v, index = inputs()
    monkeypatch.setattr("kernels.native.build.load", lambda: NO_COMPILER)
    for call in (
        lambda: sparse_attention(q, k, v, index),
        lambda: dense_attention(q, k, v),
        lambda: decode_attention(q[:, :, -3:], k, v),
        lambda: decode_attention(q, k, v, scores="sum"),
    ):
        with pytest.raises(registry.NoKernelError, match=r"no fast kernel: triton: .*; cpu: no C"):
            call()
    for op in ("attention", "decode"):
        assert registry.why_not(op, Operands(q, k, v)) == {
            "triton": "it serves tensors on a GPU, not on cpu",
            "cpu": NO_COMPILER,
            "reference": None,
        }
    with pytest.raises(ValueError, match=r"backend 'cpu' cannot serve this call: no C\+\+ comp"):
        decode_attention(q[:, :, -3:], k, v, backend="cpu")
    with pytest.raises(ValueError, match="no C"):
        cpu.engines(torch.float32)


def test_attention_rejects_inputs_that_require_gradients():
    q, k, v, index = inputs()
    q.requires_grad_()
    out = sparse_attention(q, k, v, index, backend="reference")
    step = decode_attention(q[:, :, -3:], k, v, backend="reference")
    (out.sum() + step.out.sum()).backward()
    assert q.grad is not None and q.grad.abs().sum() > 0
    reason = "it has no backward pass (use torch.no_grad or torch.inference_mode)"
    for op in (cpu, decode_cpu):
        assert op.supports(Operands(q, k, v)) == reason
        with torch.no_grad():
            assert op.supports(Operands(q, k, v)) is None


@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_op_propagates_tangents(op):
    q, k, v, index = inputs(length=16)

    def attended(values):
        if op == "prefill":
            return sparse_attention(q, k, values, index, backend="reference")
        return decode_attention(q, k, values, backend="reference").out

    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(attended(forward_ad.make_dual(v, torch.ones_like(v))))
        # Weights add up to 1.
        torch.testing.assert_close(out.tangent, torch.ones_like(out.primal))
    _, tangent = torch.func.jvp(attended, (v,), (torch.ones_like(v),))
    torch.testing.assert_close(tangent, torch.ones_like(tangent))
    with forward_ad.dual_level(), pytest.raises(ValueError, match="no forward-mode derivative"):
        sparse_attention(q, k, forward_ad.make_dual(v, torch.ones_like(v)), index, backend="cpu")


def test_unsupported_engine_error_names_it():
    q, k, v, index = inputs()
    reason = "engine 'dot' does not serve Float on this processor"
    with pytest.raises(ValueError, match=reason):
        cpu.run(AttentionCall(q, k, v, index), engine="dot")
    with pytest.raises(ValueError, match=reason):
        decode_cpu.run(DecodeCall(q[:, :, -1:], k, v), engine="dot")


def test_index_is_validated_once_and_built_index_never(monkeypatch):
    q, k, v, _ = inputs()
    plan = LayerPlan([make("vertical_slash", vertical=70, slash=64), make("dense")], 1)
    built = plan.build(q, k, ragged=Ragged.left_padded([150], 200, 200))
    calls = []
    monkeypatch.setattr(
        "kernels.index.SparseIndex.check_shapes",
        lambda self: calls.append("shapes" if self._valid else "entries"),
    )
    sparse_attention(q, k, v, built)
    assert "entries" not in calls
    hand = replace(plan.build(q, k), window=90)
    assert not hand._valid
    sparse_attention(q, k, v, hand)
    assert hand._valid


@pytest.mark.parametrize("op", ["attention", "decode"])
@pytest.mark.parametrize(("dtype", "server"), SERVERS)
@pytest.mark.parametrize("stored", EIGHT_BITS)
def test_all_eight_bit_codes_decode_as_in_torch(op, dtype, server, stored):
    """Conformance cases are random; this test covers all 256 codes."""
    engine = skip_without(server, {"attention": cpu, "decode": decode_cpu}[op].engines(dtype))
    # Head i reads code i of the key; a softmax over one key returns its value bit for bit.
    q = torch.eye(256, dtype=dtype)[None, :, None]
    index = dense_index(1, 256, 1, 1, q.device)

    def attended(k, v):
        if op == "decode":
            return decode_cpu.run(DecodeCall(q, k, v, logits=Logits(scale=1.0)), engine=engine)[:2]
        return cpu.run(AttentionCall(q, k, v, index, logits=Logits(scale=1.0)), engine=engine)

    codes = torch.arange(256, dtype=torch.uint8).view(stored)[None, None, None]
    wide = codes.float()
    finite = codes.where(wide.isfinite(), torch.zeros((), dtype=stored))
    out, lse = attended(finite, codes)
    assert torch.equal(lse[0, :, 0], finite.float()[0, 0, 0])
    expected = wide.to(dtype).expand(1, 256, 1, 256)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
