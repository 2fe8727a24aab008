"""Cases of the Triton kernel, small enough for its interpreter.

As a script (TRITON_INTERPRET=1 python tests/kernels/triton_cases.py [NAME ...]) it interprets them,
or those named, and prints one JSON object: the largest errors of out and lse of each case, of both
masses of each estimate, of means, and wrong places of each choice."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch

from kernels.attention.triton_launch import Launch
from tests.kernels import bfloat16, triton_builders, triton_tables
from tests.kernels.triton_inputs import Case, packed, padded, run, square
from tests.kernels.triton_memory import memory_checked

# Largest absolute error of standard normal inputs: one rounding of the output, and of the
# probabilities in 16 bits.
OUT_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
LSE_ERROR = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 2e-4}


def _launch(rows: int, keys: int, **more: Any) -> Launch:
    return Launch(rows=rows, keys=keys, warps=4, stages=2, **more)


PLAIN = {
    **{f"length {n}, {kind}": square(n, index=kind) for n in (1, 63, 64, 65,
    200) for kind in ("layer", "listless")},
    "5 heads, 129 tokens": square(129, heads=5),
    **{f"{h} heads on {g}": square(130, heads=h, kv_heads=g) for h, g in ((2, 2), (6, 2), (8, 1))},
    "batch 2": square(130, batch=2, heads=2, kv_heads=2, index="listless"),
    **{
        f"{q} of {k}, {kind}": Case(q_len=q, k_len=k, index=kind)
        for q, k in ((1, 65), (37, 200), (65, 300), (129, 257))
        for kind in ("layer", "listless")
    },
    **{f"D {d}": square(130, head_dim=d, v_dim=d, heads=2, index="listless") for d in (80, 96, 128,
    256)},
    "D 33, E 17": square(130, head_dim=33, v_dim=17),
    "D 192, E 128": square(70, head_dim=192, v_dim=128),
    "D 512": square(70, head_dim=512, v_dim=512, heads=2, kv_heads=2, index="listless"),
    "D 300, E 512": square(70, head_dim=300, v_dim=512, heads=2),
    "sinks": square(130, sinks=True),
    "sinks, listless, soft-cap": square(200, sinks=True, index="listless", softcap=20.0, heads=4,
    kv_heads=2),
    "own scale": square(130, scale=0.5),
    "soft-cap 2": square(130, scale=0.5, softcap=2.0),
    "soft-cap 50, q of k": Case(q_len=40, k_len=200, softcap=50.0, index="listless"),
    "float16": square(200, dtype=torch.float16, heads=4, kv_heads=2),
    "transposed": square(130, layout="transposed", kv_heads=3),
    "strided": square(130, layout="strided", index="listless"),
    "skip": square(450, heads=2, index="random:7,0,0", skip=-3.0, launch=_launch(1, 64)),
    "skip, 16 keys a step": square(450, heads=2, index="random:7,0,0", skip=-3.0, launch=_launch(1,
    16)),
    "skip, lists, columns, 100 of 450, tail": Case(
        q_len=230, k_len=450, heads=3, index="random:3,4,60", skip=-2.0, softcap=30.0,
        dense_tail=(0, 0, 70)
    ),
    "skip, window, padded, pages": padded(
        450, 30, 300, heads=2, index="random:8,0,0", skip=-3.0, window=280, page=16, queries=200
    ),
    "skip, float16": square(400, heads=2, index="random:6,0,0", skip=-3.0, dtype=torch.float16),
    "own tile only": square(150, index="random:1,0,0"),
    "all three sorts": square(300, heads=2, index="random:2,2,90"),
    "lists on diagonals": square(300, heads=2, index="random:3,4,20"),
    "lists and columns": Case(q_len=100, k_len=300, heads=2, index="random:1,2,90"),
    "many columns": Case(q_len=70, k_len=300, heads=2, index="random:1,0,280"),
    **{
        f"{rows} x 64 queries, {keys} keys": square(260, heads=2, index="random:2,0,90",
        launch=_launch(rows, keys))
        for rows, keys in ((1, 64), (2, 64), (1, 16), (2, 16), (1, 128))
    },
    **{
        f"pairs of tiles, {name}": Case(q_len=q, k_len=300, heads=2, launch=_launch(rows, 128),
        **more)
        for rows, q, name, more in (
            (2, 300, "all", {"index": "random:5,0,90", "dense_tail": (70, 130)}),
            (2, 260, "pages", {"index": "random:4,0,0", "page": 64}),
            (2, 130, "small pages", {"index": "random:4,0,20", "page": 16}),
            (2, 300, "window", {"index": "random:5,0,90", "window": 200}),
            (1, 300, "lists", {"index": "random:1,3,60"}),
            (1, 200, "lists, window, tail", {"index": "random:3,3,60", "window": 230,
            "dense_tail": (0, 70)}),
        )
    },
    "given out": square(130, given=True),
    **{
        f"{str(cache).removeprefix('torch.')}, pages": Case(
            q_len=70, k_len=200, heads=2, page=16, dtype=torch.float16, cache=cache, sinks=True,
            softcap=30.0
        )
        for cache in (torch.float8_e4m3fn, torch.float8_e5m2)
    },
    **{f"pages of {size}, {kind}": square(200, page=size, index=kind) for size, kind in
       ((16, "listless"), (32, "layer"), (64, "layer"), (128, "listless"), (256, "layer"))},
    "pages, q of k, batch 2": Case(q_len=70, k_len=150, batch=2, heads=2, kv_heads=2, page=16),
}  # fmt: skip
# A row of tiles is dense or not, head by head; with lists a program has one row, without it has
# two.
TAILS = {
    "tail 10": square(200, index="listless", dense_tail=10),
    **{
        f"tails 0, 10, 70, 300; {q} of 300, {sorts}": Case(
            q_len=q, k_len=300, heads=4, dense_tail=(0, 10, 70, 300), index=f"random:{sorts}"
        )
        for q, sorts in ((300, "2,0,90"), (100, "2,1,90"), (37, "1,0,0"), (200, "1,0,90"), (130,
        "1,2,0"))
    },
    "tails of unlike heads": square(200, heads=5, dense_tail=(70, 1, 0, 64, 65)),
    "tail on one row of two, one tile a program": square(260, heads=2, index="random:2,0,90",
    dense_tail=70,
                                                         launch=_launch(1, 64)),
    "tail, pages": Case(q_len=140, k_len=200, dense_tail=70, page=32),
}  # fmt: skip
WINDOWS = {
    **{
        f"window {window}, {sorts}": square(280, heads=2, window=window, index=f"random:{sorts}")
        for window in (1, 40, 64, 65, 200)
        for sorts in ("5,0,0", "1,3,0", "1,0,120", "2,2,120")
    },
    **{
        f"window {window}, listless": square(260, heads=4, window=window, index="listless")
        for window in (65, 66, 128)
    },
    "window 100, layer": Case(q_len=140, k_len=260, heads=5, window=100),
    "window of all keys": square(130, window=130, index="listless"),
    "window, pages": square(200, heads=2, window=70, index="random:2,2,90", page=16),
}
RAGGED = {
    "padded": padded(1, 64, 130, 65),
    "padded, listless": padded(200, 30, 129, index="listless", heads=2, kv_heads=2),
    "padded, q of k": padded(200, 30, 90, queries=70, heads=2),
    "padded, given out": padded(70, 10, given=True, layout="transposed"),
    "padded, sinks, window, pages": padded(
        200, 30, 129, sinks=True, window=66, page=16, heads=2, kv_heads=2
    ),
    "packed": packed((63, 63), (64, 64), (1, 1), (65, 65), heads=5),
    "packed, q of k": packed((1, 100), (70, 70), (40, 200), (65, 130), heads=2),
    "packed, q of k, listless": packed(
        (1, 100), (70, 70), (40, 200), (65, 130), index="listless", given=True
    ),
    "packed, all three sorts": packed(
        (100, 180), (65, 65), (30, 190), heads=2, index="random:2,2,60"
    ),
    **{
        f"packed, pages of {size}, {kind}": packed(
            (1, 100), (70, 70), (33, 150), heads=4, kv_heads=2, page=size, index=kind, given=True
        )
        for size, kind in ((16, "layer"), (64, "listless"))
    },
    "padded, pages": padded(130, 20, 64, heads=2, page=16, index="listless"),
}
# Soft-capped sliding layers of a ragged batch whose last queries see everything.
TOGETHER: dict[str, Case] = {
    f"{name}, window, tails, soft-cap, {sorts}{pages}": case(
        heads=4, kv_heads=2, index=f"random:{sorts}", window=66, dense_tail=(0, 10, 70, 300),
        softcap=20.0,
        dtype=dtype, page=page, given=page is not None,
    )
    for sorts, page, pages, dtype in (
        ("2,0,60", None, "", torch.float32), ("2,2,60", 16, ", pages", torch.float32),
        ("3,0,60", 32, ", pages", torch.float16),
    )
    for name, case in (
        ("padded", lambda **more: padded(200, 30, 129, queries=140, **more)),
        ("packed", lambda **more: packed((40, 200), (65, 65), (1, 130), **more)),
    )
}  # fmt: skip
# Few queries on many keys: each program does a part of its keys.
PARTS = {
    **{
        f"{n} parts, {q} of {k}, {kind}": Case(q_len=q, k_len=k, heads=4, kv_heads=2, index=kind,
        splits=n)
        for n, q, k, kind in (
            (2, 100, 400, "listless"), (3, 37, 500, "layer"), (9, 1, 65, "listless"), (4, 130, 450,
            "random:2,3,90"),
            (3, 130, 450, "random:3,0,120"), (5, 65, 300, "random:1,0,280"), (2, 64, 128,
            "random:1,0,0"),
        )
    },
    "3 parts, pairs of tiles, tails": Case(
        q_len=150, k_len=450, heads=2, index="random:5,0,90", dense_tail=(0, 100),
        launch=_launch(2, 128), splits=3
    ),
    "3 parts, D 80, 64 keys a step, 32 columns": Case(
        q_len=70, k_len=400, heads=2, head_dim=80, v_dim=80, index="random:2,0,200",
        launch=_launch(1, 64), splits=3
    ),
    "3 parts, D 80, E 17, batch 2, sinks, window": Case(
        q_len=70, k_len=400, batch=2, heads=2, head_dim=80, v_dim=17, sinks=True, window=250,
        index="random:4,2,60",
        splits=3,
    ),
    "4 parts, float16, soft-cap, strided": Case(
        q_len=70, k_len=400, index="listless", dtype=torch.float16, softcap=20.0, layout="strided",
        splits=4
    ),
    "3 parts, packed, pages, tails": packed(
        (40, 300), (65, 65), (1, 230), heads=4, kv_heads=2, page=16, index="random:2,2,60",
        dense_tail=(0, 10, 70, 300),
        given=True, sinks=True, splits=3,
    ),
    "2 parts, padded": padded(300, 30, 129, queries=140, heads=2, splits=2),
}  # fmt: skip
# As kernels are run on GPUs, for the most part.
HALVES = {
    f"bfloat16, {name}": replace(case, dtype=torch.bfloat16)
    for name, case in (
        ("length 200, layer", PLAIN["length 200, layer"]), ("soft-cap 50, q of k",
        PLAIN["soft-cap 50, q of k"]),
        ("all three sorts", PLAIN["all three sorts"]), ("D 33, E 17", PLAIN["D 33, E 17"]),
        ("padded, sinks, window, pages", RAGGED["padded, sinks, window, pages"]),
        ("3 parts, packed, pages, tails", PARTS["3 parts, packed, pages, tails"]),
    )
}  # fmt: skip
SMALL = HALVES | PLAIN | TAILS | WINDOWS | RAGGED | TOGETHER | PARTS


def error(name: str, device: torch.device) -> tuple[float, float]:
    """The errors of one case, estimate, choice or set of tables."""
    if name in SMALL:
        return run(SMALL[name], device)
    if name in triton_builders.ESTIMATES:
        return triton_builders.estimate_error(triton_builders.ESTIMATES[name], device)
    if name in triton_builders.MEANS:
        return triton_builders.means_error(name, device)
    if name in triton_builders.PAGED:
        return triton_builders.paged_error(name, device)
    if name in triton_tables.TABLES:
        return triton_tables.tables_error(name, device)
    return triton_builders.choice_error(name, device)


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    # torch.empty gives NaN from here on.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    of_builders = (
        getattr(triton_builders, kind) for kind in ("ESTIMATES", "MEANS", "CHOICES", "PAGED")
    )
    names = names or [
        *SMALL,
        *(name for cases in of_builders for name in cases),
        *triton_tables.TABLES,
    ]
    with memory_checked(), bfloat16.as_on_a_device():
        print(json.dumps({name: error(name, torch.device("cpu")) for name in names}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
