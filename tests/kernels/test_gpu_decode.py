"""On a GPU, decode: compiled kernels against the reference, and no call that waits for it.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from kernels.decode import decode_attention, triton
from tests.conformance import interpreted
from tests.conformance.decode_cases import (
    LARGE,
    PROMPTS,
    SMALL,
    TOLERANCES,
    Case,
    close,
    errors,
    oracle,
    problem,
    run,
    serve,
)
from tests.kernels.test_gpu import DEVICE, exact_reference, no_waiting, vast_cache
from tests.sampling import core

__all__ = ["exact_reference", "vast_cache"]
pytestmark = pytest.mark.gpu
LONG = {
    f"20000 keys, D {dim}": Case(k_len=20_000, heads=8, kv_heads=2, head_dim=dim, v_dim=dim)
    for dim in (64, 80, 96, 128, 256)
}
CASES = {name: case for name, case in (SMALL | LARGE | LONG).items() if case.cache is None}
# One of each sort that the kernels tell apart.
CORE = (
    *(name for name in interpreted.KEPT["decode"] if name in CASES),
    "D 128", "D 256", "16 queries", "pages of 64, window",
    "sinks",
    "4097 keys, 32 heads on 8", "4097 keys in pages",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    core(itertools.product(CASES, TOLERANCES), *((name, torch.bfloat16) for name in CORE)),
    ids=str,
)
def test_decode_kernels_match_reference(name, dtype):
    case = replace(CASES[name], dtype=dtype)
    for scores in ("sum", "max"):
        result = run(case, DEVICE, partial(decode_attention, backend="triton"), scores)
        assert close(result, dtype), (scores, result)


@pytest.mark.parametrize("splits", [1, 2, 7, 16, 17, 128])
@pytest.mark.parametrize(
    "name", ["4097 keys, 5 queries", "2048 of 4097 keys", "4097 keys in pages"]
)
def test_decode_with_any_number_of_splits_matches_reference(name, splits):
    case = replace(LARGE[name], dtype=torch.bfloat16)
    result = run(case, DEVICE, serve(triton, splits=splits), "sum")
    assert close(result, torch.bfloat16), result


def test_auto_selects_triton_and_is_bitwise_reproducible_with_and_without_scores():
    case = replace(LARGE["4097 keys, 32 heads on 8"], dtype=torch.bfloat16)
    qkv, rest, _ = problem(case, DEVICE)
    first = decode_attention(*qkv, **rest, scores="sum")
    assert close(errors(first, oracle(case, DEVICE, "sum"), 4), torch.bfloat16)
    for scores in ("sum", "max", "none"):
        again = decode_attention(*qkv, **rest, scores=scores, backend="triton")
        assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)


@pytest.mark.parametrize("name", ["starts, ends and tokens", "pages of 64, window"])
def test_calls_do_not_synchronize_with_the_gpu(name):
    qkv, rest, _ = problem(SMALL[name], DEVICE)
    decode_attention(*qkv, **rest, scores="max", backend="triton")
    with no_waiting():
        decode_attention(*qkv, **rest, scores="max", backend="triton")


@pytest.mark.parametrize("name", core(PROMPTS, "200 of 201", "prompt, D 256"))
def test_prompt_scores_match_reference(name):
    case = PROMPTS[name]
    if case.dtype == torch.float32 and max(case.head_dim, case.v_dim) > 256:
        pytest.skip("heads as wide as these do not fit the memory of this GPU")
    result = run(case, DEVICE, partial(decode_attention, backend="triton"), "sum")
    assert close(result, case.dtype), result


def test_long_prompt_scores_are_bitwise_reproducible():
    case = Case(q_len=5000, k_len=6000, heads=8, head_dim=128, v_dim=128, dtype=torch.bfloat16)
    qkv, _, _ = problem(case, DEVICE)
    first, again = (decode_attention(*qkv, scores="sum", backend="triton") for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    error = errors(first, oracle(case, DEVICE, "sum"), 5000 * 4)
    assert close(error, torch.bfloat16), error


def test_offsets_beyond_two_billion_elements_are_correct(vast_cache):
    heads, length, dim = vast_cache.shape[1:]
    q = torch.randn(1, heads, 1, dim, dtype=torch.bfloat16, device=DEVICE)
    tokens = torch.arange(length - 300, length, dtype=torch.int32, device=DEVICE)[None]
    some = {"tokens": tokens, "scores": "sum", "backend": "triton"}
    result = decode_attention(q, vast_cache, vast_cache, **some)
    near = vast_cache[:, :, -300:].float()
    expected = decode_attention(q.float(), near, near, scores="sum", backend="reference")
    assert close(errors(result, expected, 1), torch.bfloat16)
    windowed = decode_attention(q, vast_cache, vast_cache, window=300, backend="triton")
    assert float((windowed.out.float() - expected.out).abs().max()) <= TOLERANCES[torch.bfloat16][0]
