"""Cases of what builds an index, on every backend: estimates, means, choices, pages, tables.

Shapes: B batch, h heads of one kind, H query heads, G KV heads, Q query length, K key length, D
head dim."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.attention import triton as attention
from kernels.index import PAD, SparseIndex, no_lists, num_tiles
from kernels.patterns import Inputs, LayerPlan, Pattern, make, triton
from kernels.patterns.base import Part, SelectCall
from kernels.patterns.block_sparse import MeansCall
from kernels.patterns.last_queries import EstimateCall
from kernels.patterns.paged import Paged
from kernels.topk import TopKCall
from kernels.triton_calls import run_calls
from tests.conformance import tensors
from tests.conformance.tensors import difference
from tests.kernels.recording import BUILDERS, served_by

# Of masses of up to 1: the sums have another order.
ERROR = 1e-5


def largest(result: Tensor, expected: Tensor) -> float:
    return float(difference(result, expected).max())


def no_native_code() -> AbstractContextManager[None]:
    """Triton for half precision and torch for the rest."""
    return served_by("triton", "reference", ops=BUILDERS)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """`heads` are those asked for, each by its number in `last_q`."""

    q_len: int
    k_len: int
    heads: tuple[int, ...]
    last_q: tuple[int, ...]
    batch: int = 1
    num_heads: int = 4
    kv_heads: int = 1
    head_dim: int = 64
    window: int | None = None
    dtype: torch.dtype = torch.float16
    transposed: bool = False


ESTIMATES = {
    "estimate of a layer": Estimate(
        q_len=200, k_len=200, heads=(0, 1, 2, 3), last_q=(64,) * 4, kv_heads=2
    ),
    "estimate of some heads, batch 2, D 80": Estimate(
        q_len=70,
        k_len=301,
        heads=(0, 2, 3, 4, 5),
        last_q=(64, 64, 16, 64, 64),
        batch=2,
        num_heads=6,
        kv_heads=2,
        head_dim=80,
        transposed=True,
    ),
    "estimate of heads of unlike numbers": Estimate(
        q_len=300, k_len=300, heads=(1, 3, 0), last_q=(200, 130, 1), kv_heads=4
    ),
    "estimate of 256 queries, chunks of two tiles": Estimate(
        q_len=256, k_len=4200, heads=(0, 1), last_q=(256, 64), num_heads=2, head_dim=16
    ),
    "estimate of more queries than there are": Estimate(
        q_len=5, k_len=70, heads=(1,), last_q=(64,)
    ),
    "estimate of wide heads": Estimate(
        q_len=64, k_len=130, heads=(0, 3), last_q=(64, 64), head_dim=160
    ),
    **{
        f"estimate in a window of {window}": Estimate(
            q_len=200, k_len=400, heads=(0, 1, 3), last_q=(64, 130, 64), window=window, head_dim=32
        )
        for window in (1, 65, 1000)
    },
}

_WIDE = partial(Estimate, head_dim=128, dtype=torch.bfloat16)
ON_GPU = {
    "estimate of 128K tokens": _WIDE(
        q_len=2000, k_len=131_072, heads=(0, 1, 2, 3), last_q=(64,) * 4
    ),
    "estimate of 1000 queries": _WIDE(
        q_len=3000, k_len=3000, heads=(0, 1, 3), last_q=(1000, 64, 700), kv_heads=4, transposed=True
    ),
    "estimate in a window, D 256": _WIDE(
        q_len=500, k_len=20_000, heads=(0, 1, 2), last_q=(64, 128, 64), window=1000, head_dim=256
    ),
}


def estimate_error(case: Estimate, device: torch.device, backend: str = "triton") -> float:
    """The largest absolute error of both masses against torch's of the same inputs in fp32."""
    torch.manual_seed(0)
    q, k = (
        torch.randn(case.batch, heads, length, case.head_dim, device=device).to(case.dtype)
        for heads, length in ((case.num_heads, case.q_len), (case.kv_heads, case.k_len))
    )
    if case.transposed:
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    how = {"scale": 2 * case.head_dim**-0.5, "window": case.window}
    result = EstimateCall(q, k, case.heads, case.last_q, **how).run(backend)
    exact = (q.float(), k.float())
    expected = EstimateCall(*exact, case.heads, case.last_q, **how).run("reference")
    vertical = largest(result.vertical, expected.vertical)
    return max(vertical, largest(result.slash(), expected.slash()))


# Shape of the queries (B, H, Q, D), KV heads, keys, and the heads asked for.
MEANS = {
    "means of a token": ((1, 1, 1, 64), 1, 1, (0,)),
    "means, 5 missing, D 80, batch 2": ((2, 4, 300, 80), 2, 305, (0, 2, 3)),
    "means, all but one missing, D 160": ((1, 3, 130, 160), 3, 193, (1, 2)),
    "means of one KV head": ((2, 5, 70, 32), 1, 70, (0, 2, 3, 4)),
    "means of less than is missing": ((1, 1, 3, 16), 1, 13, (0,)),
}


def means_error(
    case: tuple[tuple[int, ...], int, int, Sequence[int]],
    device: torch.device,
    backend: str = "triton",
) -> float:
    """The largest absolute error of means against torch's of the same inputs in fp32."""
    shape, kv_heads, k_len, heads = case
    torch.manual_seed(0)
    q = torch.randn(shape, device=device).half()
    k = torch.randn(shape[0], kv_heads, k_len, shape[3], device=device).half()
    result = MeansCall(q, k, heads).run(backend)
    expected = MeansCall(q.float(), k.float(), heads).run("reference")
    assert all(one.shape == other.shape for one, other in zip(result, expected, strict=True))
    return max(largest(*pair) for pair in zip(result, expected, strict=True))


# Shape of the scores (B, n), and how many are taken. Several sequences also ragged.
CHOICES = {
    "choice of 1": ((1, 1), 4),
    "choice of 65": ((2, 65), 20),
    "choice of 130": ((4, 130), 128),
    "choice of 4200, ragged": ((5, 4200), 700),
    "choice of 5000": ((2, 5000), 4990),
    "choice of 70000": ((1, 70_000), 1000),
}


def choice_error(
    case: tuple[tuple[int, int], int],
    device: torch.device,
    backend: str = "triton",
    *,
    poisoned: bool = True,
) -> float:
    """Places that differ from torch's stable choice, among ties and -inf, and those with NaN.

    poisoned: scores that are NaN are chosen from, too.
    """
    shape, width = case
    torch.manual_seed(0)
    # Adding 0 makes 0 of -0.
    scores = (torch.randn(shape) * 4).round() / 4 + 0
    scores[torch.rand(shape) < 0.3] = float("-inf")
    wrong = 0
    for ragged in (False, True) if shape[0] > 1 else (False,):
        ends, counts = torch.tensor(
            [[shape[-1], 3, 0, shape[-1] - 1, 5000], [5000, 2, 9, 0, 65]], dtype=torch.int32
        )
        per_sequence = {"ends": ends[: shape[0]], "counts": counts[: shape[0]]} if ragged else {}
        there = {name: x.to(device) for name, x in per_sequence.items()}
        result = TopKCall(scores.to(device), width, **there).run(backend).cpu()
        expected = TopKCall(scores, width, **per_sequence).run("reference")
        wrong += int((result != expected).sum())
        if poisoned:
            bad = scores.masked_fill(torch.rand(shape) < 0.2, float("nan"))
            taken = TopKCall(bad.to(device), width, **there).run(backend).cpu()
            at = taken.clamp(max=shape[-1] - 1).long()
            wild = (taken < 0) | (taken != PAD) & bad.gather(-1, at).isnan()
            wrong += int(wild.sum())
    return wrong


# By number alone, which a GPU chooses in one launch, and all that reads keys.
BY_NUMBER = (
    make("vertical_slash", vertical=80, slash=90),
    make("block_sparse", blocks=3),
    make("a_shape", sink=70, window=100),
    make("vertical_slash", vertical=200, slash=64, last_q=100),
    make("dense"),
    make("block_sparse", blocks=1),
)
EVERY = (
    *BY_NUMBER[:2],
    make("a_shape", sink=1, window=70),
    make("vertical_slash", vertical=150, slash=300, last_q=30, coverage=0.8),
    make("block_sparse", blocks=9, coverage=0.7),
    make("vertical_slash", vertical=64, slash=200, last_q=100),
)


@dataclass(frozen=True, kw_only=True)
class Build:
    """A build of a layer; `cache` is the pages' dtype, `halves` their layout in vLLM on CPUs."""

    q_len: int
    k_len: int
    page: int
    batch: int = 1
    kv_heads: int = 2
    head_dim: int = 32
    dtype: torch.dtype = torch.float16
    cache: torch.dtype | None = None
    window: int | None = None
    halves: bool = False


PAGED = {
    **{
        f"pages: {q} of {k}, pages of {page}": Build(q_len=q, k_len=k, page=page)
        for q, k, page in (
            (10, 140, 37),
            (100, 300, 16),
            (100, 300, 37),
            (257, 257, 64),
            (257, 257, 100),
            (64, 450, 128),
        )
    },
    "pages: a token": Build(q_len=1, k_len=1, page=16),
    "pages: batch 2, one KV head, D 80": Build(
        q_len=70, k_len=301, page=64, batch=2, kv_heads=1, head_dim=80
    ),
    "pages: batch 2, pages of 1,000": Build(q_len=70, k_len=190, page=1000, batch=2),
    "pages: window of 65, pages of 192": Build(q_len=130, k_len=400, page=192, window=65),
    "pages: keys and values of a page in turn": Build(q_len=150, k_len=310, page=64, halves=True),
    "pages: bfloat16": Build(q_len=150, k_len=310, page=80, dtype=torch.bfloat16),
    "pages: D 160": Build(q_len=64, k_len=130, page=64, head_dim=160),
    "pages: float8_e4m3fn read in bfloat16": Build(
        q_len=100, k_len=300, page=64, dtype=torch.bfloat16, cache=torch.float8_e4m3fn
    ),
    "pages: float8_e5m2 read in float16": Build(
        q_len=100, k_len=300, page=128, cache=torch.float8_e5m2
    ),
}


def paged(k: Tensor, case: Build) -> Paged:
    """Keys (B, G, K, D) in pages of a cache, in any order, with NaN all around them."""
    cache, table = tensors.paged(k, case.page)
    if case.halves:
        pages, size, kv_heads, dim = cache.shape
        wide = cache.new_full((pages, kv_heads, 2, size, dim), float("nan"))
        cache = wide[:, :, 0].copy_(cache.transpose(1, 2)).transpose(1, 2)
    return Paged.from_cache(cache, table, [k.shape[2]] * len(k), case.dtype)


def differences(case: Build, device: torch.device) -> dict[str, int]:
    """Numbers that differ between pages and a tensor, by their name."""
    torch.manual_seed(case.k_len + case.page)
    q, k = (
        torch.randn(case.batch, heads, length, case.head_dim, device=device)
        for heads, length in ((6, case.q_len), (case.kv_heads, case.k_len))
    )
    q, k = q.to(case.dtype), k.to(case.cache or case.dtype)
    where = paged(k, case)
    k = k.to(case.dtype)
    result = {}

    def compare(name: str, first: Tensor, second: Tensor) -> None:
        same = first.shape == second.shape and first.dtype == second.dtype
        result[name] = int((first != second).sum()) if same else -1

    how = {"scale": 0.3, "window": case.window}
    masses = [
        EstimateCall(q, keys, [0, 2, 3, 5], [64, 100, 1, 64], **how).run() for keys in (where, k)
    ]
    compare("vertical", masses[0].vertical, masses[1].vertical)
    compare("slash", masses[0].slash(), masses[1].slash())
    means = [MeansCall(q, keys, range(6)).run() for keys in (where, k)]
    compare("means", means[0].keys, means[1].keys)
    for name, patterns in (("by number", BY_NUMBER), ("every", EVERY)):
        plan = LayerPlan(patterns, case.kv_heads, dense_tail=10)
        index = plan.build(q, where.cache, **how, block_table=where.table, k_len=case.k_len)
        expected = plan.build(q, k, **how)
        for part in ("diagonals", "tiles", "offsets", "columns"):
            compare(f"{part}, {name}", getattr(index, part), getattr(expected, part))
    return result


def paged_error(case: Build, device: torch.device) -> float:
    """Masses, means and index entries that differ from those of dense keys."""
    with no_native_code():
        result = differences(case, device)
        # Torch would have served in its place, unnoticed.
        half = torch.empty(1, 1, 1, case.head_dim, dtype=torch.float16, device=device)
        assert triton.Means.supports(MeansCall(half, half, (0,))) is None
    return sum(map(abs, result.values()))


# A layer of every kind, by number and by coverage.
UNLIKE = (
    make("vertical_slash", vertical=80, slash=90),
    make("a_shape", sink=70, window=100),
    make("block_sparse", blocks=3),
    make("skip_softmax", scale_factor=3.0),
    make("dense"),
    make("block_sparse", blocks=9, coverage=0.7),
)
LAYERS = {
    f"layer: {q} of {k}, batch {batch}, window {window}, {name}": (
        Build(q_len=q, k_len=k, page=0, batch=batch, window=window),
        patterns,
    )
    for q, k, batch, window in (
        (1, 1, 1, None),
        (10, 140, 1, None),
        (257, 257, 1, None),
        (130, 300, 1, None),
        (70, 301, 2, None),
        (130, 400, 1, 65),
    )
    for name, patterns in (("unlike", UNLIKE), ("by number", BY_NUMBER), ("every", EVERY))
} | {
    "layer: 64 of 4,200, batch 1, window None, by number": (
        Build(q_len=64, k_len=4200, page=0),
        BY_NUMBER,
    )
}


def layer_error(
    case: tuple[Build, Sequence[Pattern]], device: torch.device, backend: str = "triton"
) -> int:
    """Numbers of a layer's index that differ from the reference's, by the same masses and means."""
    build, patterns = case
    torch.manual_seed(build.k_len)
    q, k = (
        torch.randn(build.batch, heads, length, build.head_dim, device=device).to(build.dtype)
        for heads, length in ((6, build.q_len), (build.kv_heads, build.k_len))
    )
    kinds: dict[type[Pattern], list[int]] = {}
    for head, pattern in enumerate(patterns):
        kinds.setdefault(type(pattern), []).append(head)
    parts = []
    for kind, heads in kinds.items():
        some = [patterns[head] for head in heads]
        builder = kind.prepare(some, Inputs(heads, q, k, 0.3, build.window))
        parts.append(Part(heads, some, builder))
    result = SelectCall(parts).run(backend)
    expected = SelectCall(parts).run("reference")
    wrong = int(result.widths() != expected.widths())
    for name in ("diagonals", "columns", "tiles", "offsets", "skip"):
        one, other = getattr(result, name), getattr(expected, name)
        if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
            wrong += one is not other
        else:
            wrong += int((one != other).sum())
    return wrong


# Tables of the attention kernel, one query tile at a time.
LENGTH = 500
DIAGONALS = [[0], [0, 1, 2], [0, 2, 3, 5], [0, 1, 7], list(range(8))]
COLUMNS = [[0, 1, 70, 300], [5], [0, 63, 64, 127, 128, 200, 449], [], [3, 500]]
TABLES = {
    f"tables, {rows} query tiles, window {window}": (rows, window)
    for rows, window in itertools.product((1, 2), (None, 1, 66, 300))
}


def _padded(rows: list[list[int]]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[row + [PAD] * (width - len(row)) for row in rows]], dtype=torch.int32)


def tables_error(case: tuple[int, int | None], device: torch.device) -> float:
    """Entries of the walk, and counts of columns, that are wrong."""
    rows, window = case
    n = num_tiles(LENGTH)
    index = SparseIndex(
        q_len=LENGTH,
        k_len=LENGTH,
        diagonals=_padded(DIAGONALS).to(device),
        **no_lists(1, len(DIAGONALS), n, device=device),
        columns=_padded(COLUMNS).to(device),
        window=window,
    )
    call = attention.tables(index, rows, window)
    run_calls([call], device, "tables")
    width, reach = call.arguments["walk_width"], index.window_tiles
    built = call.arguments["tables"].cpu()[0].split([4 * width, 6 * (n + 1), n + 1], dim=-1)
    wrong = 0
    for walk, counts, held, diagonals, columns in zip(*built, DIAGONALS, COLUMNS, strict=True):
        seen = [d for d in diagonals if d <= reach]
        wrong += held.nonzero().flatten().tolist() != seen
        counted = counts.view(6, n + 1).tolist()
        unbroken = next(i for i, d in enumerate([*seen, PAD]) if i != d)
        for at in range(n):
            result = {}
            for sort, wants in ((0, (0, 1)), (1, (0,)), (2, (1,)), (3, (0, 1)))[
                :: 3 if rows == 1 else 1
            ]:
                for e in walk.view(4, width)[sort, : counted[sort][at]].tolist():
                    for half in wants[:rows]:
                        result.setdefault(half, []).append((e, sort == 0))
            for half in range(rows):
                # Up to the last key that a window leaves to the program's last query no mask is
                # needed.
                whole = n if window is None else (window - 64 * rows) // 64
                entries = [(d - half, d - half <= whole) for d in seen if half < d <= at + half]
                both = {d for d in seen if rows == 1 or d + 1 - 2 * half in seen}
                expected = [(e, uncut and e + half in both) for e, uncut in entries]
                wrong += sorted(result.get(half, [])) != expected
            wrong += counted[4][at] != sum(c // 64 <= at - unbroken for c in columns)
            wrong += counted[5][at] != sum(c // 64 < at - reach for c in columns)
    return wrong


SORTS = (
    (ESTIMATES | ON_GPU, estimate_error, ERROR),
    (MEANS, means_error, ERROR),
    (CHOICES, choice_error, 0.5),
    (PAGED, paged_error, 0.5),
    (LAYERS, layer_error, 0.5),
    (TABLES, tables_error, 0.5),
)
CASES = {
    name: (case, of_sort, allowed)
    for cases, of_sort, allowed in SORTS
    for name, case in cases.items()
}


def error(name: str, device: torch.device) -> float:
    """The error of Triton's kernels in a case of any sort, in units of what is allowed."""
    case, of_sort, allowed = CASES[name]
    if device.type == "cuda" and of_sort is estimate_error:
        # Of exponentials that are approximate there.
        allowed *= 10
    return of_sort(case, device) / allowed
