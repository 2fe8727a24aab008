"""Cases of attention, which every backend goes through, and their oracle.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim, S
sequences."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.attention import AttentionCall, attend
from kernels.attention import triton as backend
from kernels.attention.triton_launch import TileConfig, architecture, precision_of_float32
from kernels.index import PAD, TILE, SparseIndex, empty_entries, lists, num_rows, num_tiles
from kernels.joining import concat_sequences
from kernels.logits import Logits
from kernels.patterns import LayerPlan, make
from kernels.ragged import Ragged
from kernels.topk import ascending
from tests.conformance.tensors import difference, make_tensor, paged
from tests.kernels import kinds

LAYER = (
    make("vertical_slash", vertical=80, slash=90),
    make("block_sparse", blocks=2),
    make("a_shape", sink=70, window=100),
    make("vertical_slash", vertical=120, slash=64, last_q=16),
    make("dense"),
)
# Without block-sparse heads a program of Triton's may serve two query tiles.
LISTLESS = tuple(pattern for pattern in LAYER if pattern.kind != "block_sparse")
LAYERS = {"layer": LAYER, "listless": LISTLESS, "every kind": kinds.LAYER}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call; `index` is one of LAYERS, or "random:D,T,C" (entries of each sort).

    Keys and values are of dtype `cache`, or of the queries'; `has_out` passes `out` to the call.
    `skip` is the bound of every head but the first; q and k are then such that tiles of keys are
    wanted more or less. Logits rise by `rise` nats from key to key. `config` and `splits` are
    Triton's alone."""

    q_len: int
    k_len: int
    batch: int = 1
    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 64
    v_dim: int = 64
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    rise: float = 0.0
    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None
    index: str = "layer"
    dense_tail: int = 0
    window: int | None = None
    skip: float | None = None
    ragged: Ragged | None = None
    page: int | None = None
    layout: str = "contiguous"
    has_out: bool = False
    config: TileConfig | None = None
    splits: int | None = None


def square(length: int, **more: Any) -> Case:
    """As many queries as keys."""
    return Case(q_len=length, k_len=length, **more)


def last(q_len: int, k_len: int, **more: Any) -> Case:
    """A case whose queries are the last `q_len` of `k_len` positions."""
    return Case(q_len=q_len, k_len=k_len, **more)


def padded(*lengths: int, queries: int | None = None, **more: Any) -> Case:
    """Sequences of these many keys, left-padded; the last `queries` are asked."""
    k_len = max(lengths) + 5
    q_len = queries or k_len
    ragged = Ragged.left_padded(lengths, q_len, k_len)
    return Case(q_len=q_len, k_len=k_len, batch=len(lengths), ragged=ragged, **more)


def packed(*lengths: tuple[int, int], **more: Any) -> Case:
    """Sequences of these many queries and keys, end to end, and a few rows of nobody after them."""
    queries, keys = ([0, *itertools.accumulate(n)] for n in zip(*lengths, strict=True))
    return Case(
        q_len=queries[-1] + 3, k_len=keys[-1] + 2, ragged=Ragged.packed(queries, keys), **more
    )


def _config(rows: int, keys: int) -> TileConfig:
    return TileConfig(rows=rows, keys=keys, warps=4, stages=2)


_PLAIN = {
    **{f"length {n}": square(n) for n in (1, 63, 64, 65, 200)},
    **{f"length {n}, listless": square(n, index="listless") for n in (1, 63, 65, 200)},
    "every kind": square(257, heads=14, kv_heads=2, index="every kind"),
    "5 heads": square(129, heads=5),
    **{f"{h} heads on {g}": square(130, heads=h, kv_heads=g) for h, g in ((2, 2), (6, 2), (16, 2))},
    "batch 2": square(130, batch=2, heads=4, kv_heads=2, index="listless"),
    **{f"{q} of {k}": last(q, k) for q, k in ((1, 65), (37, 200), (129, 257))},
    "65 of 300, listless": last(65, 300, index="listless"),
    **{f"D {d}": square(130, head_dim=d, v_dim=d, index="listless") for d in (80, 96, 128, 256)},
    **{
        f"D {d}, E {e}": square(130, head_dim=d, v_dim=e)
        for d, e in ((1, 1), (33, 17), (64, 256), (192, 128))
    },
    "D 512": square(70, head_dim=512, v_dim=512, heads=2, kv_heads=2, index="listless"),
    "D 300, E 512": square(70, head_dim=300, v_dim=512, heads=2),
    "sinks": square(130, sinks=True),
    "sinks, listless, soft-cap": square(200, sinks=True, index="listless", softcap=20.0, heads=4),
    "own scale": square(130, scale=0.5),
    "soft-cap 2": square(130, scale=0.5, softcap=2.0),
    "soft-cap 50, q of k": last(40, 200, softcap=50.0, index="listless"),
    "transposed": square(130, batch=2, layout="transposed", kv_heads=3),
    "strided": square(130, layout="strided", index="listless"),
    "expanded": last(100, 200, batch=2, heads=6, kv_heads=2, layout="expanded"),
    "own tile only": square(150, index="random:1,0,0"),
    "all three sorts": square(300, heads=2, index="random:2,2,90"),
    "lists on diagonals": square(300, heads=2, index="random:3,4,20"),
    "many columns": last(70, 300, heads=2, index="random:1,0,280"),
    "given out": square(130, has_out=True),
    **{
        f"pages of {size}, {kind}": square(200, page=size, index=kind)
        for size, kind in ((1, "layer"), (16, "listless"), (64, "layer"), (128, "listless"))
    },
    "pages, q of k, batch 2": last(70, 150, batch=2, heads=2, kv_heads=2, page=16),
}
# Tiles that are computed only where they may matter.
_SKIPPING = {
    "skip": square(450, heads=2, index="random:7,0,0", skip=-3.0, config=_config(1, 64)),
    "skip, 16 keys a step": square(
        450, heads=2, index="random:7,0,0", skip=-3.0, config=_config(1, 16)
    ),
    "skip, lists, columns, 130 of 320, tail": last(
        130, 320, heads=3, index="random:3,4,60", skip=-2.0, softcap=30.0, dense_tail=70
    ),
    "skip, window, freed pages": last(
        130, 450, heads=2, index="random:7,0,0", skip=-3.0, window=200, page=16
    ),
    "skip, window, padded, pages": padded(
        450, 30, 300, heads=2, index="random:8,0,0", skip=-3.0, window=280, page=16, queries=200
    ),
}
_FORMS = {
    **{
        f"{rows} x 64 queries, {keys} keys": square(
            260, heads=2, index="random:2,0,90", config=_config(rows, keys)
        )
        for rows, keys in ((1, 64), (2, 64), (2, 16), (1, 128))
    },
    **{
        f"pairs of tiles, tail {tail}": square(
            300, heads=2, index="random:2,0,90", dense_tail=tail, config=_config(2, 128)
        )
        for tail in (70, 130)
    },
    "pairs of tiles, pages": last(
        260, 300, heads=2, index="random:5,0,0", page=64, config=_config(2, 128)
    ),
    "pairs of tiles, window": square(
        330, heads=2, index="random:4,0,90", window=200, config=_config(2, 128)
    ),
    "pairs of tiles, lists, window, tail": last(
        200, 300, heads=2, index="random:3,3,60", window=230, dense_tail=70, config=_config(1, 128)
    ),
}
# A row of tiles is dense or not; with lists a program has one row, without it has two.
_TAILS = {
    **{
        f"tail {tail}, {q} of 300, {sorts}": last(
            q, 300, heads=2, dense_tail=tail, index=f"random:{sorts}"
        )
        for tail in (10, 70, 300)
        for q, sorts in ((300, "2,0,90"), (37, "1,0,0"), (130, "1,2,0"))
    },
    **{f"tail {n}": square(200, heads=5, dense_tail=n) for n in (1, 64, 65)},
    "tail, pages": last(140, 200, dense_tail=70, page=32),
}
_WINDOWS = {
    **{
        f"window {window}, {sorts}": square(280, heads=2, window=window, index=f"random:{sorts}")
        for window, sorts in ((1, "2,2,120"), (64, "5,0,0"), (65, "2,2,120"), (200, "1,3,0"))
    },
    "window 66, listless": square(260, heads=4, window=66, index="listless"),
    "window 100, layer": last(140, 260, heads=5, window=100),
    "window of all keys": square(130, window=130, index="listless"),
    "window, pages": square(200, heads=2, window=70, index="random:2,2,90", page=16),
    **{
        f"window, freed pages of {size}": last(
            70, 300, heads=2, window=70, index="random:2,2,90", page=size
        )
        for size in (16, 64)
    },
}
_RAGGED = {
    "padded": padded(1, 64, 130, 65),
    "padded, q of k": padded(200, 30, 90, queries=70, heads=2),
    "padded, given out": padded(70, 10, has_out=True, layout="transposed"),
    "padded, sinks, window, pages": padded(
        200, 30, 129, sinks=True, window=66, page=16, heads=2, kv_heads=2
    ),
    "packed": packed((63, 63), (64, 64), (1, 1), (65, 65), heads=5),
    "packed, q of k, listless": packed(
        (1, 100), (70, 70), (40, 200), (65, 130), index="listless", has_out=True
    ),
    "packed, all three sorts": packed(
        (100, 180), (65, 65), (30, 190), heads=2, index="random:2,2,60"
    ),
    "packed, pages of 16": packed(
        (1, 100), (70, 70), (33, 150), heads=4, kv_heads=2, page=16, has_out=True
    ),
    # Soft-capped sliding-window layers of a ragged batch whose last queries see everything.
    **{
        f"{name}, window, tail, soft-cap": case(
            heads=4,
            kv_heads=2,
            index="random:2,2,60",
            window=66,
            dense_tail=70,
            softcap=20.0,
            page=page,
        )
        for name, page, case in (
            ("padded", None, lambda **more: padded(200, 30, 129, queries=140, **more)),
            ("packed, pages", 16, lambda **more: packed((40, 200), (65, 65), (1, 130), **more)),
        )
    },
}
# Few queries on many keys: each program does a part of its keys.
_PARTS = {
    **{
        f"{n} parts, {q} of {k}": last(q, k, heads=4, kv_heads=2, index=index, splits=n)
        for n, q, k, index in (
            (3, 37, 500, "layer"),
            (9, 1, 65, "listless"),
            (4, 130, 450, "random:2,3,90"),
            (5, 65, 300, "random:1,0,280"),
        )
    },
    "3 parts, pairs of tiles, tail": last(
        150, 450, heads=2, index="random:5,0,90", dense_tail=100, config=_config(2, 128), splits=3
    ),
    "3 parts, D 80, E 17, batch 2, sinks, window": last(
        70,
        400,
        batch=2,
        heads=2,
        head_dim=80,
        v_dim=17,
        sinks=True,
        window=250,
        index="random:4,2,60",
        splits=3,
    ),
    "3 parts, packed, pages, tail": packed(
        (33, 150),
        (1, 70),
        heads=2,
        page=16,
        index="random:2,2,60",
        dense_tail=70,
        has_out=True,
        sinks=True,
        splits=3,
    ),
    "2 parts, padded": padded(300, 30, 129, queries=140, heads=2, splits=2),
}
_BASE = _PLAIN | _SKIPPING | _FORMS | _TAILS | _WINDOWS | _RAGGED | _PARTS
_EIGHT_BITS = {
    f"{str(cache)[6:]}, {name}": replace(_BASE[name], cache=cache)
    for cache, name in (
        (torch.float8_e4m3fn, "pages, q of k, batch 2"),
        (torch.float8_e4m3fn, "3 parts, packed, pages, tail"),
        (torch.float8_e5m2, "D 33, E 17"),
        (torch.float8_e5m2, "strided"),
        (torch.float8_e5m2, "padded, sinks, window, pages"),
    )
}
# What Triton's interpreter can do as well.
SMALL = _BASE | _EIGHT_BITS
# Threads share rows of a long prompt, or parts of the keys of few queries.
LONG = {
    "length 1000": square(1000, heads=7),
    "length 4097": square(4097, heads=2),
    "1 of 1000": last(1, 1000, heads=7),
    "70 of 4097": last(70, 4097, heads=5),
    "tail, 65 of 4100": last(65, 4100, batch=2, heads=2, dense_tail=20),
    "tail, 200 of 4100, sinks, window, soft-cap": last(
        200, 4100, heads=2, dense_tail=70, sinks=True, window=3000, softcap=20.0
    ),
    # The accumulated output is rescaled many times.
    "rising": square(900, heads=4, kv_heads=2, rise=0.012),
    "rising, 70 of 4100, soft-cap": last(
        70, 4100, heads=4, kv_heads=2, rise=0.002, softcap=50.0, dense_tail=4100
    ),
}
CASES = SMALL | LONG
# Builds of every head dim, with lists of tiles and without, on more keys than a step has.
_WIDE = {"heads": 4, "kv_heads": 2, "head_dim": 128, "v_dim": 128}
_PADDED = partial(padded, 2000, 30, 1025, 64, queries=1500, **_WIDE)
_PACKED = partial(packed, (1000, 2000), (1, 900), (64, 64), (700, 700), (1, 1), **_WIDE)
ON_GPU = {
    **{
        f"D {d}, {kind}": square(500, heads=4, kv_heads=2, head_dim=d, v_dim=d, index=kind)
        for d in (64, 80, 96, 128, 192, 256)
        for kind in ("layer", "listless")
    },
    "32 heads on 8, D 128": square(1000, heads=32, kv_heads=8, head_dim=128, v_dim=128),
    "thirty diagonals": square(4000, heads=4, index="random:30,0,700"),
    "all three sorts, D 128": square(2000, index="random:5,5,400", **_WIDE),
    **{
        f"{name}, {kind}": case(index=kind, page=page)
        for kind in ("layer", "listless")
        for name, case, page in (
            ("padded", _PADDED, None),
            ("packed", _PACKED, None),
            ("padded, pages of 64", _PADDED, 64),
            ("packed, pages of 16", _PACKED, 16),
        )
    },
    **{
        f"{name}, everything, {kind}": case(
            index=kind, window=512, dense_tail=64, softcap=30.0, sinks=True, page=16, has_out=True
        )
        for kind in ("layer", "listless")
        for name, case in (("padded", _PADDED), ("packed", _PACKED))
    },
}

# Largest absolute and relative L2 error of standard normal inputs: one rounding of the output, and
# of the probabilities in 16 bits.
TOLERANCES = {
    ("out", torch.float32): (1e-5, 2e-6),
    ("out", torch.float16): (2e-3, 4e-4),
    ("out", torch.bfloat16): (2e-2, 5e-3),
    ("lse", torch.float32): (1e-5, 2e-6),
    ("lse", torch.float16): (1e-5, 2e-6),
    ("lse", torch.bfloat16): (2e-4, 2e-5),
}


class Problem(NamedTuple):
    """A call (with pages k and v are caches), results of the oracle, and tiles that it skipped."""

    q: Tensor
    k: Tensor
    v: Tensor
    index: SparseIndex
    rest: dict[str, Any]
    out: Tensor
    lse: Tensor
    skipped: Tensor


def problem(case: Case, device: torch.device) -> Problem:
    """Random tensors, NaN in all rows of nobody, and the reference's results in fp32."""
    torch.manual_seed(0)
    how = (case.layout, case.dtype, device)
    q = make_tensor((case.batch, case.heads, case.q_len, case.head_dim), *how)
    k = make_tensor((case.batch, case.kv_heads, case.k_len, case.head_dim), *how)
    v = make_tensor((case.batch, case.kv_heads, case.k_len, case.v_dim), *how)
    if case.rise:
        # In the last dimension: a sum that begins with it rounds at its size each time.
        q[..., -1] = case.head_dim**0.5
        k[..., -1] = case.rise * torch.arange(case.k_len)
    if case.skip is not None:
        strength = torch.randn(*k.shape[:2], num_tiles(case.k_len), 1, device=device)
        strength = strength.repeat_interleave(TILE, 2)[:, :, : case.k_len]
        want = torch.randn(case.head_dim, device=device)
        q, k = q + want.to(q.dtype), k / 2 + (strength * want).to(k.dtype)
    if case.ragged is not None:
        _poison_padding(q, k, v, case.ragged)
    if case.cache is not None:
        k, v = k.to(case.cache), v.to(case.cache)
    index = _index(case, q, k.to(q.dtype))
    sinks = torch.randn(case.heads, device=device) * 2 if case.sinks else None
    rest: dict[str, Any] = {"logits": Logits(case.scale, case.softcap, sinks, case.window)}
    skipped = torch.zeros(index.diagonals.shape[:2], dtype=torch.int32, device=device)
    exact = (q.float(), k.float(), v.float(), index)
    out, lse = attend(AttentionCall(*exact, **rest, skipped=skipped), "reference")
    assert case.skip is None or bool(skipped.any())
    if case.page is not None:
        index, k, v, rest["block_table"] = _paged_call(index, k, v, case.page)
    return Problem(q, k, v, index, rest, out, lse, skipped)


def served(
    case: Case, inputs: Problem, op: Callable[[AttentionCall], Any]
) -> tuple[Tensor, Tensor]:
    """out and lse of a backend's op; layout, dtypes and the count of tiles are as they must be."""
    skipped = torch.zeros_like(inputs.skipped)
    rest = {**inputs.rest, "skipped": skipped}
    shape = (*inputs.q.shape[:3], case.v_dim + 3)
    around = torch.full(shape, float("nan"), dtype=case.dtype, device=inputs.q.device)
    if case.has_out:
        rest["out"] = around[..., 1:-2]
    out, lse = op(AttentionCall(inputs.q, inputs.k, inputs.v, inputs.index, **rest))
    assert torch.equal(skipped, inputs.skipped)
    assert out.dtype == case.dtype and lse.dtype == torch.float32
    if case.has_out:
        assert out is rest["out"] and bool(around[..., [0, -2, -1]].isnan().all())
    else:
        assert out.transpose(1, 2).is_contiguous()
    return out, lse


def by_triton(case: Case, device: torch.device) -> Callable[[AttentionCall], Any]:
    """The op by its name, or in the build and the parts that the case asks for."""
    config = case.config
    if config is not None and case.dtype == torch.float32:
        precision = precision_of_float32(architecture(device), case.head_dim)
        config = replace(config, precision=precision)
    if config is not None or case.splits is not None:
        return partial(backend.run, config=config, splits=case.splits)
    return partial(attend, backend="triton")


def run(case: Case, device: torch.device) -> tuple[float, float]:
    """Largest errors of Triton's out and lse; infinite where nothing was written."""
    inputs = problem(case, device)
    out, lse = served(case, inputs, by_triton(case, device))
    return float(difference(out, inputs.out).max()), float(difference(lse, inputs.lse).max())


def check(actual: Tensor, expected: Tensor, op: str, dtype: torch.dtype) -> None:
    """Fails with both errors and the worst place; NaN anywhere fails."""
    error = difference(actual, expected)
    most, most_relative = TOLERANCES[op, dtype]
    norm = expected.double().masked_fill(expected.isinf(), 0).norm().clamp_min(1e-30)
    worst = float(error.max())
    relative = float(error.norm() / norm)
    place = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    assert worst <= most and relative <= most_relative, (
        f"{op} in {dtype}: largest error {worst:.3g} (allowed {most}) at {place}, "
        f"{float(actual[place])} for {float(expected[place])}; "
        f"relative error {relative:.3g} (allowed {most_relative})"
    )


def _poison_padding(q: Tensor, k: Tensor, v: Tensor, ragged: Ragged) -> None:
    """NaN in every row that belongs to no sequence."""
    for x, starts, lengths in (
        (q, ragged.q_starts, ragged.q_lens),
        *((x, ragged.k_starts, ragged.k_lens) for x in (k, v)),
    ):
        outside = torch.ones(x.shape[0], 1, x.shape[2], 1, dtype=torch.bool, device=x.device)
        for row, start, length in zip(ragged.rows, starts, lengths, strict=True):
            outside[row, :, start : start + length] = False
        x.masked_fill_(outside, float("nan"))


def _index(case: Case, q: Tensor, k: Tensor) -> SparseIndex:
    if not case.index.startswith("random:"):
        patterns = list(itertools.islice(itertools.cycle(LAYERS[case.index]), case.heads))
        plan = LayerPlan(patterns, case.kv_heads)
        index = plan.build(q, k, scale=case.scale, window=case.window, ragged=case.ragged)
    elif case.ragged is None:
        index = _random_index(case, case.batch, case.q_len, case.k_len, q.device)
    else:
        parts = [
            _random_index(case, 1, q_len, k_len, q.device) for q_len, k_len in case.ragged.lengths
        ]
        index = concat_sequences(parts, case.ragged)
    index = replace(index, dense_tail=case.dense_tail, window=case.window)
    if case.skip is not None:
        bounds = torch.full(index.diagonals.shape[:2], case.skip, device=q.device)
        bounds[:, 0] = -torch.inf
        index = replace(index, skip=bounds)
    index.validate()
    return index


def _random_index(
    case: Case, batch: int, q_len: int, k_len: int, device: torch.device
) -> SparseIndex:
    diagonals, tiles, columns = (int(x) for x in case.index.removeprefix("random:").split(","))
    n, heads = num_tiles(k_len), (batch, case.heads)
    rest = _entries(heads, n - 1, diagonals - 1, device)
    own = torch.zeros(*heads, 1, dtype=torch.int32, device=device)
    return SparseIndex(
        q_len=q_len,
        k_len=k_len,
        diagonals=torch.cat([own, torch.where(rest == PAD, PAD, rest + 1)], -1).to(torch.int32),
        **lists(_entries((*heads, num_rows(q_len, k_len)), n, tiles, device)),
        columns=_entries(heads, k_len, columns, device),
    )


def _entries(shape: tuple[int, ...], below: int, count: int, device: torch.device) -> Tensor:
    """About `count` ascending entries below `below` in the last axis, padded."""
    if count == 0:
        return empty_entries(*shape, 0, device=device)
    mask = torch.rand(*shape, below, device=device) < count / max(1, below)
    return torch.nn.functional.pad(ascending(mask, below), (0, 1), value=PAD)


def _paged_call(
    index: SparseIndex, k: Tensor, v: Tensor, size: int
) -> tuple[SparseIndex, Tensor, Tensor, Tensor]:
    """The same call with its keys in pages: index, caches and block table."""
    ragged = index.ragged
    if ragged is None:
        keys, values = list(k), list(v)
    else:
        places = list(zip(ragged.rows, ragged.k_starts, ragged.k_lens, strict=True))
        keys, values = (
            [x[row, :, start : start + length] for row, start, length in places] for x in (k, v)
        )
        index = replace(index, ragged=replace(ragged, k_starts=(0,) * len(ragged)))
    freed = [0] * len(keys)
    if index.window is not None:
        # A serving engine reuses the pages behind the first query's window for other sequences.
        lengths = [(index.q_len, index.k_len)] * len(keys)
        if ragged is not None:
            lengths = list(ragged.lengths)
        freed = [max(0, k_len - q_len - index.window + 1) for q_len, k_len in lengths]
        for parts in (keys, values):
            for s, count in enumerate(freed):
                parts[s] = parts[s].clone()
                parts[s][:, :count] = float("nan")
    (k_cache, table), (v_cache, _) = paged(keys, size), paged(values, size)
    for s, count in enumerate(freed):
        table[s, : count // size] = PAD
    return index, k_cache, v_cache, table
