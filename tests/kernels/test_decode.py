"""Decode attention: every backend and engine, every case, against the fp32 reference.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, C chosen keys.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.dispatch as dispatch
from kernels.decode import MAX_QUERIES, Decoded, cpu, decode_attention, reference, triton
from kernels.index import PAD
from tests.kernels import decode_cases
from tests.kernels.decode_cases import EIGHT, LARGE, SMALL, TOLERANCES, Case, problem, run, serve
from tests.kernels.test_attention import threads
from tests.sampling import names_in_this_run, sampled

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
CASES = SMALL | LARGE | EIGHT
ENGINES = {torch.float32: ["float"], torch.float16: ["float"], torch.bfloat16: ["dot", "float"]}
SERVERS = [(dtype, engine) for dtype, engines in ENGINES.items() for engine in engines]
RUNS = [(dtype, engine, name) for dtype, engine in SERVERS for name in CASES]


def skip_without(engine: str, dtype: torch.dtype) -> None:
    if engine not in cpu.engines(dtype):
        pytest.skip(f"this processor or build has no engine {engine!r}")


@pytest.mark.parametrize(
    ("dtype", "engine", "name"), RUNS, ids=[f"{str(d)[6:]} {e}, {n}" for d, e, n in RUNS]
)
def test_native_code_agrees_with_the_reference(dtype: torch.dtype, engine: str, name: str) -> None:
    skip_without(engine, dtype)
    case = replace(CASES[name], dtype=dtype)
    for scores in ("sum", "max"):
        found = run(case, CPU, serve(cpu, case, engine=engine), scores)
        assert all(error <= most for error, most in zip(found, TOLERANCES[dtype], strict=True)), (
            scores,
            found,
        )


@pytest.mark.parametrize("dtype", ENGINES, ids=str)
@pytest.mark.parametrize(
    "name", ["65 keys", "D 192, E 128", "window, starts, ends, soft-cap", "pages of 10 and tokens"]
)
def test_reference_takes_every_dtype(dtype: torch.dtype, name: str) -> None:
    case = replace(SMALL[name], dtype=dtype)
    found = run(case, CPU, partial(decode_attention, backend="reference"), "max")
    assert all(error <= most for error, most in zip(found, TOLERANCES[dtype], strict=True)), found


@pytest.mark.parametrize("name", CASES)
def test_reference_is_softmax_over_what_is_visible(name: str) -> None:
    """The definition once more, in float64, over a mask, with neither lists nor pages."""
    case = CASES[name]
    (q, k, v), rest, seen = problem(replace(case, page=None), CPU)
    (qp, kp, vp), paged, _ = problem(case, CPU)
    groups = case.heads // case.kv_heads
    kept = seen.any(2).repeat_interleave(groups, 1)[..., None]
    keys, values = (x.double().repeat_interleave(groups, 1).where(kept, 0) for x in (k, v))
    logits = q.double() @ keys.transpose(2, 3) * (case.scale or case.head_dim**-0.5)
    if case.softcap is not None:
        logits = case.softcap * (logits / case.softcap).tanh()
    mask = seen.repeat_interleave(groups, 1)
    logits = logits.masked_fill(~mask, float("-inf"))
    lse = logits.logsumexp(-1)
    if rest["sinks"] is not None:
        lse = torch.logaddexp(lse, rest["sinks"].double()[:, None])
    shares = (logits - lse[..., None]).exp().nan_to_num()
    mass = shares.view(case.batch, case.kv_heads, -1, case.k_len)
    for scores, wanted in (("sum", mass.sum(2)), ("max", mass.amax(2))):
        found = serve(reference, case)(qp, kp, vp, **paged, scores=scores)
        expected = Decoded(shares @ values, lse, _listed(wanted, found, rest))
        assert max(decode_cases.errors(found, expected, groups * case.q_len)) <= 1e-5


def _listed(scores: Tensor, found: Decoded, rest: dict[str, Any]) -> Tensor:
    """Scores of all keys (B, G, K) at the chosen ones, or with zeros up to the last page's end."""
    assert found.scores is not None
    if (tokens := rest["tokens"]) is None:
        return torch.nn.functional.pad(scores, (0, found.scores.shape[-1] - scores.shape[-1]))
    lists = (tokens if tokens.dim() == 3 else tokens[:, None]).expand(-1, scores.shape[1], -1)
    return torch.nn.functional.pad(scores, (0, 1)).gather(
        2, lists.clamp(max=scores.shape[-1]).long()
    )


@pytest.mark.parametrize(("dtype", "engine"), SERVERS)
@pytest.mark.parametrize(
    "name", ["starts, ends and tokens", "4097 keys, 5 queries", "128 rows of a KV head"]
)
def test_scores_add_up_to_the_queries_that_see_something(
    dtype: torch.dtype, engine: str, name: str
) -> None:
    skip_without(engine, dtype)
    case = replace(CASES[name], dtype=dtype)
    qkv, rest, seen = problem(case, CPU)
    scores = serve(cpu, case, engine=engine)(*qkv, **rest, scores="sum").scores
    assert scores is not None
    rows = seen.any(-1).sum(-1) * (case.heads // case.kv_heads)
    torch.testing.assert_close(scores.sum(-1), rows.float(), rtol=1e-5, atol=1e-5)
    largest = serve(cpu, case, engine=engine)(*qkv, **rest, scores="max").scores
    assert largest is not None and (largest <= scores + 1e-6).all() and (largest <= 1 + 1e-5).all()


@pytest.mark.parametrize(("dtype", "engine"), SERVERS)
@pytest.mark.parametrize("name", ["4097 keys, 5 queries", "2048 of 4097 keys", "ends far apart"])
def test_same_bits_for_any_number_of_threads_with_scores_and_without(
    dtype: torch.dtype, engine: str, name: str
) -> None:
    skip_without(engine, dtype)
    case = replace(LARGE[name], dtype=dtype)
    qkv, rest, _ = problem(case, CPU)
    results = []
    for number, scores in ((1, "sum"), (2, "sum"), (3, "sum"), (2, "none")):
        with threads(number):
            results.append(serve(cpu, case, engine=engine)(*qkv, **rest, scores=scores))
    first = results[0]
    for result in results[1:]:
        assert torch.equal(result.out, first.out) and torch.equal(result.lse, first.lse)
        assert result.scores is None or torch.equal(result.scores, first.scores)  # type: ignore[arg-type]
    assert results[-1].scores is None


def test_queries_that_see_nothing() -> None:
    """Every chosen row lies behind the first queries: zeros, -inf, and no part in the scores."""
    case = Case(q_len=4, k_len=64, tokens="shared", chosen=2)
    (q, k, v), rest, _ = problem(replace(case, tokens=None), CPU)
    rest = {**rest, "tokens": torch.tensor([[62, 63]], dtype=torch.int32)}
    for backend in ("cpu", "reference"):
        found = decode_attention(q, k, v, **rest, scores="sum", backend=backend)
        assert (found.out[:, :, :2] == 0).all() and (found.out[:, :, 2:] != 0).all()
        assert (found.lse[:, :, :2] == float("-inf")).all() and found.lse[:, :, 2:].isfinite().all()
        assert found.scores is not None and found.scores.sum().item() == pytest.approx(6 * 2)


def test_a_nan_key_reaches_the_queries_that_see_it_and_no_other() -> None:
    (q, k, v), _, _ = problem(Case(q_len=2, k_len=1200, batch=2), CPU)
    k = k.clone()
    k[0, 1, 1199, 3] = float("nan")
    for backend in ("cpu", "reference"):
        found = decode_attention(q, k, v, backend=backend)
        for x in (found.out.isnan().all(-1), found.out.isnan().any(-1), found.lse.isnan()):
            # The last query of the second KV head's three query heads.
            assert x.nonzero().tolist() == [[0, head, 1] for head in (3, 4, 5)]


def test_defaults() -> None:
    (q, k, v), _, _ = problem(SMALL["65 keys"], CPU)
    out, lse, scores = decode_attention(q, k, v)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert lse.shape == q.shape[:3] and scores is None


# One of each sort that the kernels tell apart.
INTERPRETED = (
    "65 keys",
    "5 queries",
    "D 33, E 17",
    "ragged tokens",
    "starts, ends and tokens",
    "pages of 16",
    "20 splits, 300 keys",
    "float16, window, starts, ends, soft-cap",
    "float8 e4m3, pages of 16",
    "float8 e5m2, sinks, tokens",
)


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[str, tuple[float, float, float]]:
    """Errors of this run's cases, in a process of its own: Triton interprets all of it or none."""
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", decode_cases.__name__, *names_in_this_run(request)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    errors: dict[str, tuple[float, float, float]] = json.loads(done.stdout)
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(decode_cases.interpreted(), *INTERPRETED))
def test_interpreted_kernels_agree_with_the_reference(
    name: str, interpreted: dict[str, tuple[float, float, float]]
) -> None:
    dtype = decode_cases.interpreted()[name][0].dtype
    found = interpreted[name]
    assert all(error <= most for error, most in zip(found, TOLERANCES[dtype], strict=True)), found


def inputs(**change: Tensor) -> dict[str, Tensor]:
    return {
        "q": torch.ones(2, 4, 3, 16),
        "k": torch.ones(2, 2, 40, 16),
        "v": torch.ones(2, 2, 40, 8),
        **change,
    }


ONES = torch.ones(2, dtype=torch.int32)
PAGES = {"k": torch.ones(2, 8, 2, 16), "v": torch.ones(2, 8, 2, 8)}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.ones(4, 3, 16)}, "q, k and v must be 4-D (B, heads, length, dim), got 3, 4, 4-D"),
    (
        {"q": torch.ones(2, 4, 3, 8)},
        "shapes do not go together: q (2, 4, 3, 8), k (2, 2, 40, 16), v (2, 2, 40, 8)",
    ),
    ({"q": torch.ones(3, 4, 3, 16)}, "shapes do not go together"),
    ({"q": torch.ones(2, 3, 3, 16)}, "3 query heads do not divide into 2 KV heads"),
    ({"q": torch.ones(2, 0, 3, 16)}, "0 query heads do not divide into 2 KV heads"),
    ({"q": torch.ones(2, 4, 0, 16)}, "decode takes 1 to 16 queries, got 0"),
    ({"q": torch.ones(2, 4, 17, 16)}, "decode takes 1 to 16 queries, got 17 (more are a prefill)"),
    (
        {"q": torch.ones(2, 4, 3, 16).half()},
        "q, k and v must share a floating dtype, got torch.float16",
    ),
    (
        {"k": torch.ones(2, 2, 0, 16), "v": torch.ones(2, 2, 0, 8)},
        "the cache is empty: k (2, 2, 0, 16)",
    ),
    ({"v": torch.ones(2, 2, 40, 0)}, "head dims must be positive, got 16 and 0"),
    (
        {"k": torch.ones(2, 2, 40, 16, device="meta")},
        "all tensors of a call must share a device, got cpu, meta",
    ),
    (
        {"tokens": ONES[:, None].long()},
        "tokens must be int32 (2, C) or (2, 2, C) with C > 0, got torch.int64 (2, 1)",
    ),
    (
        {"tokens": torch.ones(2, 4, 5, dtype=torch.int32)},
        "tokens must be int32 (2, C) or (2, 2, C) with C > 0",
    ),
    (
        {"tokens": torch.ones(2, 0, dtype=torch.int32)},
        "tokens must be int32 (2, C) or (2, 2, C) with C > 0",
    ),
    (
        {"starts": torch.zeros(3, dtype=torch.int32)},
        "starts must be int32 (2,), got torch.int32 (3,)",
    ),
    ({"ends": torch.zeros(2)}, "ends must be int32 (2,), got torch.float32 (2,)"),
    ({"window": 0}, "window must be at least 1, got 0"),
    ({"scale": 0.0}, "scale must be a positive finite number, got 0.0"),
    ({"softcap": float("inf")}, "softcap must be a positive finite number, got inf"),
    ({"scores": "mean"}, "scores must be 'none', 'sum' or 'max', got 'mean'"),
    ({"backend": "cuda"}, "unknown backend 'cuda'; known: auto, triton, cpu, reference"),
    (
        {"backend": "triton"},
        "backend 'triton' cannot serve this call: it serves tensors on a GPU, not on cpu",
    ),
    ({"block_table": ONES, **PAGES}, "the block table must be int32 (2, n), got torch.int32 (2,)"),
    (
        {"block_table": ONES[:, None].long(), **PAGES},
        "the block table must be int32 (2, n), got torch.int64 (2, 1)",
    ),
    (
        {"block_table": ONES[:, None], **PAGES, "k": torch.ones(2, 8, 2, 32)[..., ::2]},
        "the last dimension of a paged cache must be contiguous",
    ),
    # Only the processor looks at values: a GPU would make the host wait.
    ({"starts": ONES * -1}, "starts must not be negative, got -1 for sequence 0"),
    ({"ends": ONES * 41}, "ends must be at most the key length 40, got 41 for sequence 0"),
    (
        {"tokens": torch.tensor([[30, 7]] * 2, dtype=torch.int32)},
        "tokens must ascend below 40, got 7 after 30",
    ),
    ({"block_table": ONES[:, None] * 2, **PAGES}, "page 2 is none of the 2 pages"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        decode_attention(**inputs(**change))
    assert str(error.value).startswith(message), str(error.value)
    assert MAX_QUERIES == 16


def test_engines_that_do_not_serve_are_named() -> None:
    with pytest.raises(ValueError, match="engine 'dot' does not serve Float on this processor"):
        serve(cpu, Case(), engine="dot")(**inputs(), **_NOTHING)


_NOTHING = dict.fromkeys(("tokens", "starts", "ends", "window", "scale", "softcap")) | {
    "scores": "none"
}


@pytest.fixture
def fresh_notes() -> Iterator[None]:
    dispatch.say_once.cache_clear()
    yield
    dispatch.say_once.cache_clear()


def test_auto_falls_back_and_says_so_once(
    fresh_notes: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = decode_attention(**inputs(), backend="reference")
    monkeypatch.setattr(
        "kernels.native.build.load", lambda: "no C++ compiler found (install g++, or set CXX)"
    )
    with caplog.at_level(logging.WARNING, "headwise"):
        for _ in range(3):
            assert torch.equal(decode_attention(**inputs()).out, expected.out)
    assert [r.message for r in caplog.records] == [
        "backend 'cpu' not used: no C++ compiler found (install g++, or set CXX)"
    ]
    assert dispatch.why_not(*inputs().values(), op="decode") == {
        "triton": "it serves tensors on a GPU, not on cpu",
        "cpu": "no C++ compiler found (install g++, or set CXX)",
        "reference": None,
    }


def test_gradients_come_from_the_reference(fresh_notes: None) -> None:
    change = inputs()
    change["q"].requires_grad_()
    decode_attention(**change).out.sum().backward()
    assert change["q"].grad is not None


@pytest.mark.parametrize(
    ("dtype", "dim", "reason"),
    [
        (torch.float64, 64, "it serves float32, float16 and bfloat16, not torch.float64"),
        (torch.float16, 513, "it serves head dims up to 512, not 513"),
    ],
)
def test_reasons_of_triton_to_decline(
    dtype: torch.dtype, dim: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.decode.triton.unavailable", lambda device: None)
    x = torch.ones(1, 1, 4, dim, dtype=dtype)
    assert triton.supports(x, x[..., :64], x) == reason


def test_padding_is_the_index_s() -> None:
    """A list of padding alone (a sequence for which nothing was chosen) sees nothing."""
    found = decode_attention(
        **inputs(), tokens=torch.full((2, 3), PAD, dtype=torch.int32), scores="max"
    )
    assert (found.out == 0).all() and found.scores is not None and (found.scores == 0).all()
