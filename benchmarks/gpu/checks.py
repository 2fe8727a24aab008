"""Every sort of Triton kernel once, on random inputs, against the fp32 reference.

Shapes: H query heads, G KV heads, Q query length, K key length, D head dim; the batch is 1.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kernels import triton_calls
from kernels.attention import AttentionCall, attend, sparse_attention
from kernels.decode import decode_attention
from kernels.gradient import attention_gradients
from kernels.logits import Logits
from kernels.patterns import LayerPlan, make
from kernels.patterns.dense import dense_index
from kernels.ragged import Ragged
from kernels.topk import TopKCall

# Largest error on standard normal inputs: one rounding of the output, and of the probabilities in
# 16 bits.
ERROR = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
SCORE_ERROR = 1e-4
# Fraction of keys in which two indices may differ: rounding swaps nearly equal scores.
INDEX_ERROR = 2e-3
HEADS = 4
KV_HEADS = 2
PAIRED = [make("vertical_slash", vertical=100, slash=150), make("a_shape", sink=70, window=100)] * 2
LISTS = [*PAIRED[:2], make("block_sparse", blocks=2), make("dense")]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Device, dtype and sizes of the tensors that the checks make."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    length: int = 3000
    head_dim: int = 128

    def tensors(self, q_len: int) -> tuple[Tensor, Tensor, Tensor]:
        """q (1, H, Q, D), k and v (1, G, K, D)."""
        return (
            self._normal(HEADS, q_len),
            self._normal(KV_HEADS, self.length),
            self._normal(KV_HEADS, self.length),
        )

    def _normal(self, heads: int, length: int) -> Tensor:
        return torch.randn(
            1, heads, length, self.head_dim, device=self.device, dtype=torch.float32
        ).to(self.dtype)


Check = Callable[[Inputs], tuple[float, float]]


def attention(
    patterns: Sequence[Any], *, missing: int = 0, page: int = 0, cuts: bool = False, **kwargs: Any
) -> Check:
    """The check of one sort of call.

    Args:
        missing: tokens of the past, which have no queries.
        page: tokens of a page that keys and values lie in.
        cuts: three sequences end to end.
    """

    def check(inputs: Inputs) -> tuple[float, float]:
        n = inputs.length
        q, k, v = inputs.tensors(n - missing)
        options = dict(kwargs)
        bounds = [0, 63, n // 2, n]
        if cuts:
            ragged = Ragged.packed(bounds, bounds)
        else:
            ragged = None
        plan = LayerPlan(patterns, KV_HEADS, dense_tail=options.pop("dense_tail", 0))
        window = options.pop("window", None)
        index = plan.build(q, k, window=window, ragged=ragged)
        options["logits"] = Logits(softcap=options.pop("softcap", None), window=window)
        expected = sparse_attention(
            q.float(), k.float(), v.float(), index, backend="reference", **options
        )
        if page:
            k, v, options["block_table"] = paged(k, v, page)
        actual = sparse_attention(q, k, v, index, backend="triton", **options)
        return float((actual.float() - expected).abs().max()), ERROR[inputs.dtype]

    return check


def paged(k: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values (1, G, K, D) in shuffled pages, NaN where no key lies; and their table."""
    count = -(-k.shape[2] // size)
    order = torch.randperm(count + 2, device="cpu")[:count].to(k.device)
    caches = []
    for x in (k, v):
        rows = x.new_full((count * size, *x.shape[1::2]), float("nan"))
        rows[: x.shape[2]] = x[0].transpose(0, 1)
        cache = x.new_full((count + 2, size, *x.shape[1::2]), float("nan"))
        cache[order] = rows.unflatten(0, (count, size))
        caches.append(cache)
    return caches[0], caches[1], order.to(torch.int32)[None]


def index_of_a_layer(inputs: Inputs) -> tuple[float, float]:
    """Fraction of the keys in which the index of the device and that of the CPU in fp32 differ."""
    q, k, _ = inputs.tensors(inputs.length - 60)
    plan = LayerPlan(LISTS, KV_HEADS)
    actual = plan.build(q, k).to_mask().cpu()
    expected = plan.build(q.cpu().float(), k.cpu().float()).to_mask()
    return float((actual != expected).float().mean()), INDEX_ERROR


def index_in_pages(inputs: Inputs) -> tuple[float, float]:
    """Entries that differ where keys lie in pages, large and small."""
    q, k, v = inputs.tensors(inputs.length - 60)
    wrong = 0
    for patterns in (LISTS, [make("block_sparse", blocks=2)] * HEADS):
        plan = LayerPlan(patterns, KV_HEADS)
        expected = plan.build(q, k)
        for size in (16, 64, 100):
            cache, _, table = paged(k, v, size)
            actual = plan.build(q, cache, block_table=table, k_len=inputs.length)
            for name in ("diagonals", "tiles", "columns"):
                wrong += int((getattr(actual, name) != getattr(expected, name)).sum())
    return float(wrong), 0.0


def places_of_rows(inputs: Inputs) -> tuple[float, float]:
    """Places of the best entries of each row that differ; no two scores are equal."""
    n = inputs.length
    order = torch.rand(3, n, device=inputs.device, dtype=torch.float32).argsort(-1)
    actual, expected = (
        TopKCall(order.float(), n // 3).run(backend) for backend in ("triton", "reference")
    )
    return float((actual != expected).sum()), 0.0


def decode(*, select: bool, queries: int = 1) -> Check:
    """The check of decode over all or selected keys, with scores."""

    def check(inputs: Inputs) -> tuple[float, float]:
        q, k, v = inputs.tensors(queries)
        tokens = None
        if select:
            order = torch.rand(
                1, KV_HEADS, inputs.length, device=q.device, dtype=torch.float32
            ).argsort(-1)
            tokens = order[..., : inputs.length // 3].sort(-1).values.to(torch.int32)
        actual = decode_attention(q, k, v, tokens=tokens, scores="sum", backend="triton")
        expected = decode_attention(
            q.float(), k.float(), v.float(), tokens=tokens, scores="sum", backend="reference"
        )
        wrong = float((actual.out.float() - expected.out).abs().max()) / ERROR[inputs.dtype]
        score = float((actual.scores - expected.scores).abs().max()) / (10 * queries * SCORE_ERROR)
        return max(wrong, score), 1.0

    return check


def scores_of_a_prompt(inputs: Inputs) -> tuple[float, float]:
    """Errors of output and of scores per query that adds to them, in units of the tolerance."""
    q, k, v = inputs.tensors(inputs.length - 60)
    actual = decode_attention(q, k, v, scores="sum", backend="triton")
    expected = decode_attention(q.float(), k.float(), v.float(), scores="sum", backend="reference")
    wrong = float((actual.out.float() - expected.out).abs().max()) / ERROR[inputs.dtype]
    queries = q.shape[2] * HEADS / KV_HEADS
    score = float((actual.scores - expected.scores).abs().max()) / (queries * SCORE_ERROR)
    return max(wrong, score), 1.0


def gradients(inputs: Inputs) -> tuple[float, float]:
    """Largest error of the gradients of dense attention, in units of the largest gradient."""
    q, k, v = inputs.tensors(inputs.length)
    index = dense_index(1, HEADS, inputs.length, inputs.length, q.device)
    out, lse = attend(AttentionCall(q, k, v, index))
    tensors = (q, k, v, out, lse, torch.randn_like(out))
    actual = attention_gradients(*tensors, backend="flash")
    expected = attention_gradients(*(x.float() for x in tensors), backend="reference")
    errors = [
        float((one.float() - right).abs().max() / right.abs().max())
        for one, right in zip(actual, expected, strict=True)
    ]
    return max(errors), ERROR[inputs.dtype]


CHECKS: dict[str, Check] = {
    "attention, no lists": attention(PAIRED),
    "attention, lists of tiles": attention(LISTS),
    "attention, few queries on a past": attention(LISTS, missing=2930),
    "attention, window, dense tail, soft-cap": attention(
        LISTS, dense_tail=70, window=130, softcap=20.0
    ),
    "attention, packed sequences": attention(LISTS, cuts=True),
    "attention, pages of 64": attention(PAIRED, page=64),
    "attention, pages of 16, lists": attention(LISTS, page=16),
    "index of a layer": index_of_a_layer,
    "index of a layer, pages": index_in_pages,
    "top-k of rows": places_of_rows,
    "decode, all keys": decode(select=False),
    "decode, selected keys": decode(select=True),
    "decode, 5 queries": decode(select=False, queries=5),
    "scores of a prompt": scores_of_a_prompt,
    "gradients": gradients,
}
# Between them they launch every kernel: a rehearsal runs no others.
REHEARSED = (
    "attention, pages of 16, lists",
    "index of a layer, pages",
    "top-k of rows",
    "decode, selected keys",
    "scores of a prompt",
)


def run(inputs: Inputs, names: Sequence[str], emit: Callable[[dict[str, Any]], None]) -> None:
    """Emit error and tolerance, or the failure, of each check.

    Raises:
        SystemExit: checks failed, or there are kernels that none of them launched.
    """
    torch.manual_seed(0)
    wrong = []
    with launched() as kernels:
        for name in names:
            row: dict[str, Any] = {"check": name}
            try:
                error, allowed = CHECKS[name](inputs)
            except Exception as failure:
                row["failed"] = f"{type(failure).__name__}: {failure}"[:600]
            else:
                row |= {"error": error, "allowed": allowed}
                if not error <= allowed:
                    row["failed"] = f"largest error {error:.3g}, allowed {allowed:.3g}"
            if "failed" in row:
                wrong.append(name)
            emit(row)
    never = sorted(kernel_names() - kernels)
    emit({"never launched": never})
    if wrong or never:
        raise SystemExit(f"failed: {', '.join(wrong) or None}; never launched: {never}")


def kernel_names() -> set[str]:
    """All Triton kernels of this package."""
    names: set[str] = set()
    folder = Path(triton_calls.__file__).parent
    for file in folder.rglob("triton*_kernel*.py"):
        module = importlib.import_module(f"kernels.{file.parent.name}.{file.stem}")
        names |= {name for name in vars(module) if name.endswith("_kernel")}
    return names


@contextmanager
def launched() -> Iterator[set[str]]:
    """The names of the kernels that are launched meanwhile."""
    names: set[str] = set()
    launch = triton_calls._run

    def noted(call: triton_calls.KernelCall) -> None:
        names.add(call.kernel)
        launch(call)

    with mock.patch.object(triton_calls, "_run", noted):
        yield names
