"""The cost table: measured, resumed after a kill, read back as a function."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from artifacts import HeadwiseError
from profiling import kernels
from profiling.cost_table import Cost, CostTable, load, save

OPTIONS = ["--lengths", "256", "320", "--head-dims", "64", "--heads", "3/1", "--densities", "0.5", "--repeats", "1"]


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "cost.safetensors"
    measured = []
    whole = kernels.measure

    def dies_at_the_second(size, *args, **options):
        measured.append(size.length)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return whole(size, *args, **options)

    monkeypatch.setattr(kernels, "measure", dies_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        kernels.main(["--out", str(out), *OPTIONS])
    assert not out.exists()
    kernels.main(["--out", str(out), *OPTIONS])
    assert measured == [256, 320, 320]
    assert [path.name for path in tmp_path.iterdir()] == ["cost.safetensors"]
    table = load(out)
    assert {c.length for c in table.costs} == {256, 320} and table.backend in ("cpu", "reference")
    assert {c.pattern for c in table.costs} == {"a_shape", "vertical_slash", "block_sparse", "dense"}
    assert all(c.sparse_seconds > 0 and c.build_seconds > 0 and c.dense_seconds > 0 for c in table.costs)
    assert "--lengths 256 320" in table.command and table.versions["torch"]


def test_a_run_with_other_settings_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "cost.safetensors"

    def dies(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "measure", dies)
    with pytest.raises(KeyboardInterrupt):
        kernels.main(["--out", str(out), *OPTIONS])
    with pytest.raises(HeadwiseError, match=r"its repeats is 1, not 2; .* pass --fresh"):
        kernels.main(["--out", str(out), *OPTIONS[:-1], "2"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "tpu"], "cannot use the device 'tpu'"),
        (["--head-dims", "0"], "head dim must be at least 1, got 0"),
        (["--lengths", "100"], "lengths must be at least 256 tokens, got 100"),
        (["--densities", "0"], "densities must be above 0 and at most 1, got 0.0"),
        (["--repeats", "0"], "repeats must be at least 1, got 0"),
    ],
)
def test_bad_input_is_one_line(options: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(HeadwiseError, match=message):
        kernels.main(["--out", str(tmp_path / "cost.safetensors"), *options])
    assert not list(tmp_path.iterdir())


COST = Cost(
    pattern="block_sparse", dtype="bfloat16", length=4096, head_dim=64, heads=4, kv_heads=1,
    density=0.1, tiles=400, sparse_seconds=0.3, build_seconds=0.1, dense_seconds=4.0,
)  # fmt: skip


def test_seconds_follow_the_measurements() -> None:
    more = replace(COST, tiles=800, sparse_seconds=0.6)
    table = CostTable(device="d", backend="cpu", versions={}, command="", costs=(more, COST))
    at = {"length": 4096, "head_dim": 64, "dtype": "bfloat16"}

    def seconds(tiles: float, heads: int = 4, **change: object) -> float:
        return table.seconds("block_sparse", tiles=tiles, heads=heads, **{**at, **change})  # type: ignore[arg-type]

    assert seconds(400) == pytest.approx(0.4) and seconds(800) == pytest.approx(0.7)
    assert seconds(600) == pytest.approx(0.55)
    assert seconds(100) == pytest.approx(0.4) and seconds(1600) == pytest.approx(1.4)
    assert seconds(100, heads=1) == pytest.approx(0.1)
    # Twice the rows with as many tiles each.
    assert seconds(800, length=8192) == pytest.approx(0.8)
    assert table.dense_seconds(heads=2, **{**at, "length": 8192}) == pytest.approx(8.0)  # type: ignore[arg-type]
    with pytest.raises(HeadwiseError, match=r"no a_shape with head dim 64 in bfloat16; it has: .*'block_sparse'"):
        table.seconds("a_shape", tiles=1, heads=1, **at)  # type: ignore[arg-type]


def test_round_trip_and_damage(tmp_path: Path) -> None:
    path = tmp_path / "cost.safetensors"
    table = CostTable(device="d", backend="cpu", versions={"torch": "2"}, command="c", costs=(COST,))
    save(table, path)
    assert load(path) == table
    with pytest.raises(HeadwiseError, match="does not exist"):
        load(tmp_path / "no.safetensors")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(HeadwiseError, match="is not a cost table"):
        load(path)
