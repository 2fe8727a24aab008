"""Triton's kernels compile for every target: no spills, shared memory that fits."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.attention import AttentionCall
from kernels.attention import triton as backend
from kernels.attention.triton_launch import serves
from kernels.decode import DecodeCall
from kernels.decode import triton as decode
from kernels.index import SparseIndex, lists
from kernels.logits import Logits
from kernels.patterns import LayerPlan, make
from kernels.patterns import triton as builders
from kernels.ragged import Ragged
from kernels.topk import TopKCall
from kernels.triton_calls import KernelCall
from tests.conformance import attention_cases, decode_cases
from tests.conformance.attention_cases import square
from tests.conformance.tensors import paged
from tests.kernels.compiling import TARGETS, compiled
from tests.kernels.recording import recorded
from tests.sampling import sampled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted in this process"
    ),
]
HOST = torch.device("cpu")
HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def triton():
    pytest.importorskip("triton", reason="triton is not installed")


def architecture(target: str) -> str:
    """The target as launches know it."""
    return "hip" if target.startswith("gfx") else target


def attention(**more: Any) -> attention_cases.Case:
    return square(448, **{"heads": 4, "kv_heads": 2, "index": "random:2,0,90"} | more)


_SERVING = {"dense_tail": 64, "ragged": Ragged.left_padded([448], 448, 448), "page": 16}
_SKIPPING = {"index": "random:7,0,0", "skip": -3.0}
# Parts of an index other than its own tiles, and the layout of K and V. Lists run one query tile
# per program.
VARIANTS = {
    "diagonals": attention(index="random:2,0,0"),
    "diagonals, columns": attention(),
    "lists": attention(index="random:1,2,0"),
    "diagonals, lists, columns": attention(index="random:2,2,90"),
    "diagonals, columns, pages of 64": attention(page=64),
    "lists, tail": attention(index="random:1,2,0", dense_tail=64),
    "diagonals, columns, window": attention(window=100),
    "diagonals, columns, ragged": attention(ragged=_SERVING["ragged"]),
    "skipping": attention(**_SKIPPING),
    "parts of the keys": attention(splits=4),
    "a serving engine": attention(**_SERVING),
    "a serving engine, skipping": attention(**_SERVING, **_SKIPPING),
    "a serving engine, fp8": attention(**_SERVING, cache=torch.float8_e4m3fn),
    "everything": attention(**_SERVING, index="random:2,2,90", window=100, softcap=30.0),
}
PAIRED = "diagonals, columns"
SERVING = "a serving engine"
BUILDS = [
    *[("sm_90", dim, PAIRED, HALF) for dim in (64, 80, 96, 128, 256)],
    *[("sm_90", 128, name, HALF) for name in VARIANTS if name != PAIRED],
    *[(target, 128, SERVING, HALF) for target in ("sm_80", "sm_100", "gfx942")],
    *[(target, dim, PAIRED, HALF) for target in TARGETS if target != "sm_90" for dim in (64, 256)],
    ("sm_90", 128, PAIRED, torch.float16),
    ("sm_90", 64, "diagonals", torch.float32),
    ("sm_90", 64, "a serving engine, fp8", torch.float32),
    ("sm_90", (192, 128), PAIRED, HALF),
]
# Builds that spill outside of their loops: 8 bytes on sm_90, 16 on sm_80.
SPILLING = {("sm_90", 128, "diagonals, columns, ragged"), ("sm_80", 128, SERVING)}


def sized(case: Any, dim: int | tuple[int, int], dtype: torch.dtype) -> Any:
    """The case with heads of this dim, or of these dims of keys and of values."""
    head_dim, v_dim = dim if isinstance(dim, tuple) else (dim, dim)
    return replace(case, head_dim=head_dim, v_dim=v_dim, dtype=dtype)


def launched(target: str, case: attention_cases.Case) -> list[KernelCall]:
    """The launches of a call: tables, attention, and the merge of parts."""
    problem = attention_cases.problem(case, HOST)
    with recorded(architecture(target)) as calls:
        call = AttentionCall(problem.q, problem.k, problem.v, problem.index, **problem.rest)
        backend.run(call, splits=case.splits)
    return calls


@pytest.mark.parametrize(
    ("target", "dim", "variant", "dtype"), sampled(BUILDS, ("sm_90", 64, PAIRED, HALF))
)
def test_attention(target, dim, variant, dtype, request):
    if (target, dim, variant) in SPILLING:
        request.applymarker(pytest.mark.xfail(reason="spills a few bytes outside of its loops"))
    case = sized(VARIANTS[variant], dim, dtype)
    assert compiled(launched(target, case)[1], target).fault(target, dtype) is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("dim", "dtype"), [(512, HALF), (128, torch.float32), (256, torch.float32)]
)
def test_supported_attention_fits_the_device(target, dim, dtype):
    """Beyond 256, and in float32, registers may spill."""
    case = sized(VARIANTS[PAIRED], dim, dtype)
    built = compiled(launched(target, case)[1], target)
    fits = built.shared <= TARGETS[target][1] and not built.empty
    assert fits == serves(architecture(target), dim=dim, itemsize=dtype.itemsize)


def of_builders(
    target: str, dim: int, window: int | None, page: int | None
) -> dict[str, list[KernelCall]]:
    """Launches that make a layer's index, by kernel."""
    q = torch.zeros(1, 8, 256, dim, dtype=HALF)
    k = torch.zeros(1, 2, 16_640, dim, dtype=HALF)
    how = {"window": window}
    if page is not None:
        k, how["block_table"] = paged(k, page)
        how["k_len"] = 16_640
    calls = {}
    for last_q, coverage in ((64, None), (128, 0.9)):
        patterns = [
            *[make("vertical_slash", vertical=50, slash=50, last_q=last_q)] * 2,
            make("block_sparse", blocks=9),
            make("block_sparse", blocks=9, coverage=coverage),
        ]
        with recorded(architecture(target)) as builds:
            LayerPlan(patterns * 2, 2).build(q, k, **how)
        calls |= {(call.kernel, *call.constants.values()): call for call in builds}
    result = {}
    for (name, *_), call in calls.items():
        result.setdefault(name, []).append(call)
    return result


@pytest.mark.parametrize(
    ("target", "dim", "window", "page"),
    sampled(
        [
            *((target, 128, None, page) for target in TARGETS for page in (None, 64, 16)),
            *(("sm_90", 256, None, page) for page in (None, 16)),
            *(("sm_90", 80, 9, page) for page in (None, 128)),
        ],
        ("sm_90", 80, 9, 128),
    ),
)
def test_estimate(target, dim, window, page):
    calls = of_builders(target, dim, window, page)
    assert len(calls) == 4
    for name in ("normalisers_kernel", "masses_kernel"):
        for call in calls[name]:
            assert compiled(call, target).fault(target, HALF) is None, name


@pytest.mark.parametrize(
    ("target", "kernel", "dim", "page"),
    sampled(
        [
            *((target, "select_kernel", 64, None) for target in TARGETS),
            *((target, "means_kernel", dim, None) for target in TARGETS for dim in (64, 80, 256)),
            *((target, "means_kernel", 128, page) for target in TARGETS for page in (16, 64)),
        ],
        ("gfx942", "means_kernel", 256, None),
    ),
)
def test_selection(target, kernel, dim, page):
    for call in of_builders(target, dim, None, page)[kernel]:
        assert compiled(call, target).excess(target, HALF) is None


@pytest.mark.parametrize("target", sampled(list(TARGETS), "sm_90"))
def test_tables_and_top_k_of_mixed_sizes(target):
    entries = torch.zeros(1, 4, 2, dtype=torch.int32)
    tiles = lists(torch.zeros(1, 4, 4, 1, dtype=torch.int32))
    index = SparseIndex(q_len=256, k_len=256, diagonals=entries, **tiles, columns=entries)
    scores, lengths = torch.empty(3, 16_385), torch.empty(3, dtype=torch.int32)
    call = TopKCall(scores, 50, ends=lengths, counts=lengths)
    _, choice = builders.top_k(call)
    for call in (backend.tables(index, 2, None, alone=(1,)), choice):
        assert compiled(call, target).excess(target, HALF) is None, call.kernel


def step(**more: Any) -> decode_cases.Case:
    return decode_cases.Case(**{"k_len": 2048, "heads": 8, "kv_heads": 2, "chosen": 512} | more)


BOUNDS = {"starts": (1,), "ends": (1,)}
# A call, and the scores that it asks for.
STEPS = {
    "all keys": (step(), "none"),
    "tokens, scores": (step(tokens="shared"), "sum"),
    "tokens, pages of 16, bounds, window, soft-cap, scores": (
        step(tokens="shared", page=16, window=100, softcap=30.0, **BOUNDS),
        "max",
    ),
    "pages of 64, bounds": (step(page=64, **BOUNDS), "none"),
    "64 rows": (step(q_len=16), "none"),
    "64 rows, tokens, pages of 16, scores": (step(q_len=16, tokens="shared", page=16), "sum"),
    "a prompt": (step(q_len=256, k_len=256), "sum"),
    "a prompt, soft-cap": (step(q_len=256, k_len=256, softcap=30.0), "sum"),
}
SCORED = "tokens, pages of 16, bounds, window, soft-cap, scores"
WIDEST = "64 rows, tokens, pages of 16, scores"
DECODE_BUILDS = [
    *[("sm_90", 128, name, HALF) for name in STEPS],
    *[(target, 128, SCORED, torch.float16) for target in ("sm_80", "sm_100", "gfx942")],
    *[(target, 256, WIDEST, HALF) for target in TARGETS],
    *[(target, dim, "a prompt", HALF) for target in TARGETS for dim in (64, 80, 128, 256, 512)],
    ("sm_80", 64, WIDEST, HALF),
    ("sm_90", 80, SCORED, HALF),
    ("sm_90", 64, "all keys", torch.float32),
    ("sm_90", (192, 128), "all keys", HALF),
]


@pytest.mark.parametrize(
    ("target", "dim", "name", "dtype"),
    sampled(
        DECODE_BUILDS, ("sm_90", 128, SCORED, HALF), ("sm_90", 128, "a prompt, soft-cap", HALF)
    ),
)
def test_decode(target, dim, name, dtype):
    case, scores = STEPS[name]
    case = sized(case, dim, dtype)
    qkv, rest, _ = decode_cases.problem(case, HOST)
    with recorded(architecture(target)) as calls:
        decode_cases.serve(decode)(*qkv, **rest, scores=scores)
    if name.startswith("a prompt"):
        assert compiled(calls[-1], target).fault(target, dtype) is None
        return
    # Four words spilled are the compiler's choice.
    builds = {call.kernel: compiled(call, target) for call in calls}
    for kernel, build in builds.items():
        assert build.excess(target, dtype, spilled=16) is None, kernel
    split = builds["split_kernel"]
    units = ("mma.sync", "wgmma", "tcgen05.mma", "v_mfma")
    assert dtype == torch.float32 or any(unit in split.assembly for unit in units)
    assert split.waits(target) is None


def test_growing_cache_triggers_no_compilation():
    """Sizes that change each step are neither constants nor specialized on divisibility."""

    def launches(length, chosen):
        q = torch.empty(2, 6, 1, 64)
        k = torch.empty(2, 2, length, 64)
        tokens = torch.zeros(2, chosen, dtype=torch.int32)
        logits = Logits(window=length, scale=1.0)
        call = DecodeCall(q, k, k, tokens=tokens, logits=logits, scores="sum")
        return decode.prepare(call)[0]

    for before, after in zip(launches(1024, 512), launches(4097, 701), strict=True):
        assert before.constants == after.constants and before.options == after.options
        for parameter in before.function.params:
            values = [launch.arguments.get(parameter.name) for launch in (before, after)]
            changes = isinstance(values[0], int) and values[0] != values[1]
            if changes and not parameter.do_not_specialize:
                assert all(value % 16 == 0 for value in values), parameter.name
