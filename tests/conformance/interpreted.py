"""Triton's kernels, interpreted on the CPU under the check of their memory; prints JSON.

In float32 and float16: of bfloat16 the interpreter cuts off bits, and the code is the same.

    TRITON_INTERPRET=1 python -m tests.conformance.interpreted kept

runs the cases of `make test` and prints by check: the largest error of each case in units of its
tolerance, faults with extreme values, and reports of the memory check. With
OP NAME ... it runs these cases.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from tests.conformance import attention_cases, builder_cases, decode_cases, extremes
from tests.conformance.extremes import INF, NAN
from tests.conformance.triton_memory import memory_checked, reports

HOST = torch.device("cpu")
# Cases for number formats that are read otherwise and computed alike.
HALF = (
    "length 65, listless",
    "D 33, E 17",
    "strided",
    "pages of 16, listless",
    "packed, pages, window, tail, soft-cap",
    "float8_e5m2, D 33, E 17",
    "65 keys",
    "sinks, tokens",
    "strided layout",
    "pages of 10 and tokens",
    "prompt, batch 2, strided, soft-cap",
)
# One of each sort that Triton's kernels tell apart, for `make test`.
KEPT = {
    "attention": (
        "D 300, E 512",
        "65 of 300, listless",
        "tail 70, 130 of 300, 1,2,0",
        "padded, sinks, window, pages",
        "float8_e5m2, D 33, E 17",
        "float16: float8_e4m3fn, pages, q of k, batch 2",
        "skip, lists, columns, 130 of 320, tail",
        "pairs of tiles, tail 70",
        "pairs of tiles, pages",
        "3 parts, packed, pages, tail",
        "window, freed pages of 64",
    ),
    "decode": (
        "65 keys",
        "5 queries",
        "starts, ends and tokens",
        "3 splits, window, sinks, soft-cap",
        "float8 e4m3, D 33, E 17",
        "float16: float8 e4m3, pages of 16",
        "float16: 70 of 200",
    ),
    "builders": (
        "estimate of some heads, batch 2, D 80",
        "estimate in a window of 65",
        "means, 5 missing, D 80, batch 2",
        "choice of 130",
        "choice of 70000",
        "pages: 10 of 140, pages of 37",
        "layer: 10 of 140, batch 1, window None, unlike",
        "layer: 130 of 400, batch 1, window 65, by number",
        "tables, 2 query tiles, window 300",
    ),
}
ALL = {
    "attention": (*attention_cases.SMALL, *(f"float16: {name}" for name in HALF[:6])),
    "decode": (
        *decode_cases.SMALL,
        *decode_cases.PROMPTS,
        *(f"float16: {name}" for name in HALF[6:]),
    ),
    "builders": (
        *builder_cases.ESTIMATES,
        *builder_cases.MEANS,
        *builder_cases.CHOICES,
        *(name for name, case in builder_cases.PAGED.items() if case.dtype == torch.float16),
        *builder_cases.LAYERS,
        *builder_cases.TABLES,
    ),
}


def in_its_dtype(cases: Mapping[str, Any], name: str) -> Any:
    """The case of that name, in float16 where it begins so."""
    if name in cases:
        return cases[name]
    return replace(cases[name.removeprefix("float16: ")], dtype=torch.float16)


def attention(name: str) -> float:
    """The larger error of out and log-sum-exp."""
    case = in_its_dtype(attention_cases.SMALL, name)
    errors = attention_cases.run(case, HOST)
    limits = (attention_cases.TOLERANCES[op, case.dtype][0] for op in ("out", "lse"))
    return max(error / allowed for error, allowed in zip(errors, limits, strict=True))


def decode(name: str) -> float:
    """The largest error of out, log-sum-exp and scores."""
    case = in_its_dtype(decode_cases.SMALL | decode_cases.PROMPTS, name)
    # The largest probabilities of chosen keys, as OmniKV asks for them; else the sums, as H2O does.
    kind = "sum" if case.tokens is None else "max"
    errors = decode_cases.run(case, HOST, decode_cases.by_triton(case), kind)
    limit = decode_cases.TOLERANCES[case.dtype]
    return max(error / allowed for error, allowed in zip(errors, limit, strict=True))


def builders(name: str) -> float:
    """The largest error, or the number of wrong entries."""
    return builder_cases.error(name, HOST)


def faults_of_extremes() -> Iterator[str]:
    """Faults of bad numbers and huge logits in every op."""
    sizes = {"q_len": 70, "k_len": 140, "batch": 1}
    # A key that every query tile may see, and one that only the last does.
    plain = extremes.call("attention", "triton", form="no lists", **sizes)
    yield from extremes.reached(plain, ("value", 100, NAN), ("query", 35, NAN))
    cut = extremes.call("attention", "triton", form="parts", window=70, q_len=3, k_len=140, batch=1)
    yield from extremes.reached(cut, ("value", 139, -INF), ("key", 100, NAN))
    step = extremes.call("decode", "triton", q_len=6, k_len=140, batch=1)
    yield from extremes.reached(step, ("value", 137, NAN), ("key", 137, NAN))
    prompt = extremes.call("scores", "triton", **sizes)
    yield from extremes.reached(prompt, ("value", 100, NAN))
    for op in extremes.OPS:
        yield extremes.wrong_where_huge(op, "triton", 70, 3e9, torch.float32)


ERRORS = {"attention": attention, "decode": decode, "builders": builders}


def main(op: str, *names: str) -> None:
    torch.set_num_threads(1)
    result = {}
    if op == "kept":
        result["memory"] = reports()
    # torch.empty returns NaN from here.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    with memory_checked():
        if op == "kept":
            result["extremes"] = [fault for fault in faults_of_extremes() if fault]
            for kept, error in ERRORS.items():
                result[kept] = {name: error(name) for name in KEPT[kept]}
        else:
            result[op] = {name: ERRORS[op](name) for name in names}
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
