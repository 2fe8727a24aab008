"""Inputs at the edge: huge logits, values that are not finite, tangents, indices by hand.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from kernels.attention import sparse_attention, triton
from kernels.decode import decode_attention
from kernels.dense import dense_attention
from kernels.index import lists, no_lists
from kernels.patterns import LayerPlan, make
from kernels.ragged import Ragged

ROOT = Path(__file__).parents[2]
NAN, INF = float("nan"), float("inf")


def inputs(
    q_len: int = 200, k_len: int = 200, batch: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q = torch.randn(batch, 4, q_len, 32).to(dtype)
    k, v = (torch.randn(batch, 2, k_len, 32).to(dtype) for _ in range(2))
    return q, k, v


# The query heads of each KV head.
HALVES = slice(2), slice(2, 4)
# Dtypes of queries, and of keys and values.
STORED = [
    *((dtype, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
    (torch.float32, torch.float8_e5m2),
    (torch.bfloat16, torch.float8_e5m2),
]
LAYER = [
    make("vertical_slash", vertical=70, slash=64),
    make("dense"),
    make("block_sparse", blocks=2),
]
PLAN = LayerPlan([*LAYER, make("a_shape", sink=64, window=70)], 2)


@pytest.mark.parametrize("factor", [1e5, 3e9, 1e18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_any_size_give_what_the_reference_gives(
    factor: float, dtype: torch.dtype
) -> None:
    q, k, v = inputs(dtype=dtype)
    q = q * factor
    index = PLAN.build(q, k)
    for op in (
        lambda backend: sparse_attention(q, k, v, index, return_lse=True, backend=backend),
        lambda backend: decode_attention(q[:, :, -5:], k, v, backend=backend)[:2],
        lambda backend: decode_attention(q, k, v, scores="sum", backend=backend)[:2],
    ):
        (out, lse), (expected, expected_lse) = op("cpu"), op("reference")
        assert out.isfinite().all() and lse.isfinite().all() and out.abs().max() > 1
        torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)
        # The largest key takes all; where two are as near as rounding, either may.
        same = (out - expected).abs().amax(-1) < 0.05
        assert same.float().mean() > 0.99


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize(("dtype", "stored"), STORED)
@pytest.mark.parametrize("window", [None, 70])
def test_a_bad_value_reaches_only_those_who_see_it(
    bad: float, dtype: torch.dtype, stored: torch.dtype, window: int | None
) -> None:
    q, k, v = inputs(q_len=150, k_len=330, dtype=dtype)
    index = PLAN.build(q, k, window=window)
    k, v = k.to(stored), v.to(stored)
    clean = sparse_attention(q, k, v, index, backend="cpu")
    for key in (3, 100, 200, 250, 329):
        dirty = v.clone()
        dirty[0, 1, key, 5] = bad
        seen = index.to_mask()[..., key]
        seen[:, :2] = False
        for backend in ("cpu", "reference"):
            out = sparse_attention(q, k, dirty, index, backend=backend)
            assert not out[..., 5][seen].isfinite().any()
            torch.testing.assert_close(out[~seen], clean[~seen], rtol=2e-2, atol=2e-2)
            if backend == "cpu":
                assert torch.equal(out[~seen], clean[~seen])
            if bad != NAN:
                assert ((out[..., 5][seen] == bad) | out[..., 5][seen].isnan()).all()


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize(("dtype", "stored"), STORED)
@pytest.mark.parametrize("window", [None, 40])
def test_a_bad_value_in_decode(
    bad: float, dtype: torch.dtype, stored: torch.dtype, window: int | None
) -> None:
    q, k, v = inputs(q_len=6, k_len=700, dtype=dtype)
    k, v = k.to(stored), v.to(stored)
    clean = decode_attention(q, k, v, window=window, backend="cpu").out
    for key in (699, 697, 694, 658, 655):
        dirty = v.clone()
        dirty[0, 0, key] = bad
        distance = torch.arange(694, 700) - key
        seen = torch.zeros(1, 4, 6, dtype=torch.bool)
        seen[:, :2] = (distance >= 0) & (distance < (window or 1000))
        for backend in ("cpu", "reference"):
            out = decode_attention(q, k, dirty, window=window, backend=backend).out
            assert not out[seen].isfinite().any()
            torch.testing.assert_close(out[~seen], clean[~seen], rtol=2e-2, atol=2e-2)


def test_a_bad_value_where_scores_are_summed() -> None:
    q, k, v = inputs(q_len=300, k_len=300)
    clean = decode_attention(q, k, v, scores="sum")
    v[0, 1, 150, 3] = NAN
    found = decode_attention(q, k, v, scores="sum")
    assert found.out[0, 2:, 150:, 3].isnan().all()
    found.out[0, 2:, 150:, 3] = clean.out[0, 2:, 150:, 3]
    torch.testing.assert_close(found.out, clean.out)
    assert torch.equal(found.lse, clean.lse) and torch.equal(found.scores, clean.scores)  # type: ignore[arg-type]


@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_tangents_are_carried_not_lost(op: str) -> None:
    q, k, v = inputs(q_len=5, k_len=70)
    index = PLAN.build(q, k)

    def attend(values: Tensor) -> Tensor:
        return (
            sparse_attention(q, k, values, index)
            if op == "prefill"
            else decode_attention(q, k, values).out
        )

    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(attend(forward_ad.make_dual(v, torch.ones_like(v))))
        # Weights add up to 1.
        torch.testing.assert_close(out.tangent, torch.ones_like(out.primal))
    _, tangent = torch.func.jvp(attend, (v,), (torch.ones_like(v),))
    torch.testing.assert_close(tangent, torch.ones_like(tangent))
    with (
        forward_ad.dual_level(),
        pytest.raises(ValueError, match="it has no forward-mode derivative"),
    ):
        sparse_attention(q, k, forward_ad.make_dual(v, torch.ones_like(v)), index, backend="cpu")


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 3.5}, "window must be an integer, got 3.5"),
        ({"window": True}, "window must be an integer, got True"),
        (
            {"dense_tail": (1.5, 2, 0, 0)},
            r"dense_tail must be \(\) or 4 counts, got \(1.5, 2, 0, 0\)",
        ),
        ({"columns": int32(9, 3).expand(1, 4, 2)}, "columns must be strictly ascending"),
        ({"columns": int32(3, 3).expand(1, 4, 2)}, "columns must be strictly ascending"),
        ({"columns": int32(-3, 3).expand(1, 4, 2)}, "columns must not be negative, got -3"),
        ({"diagonals": int32(1, 2).expand(1, 4, 2)}, "every head must compute diagonal 0"),
        (lists(int32(2, 1).expand(1, 4, 4, 2)), "tiles must be strictly ascending"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_an_index_made_by_hand_is_refused_by_every_backend_alike(
    change: dict[str, Any], message: str, backend: str
) -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match=message):
        sparse_attention(q, k, v, replace(PLAN.build(q, k), **change), backend=backend)


def test_an_index_is_looked_at_once_and_a_built_one_never(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    built = PLAN.build(q, k, ragged=Ragged.left_padded([150], 200, 200))
    asked: list[str] = []
    monkeypatch.setattr(
        "kernels.index.SparseIndex.check_shapes",
        lambda self: asked.append("shapes" if self._valid else "entries"),
    )
    sparse_attention(q, k, v, built)
    assert "entries" not in asked
    hand = replace(PLAN.build(q, k), window=90)
    assert not hand._valid
    sparse_attention(q, k, v, hand)
    assert hand._valid


@pytest.mark.parametrize("op", [sparse_attention, decode_attention, dense_attention])
def test_inputs_that_are_no_dense_tensors(op: Callable[..., Any]) -> None:
    q, k, v = inputs(q_len=4, k_len=70)
    rest = {"index": PLAN.build(q, k)} if op is sparse_attention else {}
    with pytest.raises(ValueError, match="k must be a tensor, got NoneType"):
        op(q, None, v, **rest)
    with pytest.raises(ValueError, match=r"v must be a dense tensor, got layout torch.sparse_coo"):
        op(q, k, v.to_sparse(), **rest)
    for sinks in (torch.zeros(3), torch.zeros(4, dtype=torch.int32), torch.zeros(4, 1)):
        with pytest.raises(ValueError, match=r"sinks must be floating \(4,\), got"):
            op(q, k, v, sinks=sinks, **rest)
    if rest:
        with pytest.raises(ValueError, match="index must be a SparseIndex, got NoneType"):
            op(q, k, v, None)
    else:
        with pytest.raises(ValueError, match=r"window must be an integer, got 3\.5"):
            op(q, k, v, window=3.5)


def test_out_must_have_a_place_for_each_element() -> None:
    q, k, v = inputs()
    index = PLAN.build(q, k)
    for out in (
        torch.zeros(1, 1, 200, 32).expand(q.shape),
        torch.zeros(10_000).as_strided(q.shape, (0, 32, 8, 1)),
    ):
        with pytest.raises(
            ValueError, match="out must have a place of its own for each element, got strides"
        ):
            sparse_attention(q, k, v, index, out=out)
    cut = torch.zeros(1, 200, 6, 40).transpose(1, 2)[:, 1:5, :, 4:36]
    assert sparse_attention(q, k, v, index, out=cut) is cut


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {
                "rows": (0, 0),
                "q_starts": (0, 5),
                "q_lens": (6, 3),
                "k_starts": (0, 6),
                "k_lens": (6, 3),
            },
            "sequences 0 and 1 overlap: row 5 of batch element 0 is a query of both",
        ),
        (
            {
                "rows": (1, 0, 1),
                "q_starts": (4, 0, 0),
                "q_lens": (2, 9, 5),
                "k_starts": (0,) * 3,
                "k_lens": (9,) * 3,
            },
            "sequences 2 and 0 overlap: row 4 of batch element 1 is a query of both",
        ),
        (
            {"rows": (0,), "q_starts": (0.5,), "q_lens": (6,), "k_starts": (0,), "k_lens": (6,)},
            "rows, starts and lengths must be integers, got 0.5",
        ),
    ],
)
def test_sequences_do_not_overlap(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ragged(**fields)


def interpreted() -> dict[str, bool]:
    """The same in Triton: huge logits and bad values."""
    found = {}
    # Keys that every query tile sees, and that only the last does.
    both = ((3, 139), (100,))
    cases: dict[int | None, dict[str, tuple[tuple[int, ...], ...]]] = {
        None: {"lists": both, "no lists": both[1:]},
        70: {"lists": both[:1], "parts": both},
    }
    for window, variants in cases.items():
        q, k, v = inputs(q_len=70, k_len=140)
        index = PLAN.build(q, k, window=window)
        without = replace(index, **no_lists(1, 4, index.num_rows, device=q.device))
        for name, bad_keys in variants.items():
            each = without if name == "no lists" else index
            splits = 3 if name == "parts" else 1
            how: dict[str, Any] = {"scale": 32**-0.5, "softcap": None, "splits": splits}
            clean, _ = triton.sparse_attention(q, k, v, each, **how)
            for keys in bad_keys:
                # One KV head has NaN, the other infinity, each key in a column of its own: what is
                # added up apart.
                dirty, mask, seen = (
                    v.clone(),
                    each.to_mask(),
                    torch.zeros_like(clean, dtype=torch.bool),
                )
                for at, key in enumerate(keys):
                    dirty[0, 0, key, 5 + at], dirty[0, 1, key, 20 + at] = NAN, INF
                    seen[:, :2, :, 5 + at], seen[:, 2:, :, 20 + at] = (
                        mask[:, heads, :, key] for heads in HALVES
                    )
                out, _ = triton.sparse_attention(q, k, dirty, each, **how)
                where = f"{name}, window {window}, keys {keys}"
                found[f"{where}: seen"] = not bool(out[seen].isfinite().any())
                found[f"{where}: unseen"] = bool(((out - clean)[~seen].abs() < 1e-5).all())
    q, k, v = inputs(q_len=6, k_len=140)
    clean = decode_attention(q, k, v, backend="triton").out
    v[0, 0, 137] = NAN
    out = decode_attention(q, k, v, backend="triton").out
    found["decode: seen"] = bool(out[0, :2, 3:].isnan().all())
    found["decode: unseen"] = bool(
        ((out - clean)[0, :2, :3].abs() < 1e-5).all() and out[0, 2:].isfinite().all()
    )
    q, k, v = inputs(q_len=100, k_len=100)
    for op in ("prefill", "decode"):
        big = (q if op == "prefill" else q[:, :, -3:]) * 3e9
        how = {"index": PLAN.build(big, k)} if op == "prefill" else {}
        attend = sparse_attention if op == "prefill" else decode_attention
        one, other = (attend(big, k, v, **how, backend=name) for name in ("triton", "reference"))
        pair = (one, other) if op == "prefill" else (one.out, other.out)
        found[f"{op}: huge logits"] = bool(
            ((pair[0] - pair[1]).abs().amax(-1) < 1e-3).float().mean() > 0.99
        )
    return found


@pytest.mark.slow
def test_the_same_in_triton() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, bool] = json.loads(done.stdout)
    assert [name for name, right in found.items() if not right] == []


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(interpreted()))
