"""Attention with sums for any number of queries, and dropping the lowest token, by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from kernels.attention import cpu as attention
from kernels.attention import triton_launch
from kernels.decode import cpu, decode_attention, triton
from kernels.decode.dropping import drop_lowest, ranks, serves
from tests.kernels import sums_cases
from tests.kernels.decode_cases import TOLERANCES as DECODE_TOLERANCES
from tests.kernels.sums_cases import SIZES, expected
from tests.sampling import names_in_this_run, sampled

ROOT = Path(__file__).parents[2]

needs_native = pytest.mark.skipif(
    not serves(torch.empty(1)), reason="no native code on this machine"
)
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def inputs(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return sums_cases.inputs(sums_cases.Case(sizes=sizes, dtype=dtype), torch.device("cpu"))


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Launches and errors of this run's cases, in a process of its own."""
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", sums_cases.__name__, *names_in_this_run(request)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    sampled(
        sums_cases.CASES,
        "bfloat16",
        "float8",
        "slices of a cache",
        "NaN among values",
        "huge logits",
        "D 96",
    ),
)
def test_interpreted_kernels_agree_with_the_reference(name, interpreted):
    found = interpreted[name]
    for error, most in zip(
        found["errors"], DECODE_TOLERANCES[sums_cases.CASES[name].dtype], strict=True
    ):
        assert error <= most, found
    assert found["launches"] == ["tables_kernel", "sparse_attention_kernel", "column_sums_kernel"]


@pytest.mark.parametrize("name", ["slices of a cache", "NaN among values", "own scale", "float8"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_other_backends_are_put_to_the_same(name, backend):
    case = sums_cases.CASES[name]
    found = sums_cases.run(case, torch.device("cpu"), backend)
    assert all(
        error <= most for error, most in zip(found, DECODE_TOLERANCES[case.dtype], strict=True)
    ), found


def test_a_kernel_that_does_not_build_is_passed_over():
    """A kernel that cannot be built is logged, and refused where it is asked for by name."""
    x = torch.randn(1, 2, 30, 16)
    failed = mock.patch.dict(
        "kernels.breaker._failed", {triton._sums_build(x): "it does not build"}
    )
    with failed, mock.patch.object(triton_launch, "_INTERPRETED", True):
        assert triton.supports(x, x, x) == "it does not build"
        with pytest.raises(ValueError, match="'triton' cannot serve this call: it does not build"):
            decode_attention(x, x, x, scores="sum", backend="triton")
    assert triton.supports(x, x, x) == "it serves tensors on a GPU, not on cpu"


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_out_lse_and_sums_are_those_of_full_attention(sizes, backend, dtype, softcap):
    if backend == "cpu" and not serves(torch.empty(1)):
        pytest.skip("no native code on this machine")
    q, k, v = inputs(sizes, dtype)
    found = decode_attention(q, k, v, softcap=softcap, scores="sum", backend=backend)
    for one, right in zip(found, expected(q, k, v, softcap=softcap), strict=True):
        torch.testing.assert_close(
            one.float(), right, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype]
        )


@needs_native
@pytest.mark.parametrize("sizes", SIZES[2:], ids=str)
def test_every_engine_is_right(sizes):
    q, k, v = inputs(sizes, torch.bfloat16)
    right = expected(q, k, v)
    for engine in attention.engines(torch.bfloat16):
        found = cpu.with_sums(q, k, v, scale=q.shape[3] ** -0.5, softcap=None, engine=engine)
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one.float(), other, atol=2e-2, rtol=2e-2)


def test_each_query_of_a_kv_head_adds_up_to_one():
    q, k, v = inputs(SIZES[3], torch.float32)
    sums = decode_attention(q, k, v, scores="sum").scores
    assert sums is not None
    torch.testing.assert_close(sums.sum(2), torch.full((1, 3), 300.0))


@needs_native
def test_sums_do_not_depend_on_the_threads():
    q, k, v = inputs((1, 6, 2, 500, 700, 32, 32), torch.float32)
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(decode_attention(q, k, v, scores="sum", backend="cpu"))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(one, another) for one, another in zip(found[0], other, strict=True))


def test_strides_are_read_as_they_are():
    """Slices of a cache with room, and queries whose heads come after their positions."""
    q, k, v = inputs(SIZES[3], torch.float32)
    right = decode_attention(q, k, v, scores="sum")
    room = [
        torch.cat([x, torch.full_like(x, torch.nan)], dim=2)[:, :, : x.shape[2]] for x in (k, v)
    ]
    found = decode_attention(q.transpose(1, 2).contiguous().transpose(1, 2), *room, scores="sum")
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


def test_more_queries_than_keys_are_refused():
    q, k, v = inputs((1, 2, 1, 30, 20, 8, 8), torch.float32)
    with pytest.raises(ValueError, match="got 30 queries and 20 keys"):
        decode_attention(q, k, v, scores="sum")
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        decode_attention(q[:, :, :20], k, v, scores="sum", backend="fast")
    for wrong in ({"scores": "max"}, {"scores": "none"}, {"scores": "sum", "window": 5}):
        with pytest.raises(ValueError, match="decode takes 1 to 16 queries, got 20"):
            decode_attention(q[:, :, :20], k, v, **wrong)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_last_token_takes_the_row_of_the_lowest(dtype, backend):
    rows, room = 6, 9
    scores = torch.tensor([[3.0, 1.0, 2.0, 0.5, 9.0, 0.1], [0.2, 5.0, 0.3, 0.4, 0.0, 7.0]]).view(
        1, 2, rows
    )
    # Position 20 and on are the latest: the lowest score before them is in row 3 of the first head,
    # 0 of the second.
    positions = torch.tensor([[0, 4, 7, 9, 20, 21], [2, 5, 8, 11, 20, 21]], dtype=torch.int32).view(
        1, 2, rows
    )
    scores, positions = (torch.nn.functional.pad(x, (0, room - rows)) for x in (scores, positions))
    keys, values = torch.randn(1, 2, room, 8).to(dtype), torch.randn(1, 2, room, 4).to(dtype)
    right = [x.clone() for x in (keys, values, scores, positions)]
    for head, victim in enumerate((3, 0)):
        for x in right:
            x[0, head, victim] = x[0, head, rows - 1]
    drop_lowest(keys, values, scores, positions, rows=rows, latest=20, backend=backend)
    for found, one in zip((keys, values, scores, positions), right, strict=True):
        assert torch.equal(found, one)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_ranks_are_divided_by_how_many_queries_saw_a_token(backend):
    scores = torch.tensor([[[4.0, 3.0, 1.0, 0.1]]])
    positions = torch.tensor([[[0, 5, 8, 9]]], dtype=torch.int32)
    torch.testing.assert_close(
        ranks(scores, positions, latest=9, queries=10)[0, 0, :3], torch.tensor([0.4, 0.6, 0.5])
    )
    for queries, victim in ((10, 0), (None, 2)):
        held = [torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), scores.clone(), positions.clone()]
        drop_lowest(*held, rows=4, latest=9, queries=queries, backend=backend)
        assert held[3][0, 0, victim] == 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"scores": torch.zeros(1, 2, 9).double()},
            "scores must be float32 and positions int32, got torch.float64",
        ),
        (
            {"positions": torch.zeros(1, 2, 8, dtype=torch.int32)},
            "shapes do not go together: .*\\(1, 2, 8\\)",
        ),
        ({"keys": torch.zeros(1, 9, 2, 8).transpose(1, 2)}, "must be contiguous"),
        ({"rows": 10}, "rows must be 2 to 9, got 10"),
        ({"rows": 1}, "rows must be 2 to 9, got 1"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, message):
    held = {
        "keys": torch.zeros(1, 2, 9, 8),
        "values": torch.zeros(1, 2, 9, 4),
        "scores": torch.zeros(1, 2, 9),
    }
    held["positions"] = torch.zeros(1, 2, 9, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        drop_lowest(**{**held, "rows": 5, "latest": 1, **changes})


@needs_native
def test_native_code_and_torch_drop_the_same():
    generator = torch.Generator().manual_seed(0)
    held = []
    for _ in range(2):
        generator.manual_seed(0)
        keys, values = (torch.randn(2, 3, 300, 16, generator=generator) for _ in range(2))
        scores = torch.rand(2, 3, 300, generator=generator)
        positions = torch.arange(300, dtype=torch.int32).expand(2, 3, -1).contiguous()
        held.append([keys, values, scores, positions])
    for rows in range(300, 100, -1):
        for tensors, backend in zip(held, ("cpu", "reference"), strict=True):
            drop_lowest(
                *tensors, rows=rows, latest=260, queries=300 if rows % 2 else None, backend=backend
            )
    for one, other in zip(*held, strict=True):
        assert torch.equal(one[:, :, :100], other[:, :, :100])
