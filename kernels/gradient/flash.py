"""Gradients of dense attention by torch's own FlashAttention kernels, on a GPU and on the CPU.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.call import GradientCall
from kernels.copies import with_rows

_DTYPES = {
    "cuda": (torch.float16, torch.bfloat16),
    "cpu": (torch.float32, torch.float16, torch.bfloat16),
}
_MAX_DIM = 256


def supports(call: GradientCall) -> str | None:
    """The reason why this backend cannot serve the call; None where it can."""
    q_len = call.q.shape[2]
    k_len = call.k.shape[2]
    dim = max(call.q.shape[3], call.v.shape[3])
    device = call.device
    if device.type not in _DTYPES:
        return f"it serves tensors on a GPU or the CPU, not on {device.type}"
    if call.q.dtype not in _DTYPES[device.type]:
        names = " and ".join(str(dtype)[6:] for dtype in _DTYPES[device.type])
        return f"on {device.type} it serves {names}, not {call.q.dtype}"
    if call.logits.softcap is not None:
        return "it has no soft-cap"
    window = call.logits.window
    if window is not None and window < k_len:
        return "it has no sliding window"
    if q_len != k_len:
        return f"it serves as many queries as keys, not {q_len} and {k_len}"
    if device.type == "cpu":
        return None
    if dim % 8 or dim > _MAX_DIM:
        return f"it serves head dims that are multiples of 8 up to {_MAX_DIM}, not {dim}"
    return _missing(device)


def _missing(device: torch.device) -> str | None:
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no FlashAttention"
    if torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return f"it needs compute capability 8.0, this GPU has {major}.{minor}"
    return None


def run(call: GradientCall) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by q, k and v of a call."""
    q_dim = call.q.shape[3]
    v_dim = call.v.shape[3]
    dim = max(q_dim, v_dim)
    tensors = (call.q, call.k, call.v, call.out, call.grad_out)
    # torch's kernels have one head dim: zeros fill up the smaller one of D and E.
    q, k, v, out, grad_out = (with_rows(F.pad(x.detach(), (0, dim - x.shape[3]))) for x in tensors)
    lse = call.lse.detach().float().contiguous()
    scale = call.logits.factor(q_dim)
    if call.device.type == "cpu":
        dq, dk, dv = _on_cpu(q, k, v, out, lse, grad_out, scale)
    else:
        dq, dk, dv = _on_gpu(q, k, v, out, lse, grad_out, scale)
    return dq[..., :q_dim], dk[..., :q_dim], dv[..., :v_dim]


def _on_gpu(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    q_len = q.shape[2]
    # Read with dropout alone.
    nothing = torch.empty(2, dtype=torch.uint64, device=q.device)
    with _same_bits():
        gradients: tuple[Tensor, ...] = torch.ops.aten._flash_attention_backward(
            *(x.transpose(1, 2) for x in (grad_out, q, k, v, out)),
            *(lse, None, None, q_len, q_len, 0.0, True, nothing, nothing),
            scale=scale,
        )
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    return dq, dk, dv


def _on_cpu(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in fp32, with repeated keys and values: torch's kernel has no grouped KV heads."""
    dtype = q.dtype
    num_kv_heads = k.shape[1]
    group = q.shape[1] // num_kv_heads
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    queries, outputs, by_out = (x.float() for x in (q, out, grad_out))
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        by_out, queries, keys, values, outputs, lse, 0.0, True, scale=scale
    )
    dk, dv = (x.unflatten(1, (num_kv_heads, group)).sum(2) for x in gradients[1:])
    return gradients[0].to(dtype), dk.to(dtype), dv.to(dtype)


@contextmanager
def _same_bits() -> Iterator[None]:
    """Sum in a fixed order: the result of a search must not depend on the run."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
