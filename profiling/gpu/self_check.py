"""Every sort of Triton kernel once, on random inputs, against the fp32 reference: seconds that say whether all is well.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kernels import triton_calls
from kernels.attention import sparse_attention, triton
from kernels.decode import decode_attention
from kernels.patterns import LayerPlan, make
from kernels.patterns.choose import best_places
from kernels.patterns.last_queries import estimate
from kernels.ragged import Ragged
from kernels.scored import scored_attention
from profiling.gpu.steps import Rows, Setting
from runtime.attention import dense_heads
from runtime.attention.kernel import attend_layer
from runtime.attention.state import Layer, Settings

# Largest error of standard normal inputs: one rounding of the output, and of the probabilities in 16 bits.
_ERROR = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
_MASS_ERROR = 1e-4
_HEADS, _KV_HEADS = 4, 2
_Kinds = tuple[tuple[str, dict[str, int]], ...]
_PAIRED: _Kinds = (("vertical_slash", {"vertical": 100, "slash": 150}), ("a_shape", {"sink": 70, "window": 100}))
_LISTS: _Kinds = (*_PAIRED, ("block_sparse", {"blocks": 2}), ("dense", {}))


def pieces(step: str, setting: Setting) -> list[str]:
    """See profiling.gpu.steps. A rehearsal has a few: the kernels' cases are the conformance suite's."""
    return list(_REHEARSED) if setting.small else list(_CHECKS)


def run(piece: str, setting: Setting) -> dict[str, Any]:
    """The largest error, what rounding explains, and the names of the kernels that ran.

    Raises:
        RuntimeError: the error is larger.
    """
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    with _launched() as ran:
        error, allowed = _CHECKS[piece](setting)
    if not error <= allowed:
        raise RuntimeError(f"wrong: largest error {error:.3g}, rounding explains {allowed:.3g}")
    return {"error": error, "allowed": allowed, "kernels": sorted(ran)}


def lines(rows: Rows) -> list[Sequence[str]]:
    """See profiling.gpu.steps."""
    never = kernel_names().difference(*(row["kernels"] for row in rows.values()))
    return [
        ("kernel", "largest error", "allowed"),
        *((name, f"{row['error']:.2g}", f"{row['allowed']:.2g}") for name, row in rows.items()),
        (f"never ran: {', '.join(sorted(never))}" if never else f"all {len(kernel_names())} kernels ran", "", ""),
    ]


def kernel_names() -> set[str]:
    """All Triton kernels of ours. Imports triton."""
    found = set()
    folder = Path(triton_calls.__file__).parent
    for file in folder.rglob("triton*_kernel*.py"):
        module = importlib.import_module(f"kernels.{file.parent.name}.{file.stem}")
        found |= {name for name in vars(module) if name.endswith("_kernel")}
    return found


@contextmanager
def _launched() -> Iterator[set[str]]:
    """The names of the kernels that are launched meanwhile."""
    names: set[str] = set()
    launch = triton_calls._run

    def noted(call: triton_calls.KernelCall) -> None:
        names.add(call.kernel)
        launch(call)

    with mock.patch.object(triton_calls, "_run", noted):
        yield names


def _random(setting: Setting, *shape: int) -> Tensor:
    return torch.randn(shape, device=setting.device).to(getattr(torch, setting.dtype))


def _inputs(setting: Setting, q_len: int, k_len: int) -> tuple[Tensor, Tensor, Tensor]:
    dim = 64 if setting.small else 128
    shapes = ((_HEADS, q_len), (_KV_HEADS, k_len), (_KV_HEADS, k_len))
    q, k, v = (_random(setting, 1, heads, length, dim) for heads, length in shapes)
    return q, k, v


def _length(setting: Setting) -> int:
    return 130 if setting.small else 3000


def _attention(
    setting: Setting, patterns: Sequence[tuple[str, dict[str, int]]], *, tail: int = 0, page: int = 0, **how: Any
) -> tuple[float, float]:
    n = _length(setting)
    q, k, v = _inputs(setting, n if not tail else n - 60, n)
    chosen = [make(kind, **sizes) for kind, sizes in (*patterns, *patterns)][:_HEADS]
    window, ragged = how.pop("window", None), how.pop("ragged", None)
    plan = LayerPlan(chosen, _KV_HEADS, dense_tail=tail)
    index = plan.build(q, k, window=window, ragged=ragged)
    expected = sparse_attention(q.float(), k.float(), v.float(), index, backend="reference", **how)
    if page:
        k, v, how["block_table"] = _paged(k, v, page)
    found = sparse_attention(q, k, v, index, backend="triton", **how)
    return float((found.float() - expected).abs().max()), _ERROR[setting.dtype]


def _paged(k: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values (1, G, K, D) in shuffled pages of a cache, NaN where no key lies; and their table."""
    count = -(-k.shape[2] // size)
    order = torch.randperm(count + 2)[:count].to(k.device)
    caches = []
    for x in (k, v):
        rows = x.new_full((count * size, *x.shape[1::2]), float("nan"))
        rows[: x.shape[2]] = x[0].transpose(0, 1)
        cache = x.new_full((count + 2, size, *x.shape[1::2]), float("nan"))
        cache[order] = rows.unflatten(0, (count, size))
        caches.append(cache)
    return caches[0], caches[1], order.to(torch.int32)[None]


def _ragged(setting: Setting) -> tuple[float, float]:
    n = _length(setting)
    cuts = [0, 63, n // 2, n]
    return _attention(setting, _LISTS, ragged=Ragged.packed(cuts, cuts))


def _estimate(setting: Setting) -> tuple[float, float]:
    q, k, _ = _inputs(setting, _length(setting), _length(setting))
    how = (range(_HEADS), [64] * _HEADS)
    found = estimate(q, k, *how, scale=q.shape[-1] ** -0.5)
    # float32 is torch's.
    expected = estimate(q.float(), k.float(), *how, scale=q.shape[-1] ** -0.5)
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)), _MASS_ERROR


def _choice(setting: Setting) -> tuple[float, float]:
    # Many that are equal: the smaller place is the better.
    scores = (torch.randn(1, _HEADS, 500, device=setting.device) * 4).round() / 4 + 0
    found = best_places(scores, [100, 3, 400, 64], coverage=[None] * _HEADS, forced=1)
    with mock.patch("kernels.patterns.triton.chooses", return_value=False):
        expected = best_places(scores, [100, 3, 400, 64], coverage=[None] * _HEADS, forced=1)
    return float((found != expected).sum()), 0.0


def _decode(setting: Setting, *, chosen: bool, q_len: int = 1) -> tuple[float, float]:
    n = _length(setting)
    q, k, v = _inputs(setting, q_len, n)
    tokens = None
    if chosen:
        order = torch.rand(1, _KV_HEADS, n, device=q.device).argsort(-1)[..., : n // 3]
        tokens = order.sort(-1).values.to(torch.int32)
    found = decode_attention(q, k, v, tokens=tokens, scores="sum", backend="triton")
    expected = decode_attention(
        q.float(), k.float(), v.float(), tokens=tokens, scores="sum", backend="reference"
    )  # fmt: skip
    assert found.scores is not None and expected.scores is not None
    # In one figure: the scores' error in units of what is allowed for the output's.
    allowed = _ERROR[setting.dtype]
    mass = float((found.scores - expected.scores).abs().max()) * allowed / (_MASS_ERROR * 10 * q_len)
    return max(float((found.out.float() - expected.out).abs().max()), mass), allowed


def _bad_values(setting: Setting) -> tuple[float, float]:
    """NaN in a value that some queries see: those are NaN, the others as without it."""
    n = _length(setting)
    q, k, v = _inputs(setting, n, n)
    plan = LayerPlan([make("a_shape", sink=64, window=128)] * _HEADS, _KV_HEADS)
    index = plan.build(q, k)
    v[:, :, n // 2] = float("nan")
    found = sparse_attention(q, k, v, index, backend="triton").float()
    expected = sparse_attention(q.float(), k.float(), v.float(), index, backend="reference")
    wrong = (found.isnan() != expected.isnan()).any()
    error = (found - expected).abs().nan_to_num(nan=0.0).max()
    return float("inf") if bool(wrong) else float(error), _ERROR[setting.dtype]


def _strided(setting: Setting) -> tuple[float, float]:
    """Layouts that models hand over: heads beside each other, rows of a larger tensor, an output given."""
    n = _length(setting)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in _inputs(setting, n, n))
    index = LayerPlan([make("vertical_slash", vertical=70, slash=70)] * _HEADS, _KV_HEADS).build(q, k)
    index = replace(index, dense_tail=(70,) * _HEADS)
    out = torch.full_like(q, float("nan"))
    found = sparse_attention(q, k, v, index, backend="triton", out=out)
    expected = sparse_attention(q.float(), k.float(), v.float(), index, backend="reference")
    return float((found.float() - expected).abs().max()), _ERROR[setting.dtype]


def _parts(setting: Setting) -> tuple[float, float]:
    """A few queries on many keys, which several programs share."""
    q, k, v = _inputs(setting, 70, _length(setting))
    index = LayerPlan([make(kind, **sizes) for kind, sizes in _LISTS], _KV_HEADS).build(q, k)
    scale = q.shape[-1] ** -0.5
    found, _ = triton.sparse_attention(q, k, v, index, scale=scale, softcap=None, splits=3)
    expected = sparse_attention(q.float(), k.float(), v.float(), index, backend="reference")
    return float((found.float() - expected).abs().max()), _ERROR[setting.dtype]


def _layer(setting: Setting) -> tuple[float, float]:
    """A layer's index in a few launches, and in torch: the share of the keys that one of both has alone."""
    n = _length(setting)
    q, k, _ = _inputs(setting, n - 60, n)
    plan = LayerPlan([make(kind, **sizes) for kind, sizes in _LISTS], _KV_HEADS)
    found = plan.build(q, k).to_mask()
    with mock.patch("kernels.patterns.on_gpu.build", return_value=None):
        expected = plan.build(q, k).to_mask()
    # Scores that are as near as rounding may be chosen in either order.
    return float((found != expected).float().mean()), 0.002


def _scores(setting: Setting) -> tuple[float, float]:
    """A prompt's scores, as a share of the queries that add to them, and its output."""
    n = _length(setting)
    q, k, v = _inputs(setting, n - 60, n)
    found = scored_attention(q, k, v, backend="triton")
    expected = scored_attention(q.float(), k.float(), v.float(), backend="reference")
    assert found.scores is not None and expected.scores is not None
    wrong = float((found.out.float() - expected.out).abs().max()) / _ERROR[setting.dtype]
    mass = float((found.scores - expected.scores).abs().max()) / (q.shape[2] * _HEADS / _KV_HEADS)
    return max(wrong, mass / _MASS_ERROR), 1.0


def _index_in_pages(setting: Setting) -> tuple[float, float]:
    """A layer's index from pages, large and small, and from a tensor: how many entries differ."""
    n, wrong = _length(setting), 0
    q, k, v = _inputs(setting, n - 60, n)
    # Means have a launch of their own where nothing else reads the keys.
    for patterns in ([make(kind, **sizes) for kind, sizes in _LISTS], [make("block_sparse", blocks=2)] * _HEADS):
        plan = LayerPlan(patterns, _KV_HEADS)
        expected = plan.build(q, k)
        for size in (16, 64, 100):
            cache, _, table = _paged(k, v, size)
            found = plan.build(q, cache, block_table=table, k_len=n)
            for name in ("diagonals", "tiles", "columns"):
                wrong += int((getattr(found, name) != getattr(expected, name)).sum())
    return float(wrong), 0.0


def _two_ways(setting: Setting) -> tuple[float, float]:
    """A layer whose dense heads torch serves, of a whole prompt and of a chunk."""
    n, error = _length(setting), 0.0
    plan = LayerPlan([make(kind, **sizes) for kind, sizes in _LISTS], _KV_HEADS)
    layer = Layer(Settings(dense_below=0, dense="sdpa", strict=True, backend="auto"), 0, plan)
    for q_len in (n, n - 60):
        q, k, v = _inputs(setting, q_len, n)
        with mock.patch.multiple(dense_heads, faster=lambda *_: "sdpa", LEAST=0):
            found = attend_layer(layer, plan, q, k, v, scale=None, softcap=None)
        index = plan.build(q, k)
        expected = sparse_attention(q.float(), k.float(), v.float(), index, backend="reference")
        error = max(error, float((found.float() - expected).abs().max()))
    return error, _ERROR[setting.dtype]


_CHECKS: dict[str, Callable[[Setting], tuple[float, float]]] = {
    "attention, two tiles a program": lambda s: _attention(s, _PAIRED),
    "attention, lists of tiles": lambda s: _attention(s, _LISTS),
    "attention, in parts": _parts,
    "estimate": _estimate,
    "choice": _choice,
    "a layer's index": _layer,
    "a layer's index, pages": _index_in_pages,
    "decode, all keys": lambda s: _decode(s, chosen=False),
    "decode, chosen keys": lambda s: _decode(s, chosen=True),
    "scores of a prompt": _scores,
    "attention, strided": _strided,
    "attention, window, dense tail, soft-cap": lambda s: _attention(s, _LISTS, tail=70, window=130, softcap=20.0),
    "attention, packed sequences": _ragged,
    "attention, pages of 64": lambda s: _attention(s, _PAIRED, page=64),
    "attention, pages of 16, lists": lambda s: _attention(s, _LISTS, page=16),
    "attention, dense heads by torch": _two_ways,
    "attention, NaN among values": _bad_values,
    "decode, 5 queries": lambda s: _decode(s, chosen=False, q_len=5),
}
# Which launch every kernel between them.
_REHEARSED = (
    "choice", "decode, chosen keys", "attention, pages of 16, lists", "scores of a prompt", "a layer's index, pages",
)  # fmt: skip
