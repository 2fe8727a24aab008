"""CONTRIBUTING's walk "Add a backend": by a module and one line it serves the cases of every op."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest
import torch

from kernels import registry
from kernels.attention import attend, sparse_attention
from kernels.call import Operands
from kernels.decode import decode_attention
from kernels.decode.dropping import EvictCall
from kernels.patterns.dense import dense_index
from kernels.registry import BACKENDS, Backend
from tests.conformance import attention_cases, builder_cases, decode_cases, interpreted
from tests.conformance import test_gradient_backends as gradients
from tests.conformance.test_kernel_backends import HOST
from tests.kernels import toy
from tests.kernels.recording import served_by

OPS = tuple(BACKENDS["reference"].ops)


@pytest.fixture
def added(monkeypatch) -> Iterator[ModuleType]:
    """The toy backend, registered."""
    monkeypatch.setitem(BACKENDS, "toy", Backend("cpu", dict.fromkeys(OPS, "tests.kernels.toy")))
    toy.served.clear()
    forget()
    yield toy
    forget()


def forget() -> None:
    """Have the registry read its table again."""
    registry.order.cache_clear()
    registry.implementation.cache_clear()


def attention() -> None:
    for name in interpreted.KEPT["attention"]:
        case = interpreted.in_its_dtype(attention_cases.SMALL, name)
        problem = attention_cases.problem(case, HOST)
        out, lse = attention_cases.served(case, problem, partial(attend, backend="toy"))
        attention_cases.check(out, problem.out, "out", case.dtype)
        attention_cases.check(lse, problem.lse, "lse", case.dtype)


def decode() -> None:
    for name in interpreted.KEPT["decode"]:
        case = interpreted.in_its_dtype(decode_cases.SMALL | decode_cases.PROMPTS, name)
        for kind in case.kinds:
            op = partial(decode_attention, backend="toy")
            assert decode_cases.close(decode_cases.run(case, HOST, op, kind), case.dtype), name


def gradient() -> None:
    for name in ("length 65", "soft-cap 2", "window 100, soft-cap, 130 of 700"):
        result = gradients.gradients(gradients.CASES[name], torch.float32, "toy")
        _, right = gradients.problem(gradients.CASES[name], torch.float32)
        gradients.check(result, right, gradients.TOLERANCES[torch.float32])


def estimate() -> None:
    for case in builder_cases.ESTIMATES.values():
        # Half precision is Triton's, which adds up in fp32: torch rounds the logits to 16 bits.
        exact = replace(case, dtype=torch.float32)
        assert builder_cases.estimate_error(exact, HOST, "toy") <= builder_cases.ERROR


def means() -> None:
    for case in builder_cases.MEANS.values():
        assert builder_cases.means_error(case, HOST, "toy") <= builder_cases.ERROR


def top_k() -> None:
    for case in builder_cases.CHOICES.values():
        # For torch NaN is the largest number.
        assert builder_cases.choice_error(case, HOST, "toy", poisoned=False) == 0


def select() -> None:
    for case in builder_cases.LAYERS.values():
        assert builder_cases.layer_error(case, HOST, "toy") == 0


def evict() -> None:
    torch.manual_seed(0)
    memory = [torch.randn(2, 3, 30, 8), torch.randn(2, 3, 30, 4), torch.rand(2, 3, 30)]
    memory.append(torch.arange(30, dtype=torch.int32).expand(2, 3, -1).contiguous())
    found, wanted = ([x.clone() for x in memory] for _ in range(2))
    for held, backend in ((found, "toy"), (wanted, "reference")):
        EvictCall(*held, rows=[30, 20], latest=[25, 16], queries=[30, 21]).run(backend)
    for one, other, before in zip(found, wanted, memory, strict=True):
        assert torch.equal(one, other) and not torch.equal(one, before)


CASES = (attention, decode, gradient, estimate, means, select, top_k, evict)


@pytest.mark.parametrize("cases", CASES, ids=lambda cases: cases.__name__)
def test_one_line_backend_passes_the_cases_of_every_op(cases, added):
    cases()
    assert added.served[cases.__name__] > 0


def test_cases_cover_all_ops():
    assert {cases.__name__ for cases in CASES} == set(OPS) == set(toy.OPS.values())
    assert all(backend.ops.keys() <= set(OPS) for backend in BACKENDS.values())


def test_new_backend_is_registered_by_name_and_selected_by_auto(added):
    q, k, v = (torch.randn(1, 2, 70, 16) for _ in range(3))
    index = dense_index(1, 2, 70, 70, q.device)
    expected = sparse_attention(q, k, v, index, backend="reference")
    # Before the generic backends and after faster ones for the same device.
    assert registry.order("attention", "cpu") == ("cpu", "toy", "triton", "reference")
    assert registry.fast("attention", Operands(q, k, v)) == ("cpu", None)
    with served_by("toy", "reference", ops=OPS):
        assert registry.fast("attention", Operands(q, k, v)) == ("toy", None)
        assert torch.equal(sparse_attention(q, k, v, index), expected)
    assert added.served["attention"] == 1
    message = "unknown backend 'abacus'; known: auto, triton, cpu, reference, toy"
    with pytest.raises(ValueError, match=message):
        sparse_attention(q, k, v, index, backend="abacus")
    reason = "backend 'toy' cannot serve this call: it is a toy for the CPU, not for meta"
    with pytest.raises(ValueError, match=reason):
        decode_attention(*(x.to("meta") for x in (q[:, :, -1:], k, v)), backend="toy")


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_backend_support_is_checked_once_per_call(backend, monkeypatch):
    calls = []
    for op in ("attention", "decode"):
        served = registry.implementation(op, "cpu")
        supports = served.supports
        monkeypatch.setattr(
            served, "supports", lambda call, op=op, ask=supports: calls.append(op) or ask(call)
        )
    q, k, v = (torch.randn(1, 2, 70, 16) for _ in range(3))
    index = dense_index(1, 2, 70, 70, q.device)
    sparse_attention(q, k, v, index, backend=backend)
    decode_attention(q[:, :, -1:], k, v, backend=backend)
    assert calls == ["attention", "decode"]
