"""The best dense attention that this machine has: torch's sdpa or Headwise's kernel over every key, measured once.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import dispatch
from kernels.dense import dense_attention as every_key
from runtime import measured

# With fewer keys attention is a small part of a prefill, and what the model had serves.
LEAST = 1024
# Queries and keys that stand for a class of calls, from so many keys on: whole prompts, chunks and tails on a past.
_WHOLE = {LEAST: (1024, 1024), 4096: (4096, 4096)}
_CHUNK = {LEAST: (256, 2048), 4096: (512, 8192)}
_TAIL = {LEAST: (64, 2048), 4096: (64, 8192)}
# The kernel is taken where it is faster by more than a measurement is off.
_MARGIN = 0.95
_REPEATS = 3
# Of a layer on a GPU: those of one group leave most of it idle.
_GPU_HEADS = 32
_log = logging.getLogger("headwise")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one class of calls takes on this machine, in seconds; `by` is "kernel" or "sdpa", the faster.

    right: whether the kernel agrees with the fp32 reference here; where it does not, it serves nothing.
    """

    by: str
    right: bool
    kernel_s: float
    sdpa_s: float


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    by: str = "auto",
) -> Tensor:
    """Causal attention to every key (or to a window's), by the faster of sdpa and Headwise's kernel: (B, H, Q, E).

    Args:
        q, k, v: (B, H, Q, D) queries, the last Q of the K positions, (B, G, K, D) keys, (B, G, K, E) values.
        scale, softcap: as in kernels.attention.sparse_attention.
        window: how many keys a query sees, itself included; None for all.
        by: "auto", or "kernel" or "sdpa" whatever is faster.

    Raises:
        ValueError: shapes or dtypes that do not go together; `by` is unknown; a soft-cap is asked of sdpa.
    """
    if by not in ("auto", "kernel", "sdpa"):
        raise ValueError(f"by must be auto, kernel or sdpa, got {by!r}")
    if by == "auto":
        by = "kernel" if softcap is not None or (window is not None and right(q, k, v)) else faster(q, k, v)
    if by == "kernel":
        return every_key(q, k, v, scale=scale, softcap=softcap, window=window)
    if softcap is not None:
        raise ValueError("sdpa has no soft-cap: use by='kernel'")
    return sdpa(q, k, v, scale, window)


def faster(q: Tensor, k: Tensor, v: Tensor) -> str:
    """ "kernel" or "sdpa": what is faster for causal calls like this one, measured once and kept in the cache folder.

    Below LEAST keys, and where the kernel cannot serve or is wrong, it is "sdpa".
    """
    if k.shape[2] < LEAST:
        return "sdpa"
    return _measured(*_kind(q, k, v), *_shape(q.shape[2], k.shape[2])).by


def right(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel has agreed with the reference on this device; on a CPU its tests have shown that."""
    return q.device.type == "cpu" or _measured(*_kind(q, k, v), *_WHOLE[LEAST]).right


def measurements(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> dict[int, Measured]:
    """By length of a prompt what was measured for tensors like these; lengths below LEAST are left out."""
    kind = _kind(q, k, v)
    return {length: _measured(*kind, *_shape(length, length)) for length in lengths if length >= LEAST}


def _kind(q: Tensor, k: Tensor, v: Tensor) -> tuple[torch.device, torch.dtype, int, int, int]:
    return q.device, q.dtype, q.shape[1] // k.shape[1], q.shape[3], v.shape[3]


def _shape(q_len: int, k_len: int) -> tuple[int, int]:
    """Queries and keys of the calls that stand for this one."""
    table = _WHOLE if 2 * q_len > k_len else _CHUNK if q_len >= 256 else _TAIL
    return table[4096 if k_len >= 4096 else LEAST]


_measuring = threading.Lock()
_known: dict[tuple[Any, ...], Measured] = {}


def _measured(
    device: torch.device, dtype: torch.dtype, group: int, dim: int, v_dim: int, q_len: int, k_len: int
) -> Measured:
    key = (device, dtype, group, dim, v_dim, q_len, k_len, torch.get_num_threads())
    if (found := _known.get(key)) is not None:
        return found
    # Threads that come together would disturb each other's measurement.
    with _measuring:
        if key not in _known:
            _known[key] = _look_up(device, dtype, group, dim, v_dim, q_len, k_len)
        return _known[key]


def _look_up(
    device: torch.device, dtype: torch.dtype, group: int, dim: int, v_dim: int, q_len: int, k_len: int
) -> Measured:
    """What the cache folder says of this class of calls, measured where it says nothing."""
    file = measured.file_of(device, dtype, group, dim, v_dim, q_len, k_len)
    if (kept := _read(file)) is not None:
        return kept
    # As many heads as keep the device busy.
    heads = group * max(1, -(-(_GPU_HEADS if device.type == "cuda" else torch.get_num_threads()) // group))
    made = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, count, length, width, generator=made).to(device, dtype)
        for count, length, width in ((heads, q_len, dim), (heads // group, k_len, dim), (heads // group, k_len, v_dim))
    )
    try:
        with torch.no_grad():
            found = _measure(q, k, v)
    except Exception as error:
        # A kernel that is not there, or fails to build or to run, serves nothing; the next process tries again.
        _log.info("dense attention by sdpa: the kernel cannot be measured here (%s: %s)", type(error).__name__, error)
        return Measured(by="sdpa", right=False, kernel_s=0.0, sdpa_s=0.0)
    _log.info(
        "dense attention of %s, head dim %d, %d queries and %d keys: by %s (kernel %.1f ms, sdpa %.1f ms)",
        *(str(dtype).removeprefix("torch."), dim, q_len, k_len, found.by, 1e3 * found.kernel_s, 1e3 * found.sdpa_s),
    )
    measured.write(file, asdict(found))
    return found


def _measure(q: Tensor, k: Tensor, v: Tensor) -> Measured:
    if reason := dispatch.why_slow(q, k, v):
        raise RuntimeError(reason)
    agrees = all(_agrees(q[:, :, -300:], k[:, :, -320:], v[:, :, -320:], window) for window in (None, 70))
    runs = {"kernel": lambda: every_key(q, k, v), "sdpa": lambda: sdpa(q, k, v, None)}
    seconds = dict.fromkeys(runs, float("inf"))
    # The first turn warms both up.
    for turn in range(_REPEATS + 1):
        for name, run in runs.items():
            measured.wait(q.device)
            start = time.perf_counter()
            run()
            measured.wait(q.device)
            if turn:
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    wins = agrees and seconds["kernel"] < _MARGIN * seconds["sdpa"]
    return Measured(by="kernel" if wins else "sdpa", right=agrees, kernel_s=seconds["kernel"], sdpa_s=seconds["sdpa"])


def _agrees(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> bool:
    """Whether the kernel gives what the fp32 reference gives, to the rounding of the dtype."""
    found = every_key(q, k, v, window=window).float()
    expected = every_key(q.float(), k.float(), v.float(), window=window, backend="reference")
    return bool(torch.allclose(found, expected, atol=8 * torch.finfo(q.dtype).eps, rtol=0.05))


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None = None) -> Tensor:
    """dense_attention by torch's scaled_dot_product_attention: on a GPU its cuDNN or flash, whichever it prefers."""
    q_len, k_len, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    if q_len == k_len and window is None:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=q_len > 1, scale=scale, enable_gqa=group > 1
        )
    if window is None and _takes_flash(q, v):
        # Flash has no masks, but this one, of queries that are the last of the keys.
        from torch.nn.attention.bias import causal_lower_right

        last = causal_lower_right(q_len, k_len)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, last, scale=scale, enable_gqa=group > 1)
    at = torch.arange(k_len, device=q.device)
    distance = at[k_len - q_len :, None] - at
    mask = (distance >= 0) & (distance < (k_len if window is None else window))
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _takes_flash(q: Tensor, v: Tensor) -> bool:
    """Whether torch's flash attention serves these on their device."""
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and q.shape[3] == v.shape[3] <= 256


def _read(file: Path) -> Measured | None:
    try:
        found = Measured(**(measured.read(file) or {}))
    except TypeError:
        return None
    return found if found.by in ("kernel", "sdpa") and isinstance(found.right, bool) else None
