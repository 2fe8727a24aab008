"""What is read from machine code and worked out from it, by hand on small texts and on a compiled build."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from artifacts import HeadwiseError
from profiling import gpu_build
from profiling.gpu import builds, shapes, sources
from profiling.gpu.compiled import Build
from profiling.gpu.machine_code import Code, hot_loops, whole
from profiling.gpu.time_model import DEVICES, predict, programs

# Two loops side by side, of which the first is leaner, a narrow one, and one that multiplies more inside of another.
MACHINE = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   STL [R1], R2 ;
.L_x_1:
        /*0020*/              @!P3 LDGSTS.E.BYPASS.128 [R5], desc[UR4][R6.64] ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR12], RZ, !UPT ;
        /*0040*/                   MUFU.EX2 R3, R4 ;
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, R128, gdesc[UR12].tnspB, R24, gsb0 ;
        /*0060*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0070*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR12], RZ, !UPT ;
        /*0080*/                   LDL R9, [R1] ;
        /*0090*/                   DEPBAR.LE SB0, 0x2 ;
        /*00a0*/                   MUFU.EX2 R3, R4 ;
        /*00b0*/                   HGMMA.64x128x16.F32.BF16 R24, R128, gdesc[UR12].tnspB, R24, gsb0 ;
        /*00c0*/               @P1 BRA `(.L_x_2) ;
.L_x_3:
        /*00e0*/                   HGMMA.64x16x16.F32.BF16 R88, gdesc[UR12], RZ, !UPT ;
        /*00f0*/               @P1 BRA `(.L_x_3) ;
.L_x_5:
        /*00f1*/                   NOP ;
.L_x_6:
        /*00f2*/                   HGMMA.64x256x16.F32.BF16 R88, gdesc[UR12], RZ, !UPT ;
        /*00f3*/               @P1 BRA `(.L_x_6) ;
        /*00f4*/               @P1 BRA `(.L_x_5) ;
        /*0100*/                   EXIT ;
.L_x_7:
        /*0101*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6+0x30000], R219 ;
        /*0102*/              @!P1 BRA `(.L_x_7) ;
        /*0103*/                   BRA `(.L_x_2) ;
.L_x_4:
        /*0110*/                   BRA `(.L_x_4);
"""
BUILD = Build(shared=132_624, registers=238, spilled=0, assembly="", warps=8, machine=MACHINE)


def test_the_hot_loop_is_the_leanest_of_those_that_multiply_most() -> None:
    loop, second = hot_loops(MACHINE)
    # 64 x 16 with 64 x 16, both from shared memory, and 64 x 16 from registers with 128 x 16, 2 bytes each.
    assert loop == Code(
        instructions=5, tensor=2, exponentials=1, async_copies=1, bulk_copies=0, local=0, under_way=0, both_shared=1,
        shared_bytes=2 * 16 * (64 + 64 + 128),
    )  # fmt: skip
    assert (second.instructions, second.local, second.under_way) == (6, 1, 2)
    everything = whole(MACHINE)
    assert (everything.tensor, everything.local, everything.instructions) == (6, 2, 24)
    assert hot_loops("") == hot_loops(MACHINE.replace("HGMMA", "FFMA")) == []


def test_programs_that_fit_a_multiprocessor() -> None:
    # 65,536 registers and 228 KiB of shared memory, of which each program takes one more.
    assert programs(BUILD, "sm_90") == 1
    small = replace(BUILD, registers=128, warps=4, shared=30_000)
    assert programs(small, "sm_90") == 4
    assert programs(replace(small, shared=75_000), "sm_90") == 3
    assert programs(replace(small, registers=32, shared=0, warps=8), "sm_90") == 8


def test_the_model_by_hand() -> None:
    loop = Code(instructions=400, tensor=12, exponentials=32, async_copies=8, bulk_copies=0, local=0, under_way=2)
    found = predict(loop, BUILD, "sm_90", queries=128, keys=64, dim=128)
    # 4 * 128 * 64 * 128 operations at 4,096 a cycle; 400 instructions of 8 warps, 4 a cycle; 8,192 exponentials.
    assert found.cycles["tensor cores"] == 1024 and found.cycles["issue"] == 800
    assert found.cycles["exponentials"] == 512
    assert found.cycles["L2"] == pytest.approx(2 * 2 * 64 * 128 / (5120 / 132))
    assert found.bound == "products, then softmax" and found.cycles[found.bound] == 1824
    assert found.flops == pytest.approx(DEVICES["sm_90"].flops * 1024 / 1824)
    # Two programs hide each other's softmax: the tensor cores are what is left.
    two = predict(loop, replace(BUILD, registers=120, shared=60_000), "sm_90", queries=128, keys=64, dim=128)
    assert two.bound == "tensor cores" and two.flops == DEVICES["sm_90"].flops
    # 128 bytes a cycle: what both warp groups multiply, and the step's keys and values.
    assert found.cycles["shared memory"] == 2 * 2 * 64 * 128 / 128
    crowded = predict(replace(loop, shared_bytes=2**18), BUILD, "sm_90", queries=128, keys=64, dim=128)
    assert crowded.bound == "shared memory" and crowded.cycles["shared memory"] == 2 * 2**18 / 128 + 256
    waiting = predict(replace(loop, under_way=0), BUILD, "sm_90", queries=128, keys=64, dim=128)
    assert waiting.bound == "waiting for copies"
    assert waiting.cycles[waiting.bound] == pytest.approx(1824 + 2 * 262 + found.cycles["L2"])


def test_layers_by_hand() -> None:
    """On an H100 whose loops reach 500 and 250 TF/s."""
    rows: dict[str, Any] = {
        f"sm_90 128 attention: {name}": {"attention": {"predicted": {"flops": flops}}}
        for name, flops in (("diagonals, columns", 500e12), ("lists", 250e12))
    }
    assert shapes.of_builds({}) == {"prefill": [], "decode": []} and list(shapes.lines(shapes.of_builds({}))) == []
    found = shapes.of_builds(rows)
    by = {(row["pattern"], row["tokens"]): row for row in found["prefill"]}
    # 128 rows of tiles at 8K: A-shape's 16 + 64 + 1 tiles, block-sparse's 100, or as many as there are.
    for pattern, most, flops in (("a_shape", 81, 500e12), ("block_sparse", 100, 250e12)):
        tiles = most * (most + 1) / 2 + (128 - most) * most
        assert by[pattern, 8192]["seconds"] == pytest.approx(32 * tiles * 4 * 64 * 64 * 128 / flops)
        assert by[pattern, 8192]["density"] == pytest.approx(tiles / (128 * 129 / 2))
    assert all(row["bound"] == "its loop" for row in found["prefill"]) and len(by) == len(found["prefill"]) == 12
    # Queries, output, keys and values: what no loop can be faster than.
    rows["sm_90 128 attention: lists"]["attention"]["predicted"]["flops"] = 1e18
    slow = next(row for row in shapes.of_builds(rows)["prefill"] if row["pattern"] == "block_sparse")
    assert slow["bound"] == "memory" and slow["seconds"] == 2 * 40 * 8192 * 128 * 2 / 3.35e12
    token = found["decode"][0]
    assert token["seconds"] == 8192 * 4096 / 3.35e12 and token["chosen_seconds"] == token["seconds"] / 4
    first, second = shapes.lines(found)
    assert len(first) == 13 and len(second) == 5 and len({len(line) for line in first}) == 1


@pytest.mark.slow
def test_what_is_known_of_a_build_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    (name,) = (name for name in builds.names(["sm_90"], [128]) if name.endswith("a serving engine"))
    facts = builds.run(name)["attention"]
    assert facts["wgmma"] and facts["spilled"] == 0 and facts["programs"] >= 1
    loop = facts["loop"]
    assert loop["tensor"] and loop["async_copies"] + loop["bulk_copies"] and loop["exponentials"]
    assert loop["local"] == 0 and loop["under_way"] > 0
    assert 0 < facts["predicted"]["flops"] <= DEVICES["sm_90"].flops
    monkeypatch.setattr(builds, "names", lambda *_, **__: [name])
    to = tmp_path / "builds.json"
    assert gpu_build.main(["--target", "sm_90", "--json", str(to)]) == 0
    assert json.loads(to.read_text())["rows"] == {name: {"attention": facts}}


def facts(**changes: Any) -> dict[str, dict[str, Any]]:
    loop = {"local": 0, "both_shared": 8, "tensor": 16}
    one: dict[str, Any] = {
        "registers": 200,
        "spilled": 0,
        "shared": 1000,
        "warps": 4,
        "launch": {"stages": 2},
    } | changes
    one["loop"] = None if changes.get("loop", {}) is None else loop | changes.get("loop", {})
    return {"sm_90 128 attention: lists": {"attention": one}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"spilled": 8}, "8 bytes spilled at 200 registers"),
        ({"loop": {"local": 1}}, "its hot loop reads or writes local memory"),
        (
            {"loop": {"async_copies": 8, "under_way": 0}, "launch": {"stages": 3}},
            "its hot loop waits for each copy that it starts",
        ),
        *(
            ({"loop": loop}, "not wgmma of queries and keys in shared memory, and of weights in registers")
            for loop in ({"both_shared": 0}, {"both_shared": 16})
        ),
        ({"loop": None}, "no loop multiplies, the compiler gave up"),
        ({"shared": 10**6}, "1000000 bytes of shared memory, the device has 232448"),
    ],
)
def test_what_a_build_must_not_have_is_said(changes: dict[str, Any], said: str) -> None:
    assert list(gpu_build.faults(facts())) == []
    assert list(gpu_build.faults(facts(**changes))) == [f"sm_90 128 attention: lists attention: {said}"]


def test_a_build_that_fails_costs_itself_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ((fine, kernels),) = facts().items()

    def run(name: str) -> dict[str, Any]:
        if name == "sm_90 128 builders:":
            raise RuntimeError("ptxas died\nof a cold")
        return kernels

    monkeypatch.setattr(builds, "names", lambda *_, **__: ["sm_90 128 builders:", fine])
    monkeypatch.setattr(builds, "run", run)
    assert gpu_build.main([]) == 3
    said = capsys.readouterr().out
    assert "WRONG  sm_90 128 builders: RuntimeError: ptxas died of a cold" in said and f"| {fine} |" in said
    assert sources.digest() in said


def test_mistakes_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HeadwiseError, match="--head-dims must be from 16 to 512, got 8"):
        gpu_build.main(["--head-dims", "8"])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(HeadwiseError, match="TRITON_INTERPRET is 1"):
        gpu_build.main([])
