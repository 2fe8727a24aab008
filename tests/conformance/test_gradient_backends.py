"""Conformance of gradients of dense attention: every backend against autograd in fp64.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.gradient import GradientCall, attention_gradients, flash
from kernels.logits import Logits
from tests.conformance.attention_cases import Case, last, square
from tests.conformance.tensors import make_tensor
from tests.conformance.test_kernel_backends import threads
from tests.kernels.conftest import one_thread, poisoned_memory

__all__ = ["one_thread", "poisoned_memory"]


def how(case: Case) -> dict[str, Any]:
    return {"logits": Logits(scale=case.scale, softcap=case.softcap, window=case.window)}


_PLAIN = {
    **{f"length {n}": square(n) for n in (1, 63, 65, 1000)},
    **{f"{h} heads on {g}": square(257, heads=h, kv_heads=g) for h, g in ((7, 7), (9, 3))},
    "batch 2": square(200, batch=2, heads=6, kv_heads=2),
    **{f"{q} of {k}": last(q, k) for q, k in ((1, 65), (37, 1000), (129, 301))},
    "520 of 1300": last(520, 1300, heads=2),
    **{f"D {d}": square(200, head_dim=d, v_dim=d) for d in (80, 128, 256)},
    **{
        f"D {d}, E {e}": square(200, head_dim=d, v_dim=e)
        for d, e in ((192, 128), (64, 256), (33, 17), (1, 1))
    },
    "soft-cap 2": square(300, softcap=2.0),
    **{f"window {n}": square(300, window=n) for n in (1, 64, 65)},
    **{f"window {n}": square(700, heads=1, window=n) for n in (513, 2000)},
    "window 100, soft-cap, 130 of 700": last(130, 700, window=100, softcap=20.0),
    "transposed": square(300, batch=2, heads=6, kv_heads=2, layout="transposed"),
    "strided": square(300, batch=2, heads=6, kv_heads=2, layout="strided"),
    "expanded": square(300, batch=2, heads=6, kv_heads=2, layout="expanded"),
}
CASES = {name: replace(case, scale=0.2) for name, case in _PLAIN.items()}
HOST = torch.device("cpu")
GPU = torch.device("cuda", 0)
DEVICES = [HOST, pytest.param(GPU, marks=(pytest.mark.gpu, pytest.mark.core))]
# Largest absolute error, in units of the largest gradient, and relative L2 error.
TOLERANCES = {
    torch.float32: (1e-5, 5e-6),
    torch.float16: (2e-3, 5e-4),
    torch.bfloat16: (2e-2, 5e-3),
}
# A GPU multiplies rounded probabilities.
ON_GPU = {torch.float16: (2e-3, 2e-3), torch.bfloat16: (2e-2, 1e-2)}


def logits_of(q: Tensor, k: Tensor, case: Case) -> Tensor:
    """(B, H, Q, K), -inf where a query does not see a key."""
    logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(-1, -2) * case.scale
    if case.softcap is not None:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    distance = torch.arange(case.k_len - case.q_len, case.k_len)[:, None] - torch.arange(case.k_len)
    outside = (distance < 0) | (distance >= (case.window or case.k_len))
    return logits.masked_fill(outside.to(q.device), float("-inf"))


@functools.cache
def problem(
    case: Case, dtype: torch.dtype, device: torch.device = HOST
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """The tensors of a call, and its gradients in fp64, by autograd of plain softmax attention."""
    torch.manual_seed(case.q_len + case.k_len + case.head_dim)
    form = (case.layout, dtype, device)
    q = make_tensor((case.batch, case.heads, case.q_len, case.head_dim), *form)
    k = make_tensor((case.batch, case.kv_heads, case.k_len, case.head_dim), *form)
    v = make_tensor((case.batch, case.kv_heads, case.k_len, case.v_dim), *form)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    logits = logits_of(*exact[:2], case)
    out = logits.softmax(-1) @ exact[2].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    lse = logits.logsumexp(-1)
    grad_out = make_tensor(tuple(out.shape), *form)
    right = torch.autograd.grad(out, exact, grad_out.double())
    return [q, k, v, out.detach().to(dtype), lse.detach().float(), grad_out], right


def check(
    result: tuple[Tensor, ...], right: tuple[Tensor, ...], limits: tuple[float, float]
) -> None:
    for name, one, other in zip(("dq", "dk", "dv"), result, right, strict=True):
        error = (one.double() - other).nan_to_num(nan=float("inf"))
        worst = float(error.abs().max() / other.abs().max().clamp_min(1.0))
        # Of queries that see one key the gradients are 0, and the largest error says it all.
        zero = other.abs().max() < 1e-9
        relative = 0.0 if zero else float(error.norm() / other.norm())
        assert worst <= limits[0] and relative <= limits[1], (
            f"{name}: largest {worst:.3g}, relative {relative:.3g} of {limits}"
        )


def gradients(
    case: Case, dtype: torch.dtype, backend: str, *, number: int = 1, device: torch.device = HOST
) -> tuple[Tensor, ...]:
    """Gradients of a case by a backend, with a number of threads."""
    tensors, _ = problem(case, dtype, device)
    with threads(number):
        return attention_gradients(*tensors, **how(case), backend=backend)


# It computes in fp32, whatever it reads.
SOME = ("length 65", "9 heads on 3", "D 33, E 17", "window 100, soft-cap, 130 of 700", "strided")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (dtype, name)
        for dtype in TOLERANCES
        for name in CASES
        if dtype == torch.float32 or name in SOME
    ],
)
def test_reference_on_any_case_equals_autograd(dtype, name):
    result = gradients(CASES[name], dtype, "reference")
    tensors, right = problem(CASES[name], dtype)
    for one, of in zip(result, tensors, strict=False):
        assert one.dtype == of.dtype and one.shape == of.shape
    check(result, right, TOLERANCES[dtype])


@pytest.mark.parametrize("name", ["520 of 1300", "batch 2"])
def test_reference_in_blocks_of_any_size_equals_autograd(name, monkeypatch):
    _, right = problem(CASES[name], torch.float32)
    for scores in (1, 1 << 19):
        monkeypatch.setattr(reference, "_LOGITS", scores)
        result = gradients(CASES[name], torch.float32, "reference")
        check(result, right, TOLERANCES[torch.float32])


def is_served(case: Case, dtype: torch.dtype, device: torch.device) -> bool:
    """True if torch's kernels serve the case."""
    whole = case.window is None or case.window >= case.k_len
    plain = whole and (case.q_len, case.softcap) == (case.k_len, None)
    if device == HOST:
        return plain
    return plain and dtype in ON_GPU and max(case.head_dim, case.v_dim) % 8 == 0


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_flash_on_plain_attention_equals_autograd_and_declines_the_rest(dtype, name, device):
    case = CASES[name]
    tensors, right = problem(case, dtype, device)
    served = is_served(case, dtype, device)
    assert (flash.supports(GradientCall(*tensors, **how(case))) is None) == served
    if served:
        result = gradients(case, dtype, "flash", device=device)
        for one, of in zip(result, tensors, strict=False):
            assert one.dtype == of.dtype and one.shape == of.shape
        check(result, right, TOLERANCES[dtype] if device == HOST else ON_GPU[dtype])
        return
    with pytest.raises(ValueError, match="backend 'flash' cannot serve this call"):
        gradients(case, dtype, "flash", device=device)


@pytest.mark.parametrize("backend", ["flash", "reference"])
def test_gradients_with_learned_sinks_equal_autograd(backend):
    """A key with a learned logit and no value, as in gpt-oss."""
    case = CASES["batch 2"]
    tensors, _ = problem(case, torch.float32)
    q, k, v = (x.double().requires_grad_() for x in tensors[:3])
    group = case.heads // case.kv_heads
    logits = logits_of(q, k, case)
    sinks = torch.linspace(-2, 3, case.heads, dtype=torch.float64).view(-1, 1, 1)
    with_sinks = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], -1)
    out = with_sinks.softmax(-1)[..., :-1] @ v.repeat_interleave(group, 1)
    right = torch.autograd.grad(out, (q, k, v), tensors[5].double())
    lse = with_sinks.logsumexp(-1)
    arguments = [*tensors[:3], out.detach().float(), lse.detach().float(), tensors[5]]
    result = attention_gradients(*arguments, **how(case), backend=backend)
    check(result, right, TOLERANCES[torch.float32])


UNLIKE = [
    ({"softcap": 2.0}, "it has no soft-cap"),
    ({"window": 5}, "it has no sliding window"),
    ({"q": (1, 4, 7, 16)}, "it serves as many queries as keys, not 7 and 10"),
    ({"device": "meta"}, "it serves tensors on a GPU or the CPU, not on meta"),
    ({"dtype": torch.float64}, "on cpu it serves float32 and float16 and bfloat16, not torch.flo"),
]


@pytest.mark.parametrize(("changes", "reason"), UNLIKE)
def test_flash_on_other_calls_names_the_reason(changes, reason):
    options = {"device": changes.get("device", "cpu"), "dtype": changes.get("dtype", torch.float32)}
    q = torch.zeros(changes.get("q", (1, 4, 10, 16)), **options)
    k = torch.zeros(1, 2, 10, 16, **options)
    v = torch.zeros(changes.get("v", (1, 2, 10, 16)), **options)
    out = torch.zeros(*q.shape[:3], v.shape[3], **options)
    rest = {name: value for name, value in changes.items() if name in ("softcap", "window")}
    call = GradientCall(q, k, v, out, q[..., 0], out, logits=Logits(**rest))
    assert flash.supports(call).startswith(reason)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_flash_for_any_number_of_threads_gives_the_same_bits(dtype, device):
    case = square(300, batch=2, heads=6, kv_heads=2, scale=0.2)
    if not is_served(case, dtype, device):
        pytest.skip(f"no FlashAttention of {dtype} on a GPU")
    first, *rest = (
        gradients(case, dtype, "flash", number=number, device=device) for number in (1, 2, 3)
    )
    for other in rest:
        assert all(torch.equal(*pair) for pair in zip(first, other, strict=True))


def test_gradients_with_defaults_equal_definition():
    case = square(100, scale=64**-0.5)
    tensors, right = problem(case, torch.float32)
    check(attention_gradients(*tensors), right, TOLERANCES[torch.float32])


GOOD = {
    "q": torch.zeros(1, 4, 10, 8),
    "k": torch.zeros(1, 2, 20, 8),
    "v": torch.zeros(1, 2, 20, 6),
    "out": torch.zeros(1, 4, 10, 6),
    "lse": torch.zeros(1, 4, 10),
    "grad_out": torch.zeros(1, 4, 10, 6),
}
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(4, 10, 8)}, "got q 3-D, k 4-D"),
    ({"k": torch.zeros(1, 2, 20, 7)}, r"k \(1, 2, 20, 7\)"),
    ({"out": torch.zeros(1, 4, 10, 8)}, r"out \(1, 4, 10, 8\)"),
    ({"grad_out": torch.zeros(1, 4, 9, 6)}, r"grad_out \(1, 4, 9, 6\)"),
    ({"lse": torch.zeros(1, 4, 20)}, r"lse \(1, 4, 20\)"),
    ({"k": torch.zeros(1, 3, 20, 8), "v": torch.zeros(1, 3, 20, 6)}, "4 query .* 3 KV heads"),
    ({"k": torch.zeros(1, 2, 9, 8), "v": torch.zeros(1, 2, 9, 6)}, "10 queries and 9 keys"),
    (
        {"k": torch.zeros(1, 0, 20, 8), "v": torch.zeros(1, 0, 20, 6)},
        r"must be positive.* k \(1, 0, 20, 8\)",
    ),
    (
        {"grad_out": torch.zeros(1, 4, 10, 6).half()},
        "floating dtype, got torch.float32, torch.float16",
    ),
    ({"lse": torch.zeros(1, 4, 10).half()}, "lse must be torch.float32, got torch.float16"),
    ({"lse": torch.zeros(1, 4, 10, device="meta")}, "must share a device, got cpu, meta"),
    ({"logits": Logits(scale=0.0)}, "got 0.0"),
    ({"logits": Logits(softcap=float("inf"))}, "got inf"),
    ({"logits": Logits(window=0)}, "window must be at least 1, got 0"),
    ({"backend": "fast"}, "unknown backend 'fast'; known: auto, flash, reference"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_gradients_reject_inconsistent_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        attention_gradients(**{**GOOD, **changes})


def test_gradients_in_float64_are_the_reference_s():
    assert attention_gradients(**{n: x.double() for n, x in GOOD.items()})[0].dtype == torch.float64
