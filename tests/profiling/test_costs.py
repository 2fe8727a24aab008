"""The cost table: measured, resumed after a kill, read back as a function."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

import artifacts
from artifacts import HeadwiseError, SearchCost
from profiling import bench
from profiling.speed import cost_grid
from profiling.speed.cost_table import Cost, CostTable, attach, embed, embedded, load, save
from tests.artifacts.conftest import build, build_arrays

OPTIONS = "--length 256 320 --head-dims 64 --heads 3/1 --density 0.5 --repeats 1"


def test_a_killed_run_goes_on_where_it_was(tmp_path, monkeypatch):
    out = tmp_path / "cost.safetensors"
    asked = ["--costs", str(out), *OPTIONS.split()]
    measured = []
    whole = cost_grid.measure

    def dies_at_the_second(size, *args, **options):
        measured.append(size.length)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return whole(size, *args, **options)

    monkeypatch.setattr(cost_grid, "measure", dies_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        bench.main(asked)
    assert not out.exists()
    bench.main(asked)
    assert measured == [256, 320, 320]
    assert [path.name for path in tmp_path.iterdir()] == ["cost.safetensors"]
    table = load(out)
    kinds = ("a_shape", "vertical_slash", "block_sparse", "dense")
    assert {(c.pattern, c.length) for c in table.costs} == set(product(kinds, (256, 320)))
    for cost in table.costs:
        assert min(cost.sparse_seconds, cost.build_seconds, cost.dense_seconds) > 0
    assert "--length 256 320" in table.command and table.versions["torch"]


COST = Cost(
    pattern="block_sparse", dtype="bfloat16", length=4096, head_dim=64, heads=4, kv_heads=1,
    density=0.1, tiles=400, sparse_seconds=0.3, build_seconds=0.1, dense_seconds=4.0,
)  # fmt: skip


def test_seconds_follow_the_measurements():
    more = replace(COST, tiles=800, sparse_seconds=0.6)
    table = CostTable(device="d", backend="cpu", versions={}, command="", costs=(more, COST))
    at = {"length": 4096, "head_dim": 64, "dtype": "bfloat16"}

    def seconds(tiles, heads=4, **change):
        return table.seconds("block_sparse", tiles=tiles, heads=heads, **{**at, **change})

    assert seconds(400) == pytest.approx(0.4) and seconds(800) == pytest.approx(0.7)
    assert seconds(600) == pytest.approx(0.55)
    assert seconds(100) == pytest.approx(0.4) and seconds(1600) == pytest.approx(1.4)
    assert seconds(100, heads=1) == pytest.approx(0.1)
    # Twice the rows with as many tiles each.
    assert seconds(800, length=8192) == pytest.approx(0.8)
    assert table.dense_seconds(heads=2, **{**at, "length": 8192}) == pytest.approx(8.0)
    says = r"no a_shape with head dim 64 in bfloat16; it has: .*'block_sparse'"
    with pytest.raises(HeadwiseError, match=says):
        table.seconds("a_shape", tiles=1, heads=1, **at)
    with pytest.raises(HeadwiseError, match=r"has no a_shape .*; it has: nothing$"):
        replace(table, costs=()).seconds("a_shape", tiles=1, heads=1, **at)


HERE = CostTable(
    device="here", backend="cpu", versions={"torch": "2"}, command="measure",
    costs=(COST, replace(COST, pattern="dense", tiles=9), replace(COST, dtype="float32",
    length=8192)),
)  # fmt: skip
THERE = replace(HERE, device="there", costs=(COST,))


def test_round_trip_and_damage(tmp_path):
    path = tmp_path / "cost.safetensors"
    save(HERE, path)
    assert load(path) == HERE
    with pytest.raises(HeadwiseError, match="does not exist"):
        load(tmp_path / "no.safetensors")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(HeadwiseError, match="is not a cost table"):
        load(path)


def optimised_for(table: CostTable) -> tuple[artifacts.Artifact, dict[str, object]]:
    artifact = build()
    section, arrays = embed([table], optimised=table)
    cost = SearchCost(unit="seconds", device=table.device)
    search = artifact.search.model_copy(update={"cost": cost})
    made = artifact.model_copy(update={"search": search, "costs": section})
    return made, {**build_arrays(), **arrays}


def test_an_artifact_carries_tables_and_says_which_it_was_made_for(tmp_path):
    artifact, arrays = attach(*optimised_for(HERE), THERE)
    artifacts.save(artifact, tmp_path / "cfg.yaml", arrays)
    back, beside = artifacts.load_pair(tmp_path / "cfg.yaml")
    assert embedded(back, beside) == (HERE, THERE)
    assert [entry.optimised for entry in back.costs] == [True, False]
    assert build_arrays().keys() <= beside.keys()
    newer = replace(THERE, costs=(COST, replace(COST, tiles=1)))
    assert embedded(*attach(back, beside, newer)) == (HERE, newer)
    other = replace(THERE, backend="triton")
    assert embedded(*attach(back, beside, other)) == (HERE, THERE, other)
    says = "optimised for 'here' by the table that it carries: that one stays"
    with pytest.raises(HeadwiseError, match=says):
        attach(back, beside, replace(HERE, costs=(COST,)))


def test_arrays_that_are_no_table():
    artifact, arrays = optimised_for(HERE)
    bare = {name: array for name, array in arrays.items() if name != "cost.0.tiles"}
    more = arrays | {"cost.0.more": arrays["cost.0.tiles"]}
    beyond = arrays | {"cost.0.dtype": arrays["cost.0.dtype"] + 1}
    below = arrays | {"cost.0.pattern": arrays["cost.0.pattern"] - 1}
    for wrong, said in (
        (bare, r"costs\[0\]: a cost table has the columns"),
        (more, r"costs\[0\]: a cost table has the columns"),
        (beyond, "the column dtype names entry 2 of 2"),
        (below, "the column pattern names entry -1 of 2"),
    ):
        with pytest.raises(HeadwiseError, match=said):
            embedded(artifact, wrong)


def test_a_table_is_attached_by_command(tmp_path, capsys):
    cfg, table = tmp_path / "cfg.yaml", tmp_path / "cost.safetensors"
    artifacts.save(build(), cfg, build_arrays())
    save(THERE, table)
    bench.main(["--table", str(table), "--attach", str(cfg)])
    measured = tmp_path / "own.safetensors"
    bench.main(["--costs", str(measured), "--attach", str(cfg), *OPTIONS.split()])
    own = load(measured)
    assert embedded(*artifacts.load_pair(cfg)) == (THERE, own)
    assert f"carries the costs of there, {own.device}" in capsys.readouterr().out
    assert not any(entry.optimised for entry in artifacts.load(cfg).costs)
