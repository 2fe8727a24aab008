"""The picture of an artifact: a colour for each kind, a letter where shades are alike."""

from __future__ import annotations

import csv
import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import artifacts
from artifacts.schema.patterns import RECORDS
from profiling.pattern_map import draw_pattern_map, figure, main
from tests.artifacts.conftest import build_every_kind


@pytest.fixture
def scored(tmp_path: Path) -> Path:
    """An artifact with scores, of a model whose name is a broken formula and moves the cursor."""
    artifact, arrays = build_every_kind()
    arrays |= {
        f"chosen.{name}": np.full((5, 4), 0.5, dtype=np.float32) for name in ("error", "density")
    }
    named = artifact.model_copy(
        update={"model": artifact.model.model_copy(update={"name": "$\\frac{a$ \x1b[2J"})}
    )
    artifacts.save(named, tmp_path / "cfg.yaml", arrays)
    return tmp_path / "cfg.yaml"


@pytest.mark.usefixtures("sketched")
def test_three_files_with_a_line_for_each_head(scored: Path, tmp_path: Path) -> None:
    for out, stem in (("x", "x"), ("y.png", "y"), ("model-1.5", "model-1.5")):
        paths = draw_pattern_map(scored, tmp_path / out)
        assert paths == [tmp_path / f"{stem}.{kind}" for kind in ("png", "svg", "csv")]
    png, svg, table = paths
    assert png.is_file() and svg.is_file()
    lines = list(csv.DictReader(table.open()))
    kinds = [(line["layer"], line["kind"]) for line in lines[4:8]]
    assert kinds == [("2", kind) for kind in ("dense", "tri_shape", "dilated", "strided")]


def test_a_name_is_no_formula_and_moves_no_cursor(
    scored: Path, tmp_path: Path, capsys: Any
) -> None:
    stem = tmp_path / "map\x1b[2J"
    assert main([str(scored), "--out", str(stem)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == [f"{tmp_path}/map\\x1b[2J.{kind}" for kind in ("png", "svg", "csv")]
    assert "\x1b" not in stem.with_name(f"{stem.name}.svg").read_text()
    with pytest.raises(artifacts.HeadwiseError, match="--out: give the stem"):
        main([str(scored), "--out", ""])


@pytest.mark.usefixtures("sketched")
def test_a_full_disk_leaves_nothing(
    scored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(
        artifacts.HeadwiseError, match=r"cannot write '.*map\.png': no space left on device"
    ):
        draw_pattern_map(scored, tmp_path / "map")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.usefixtures("sketched")
def test_an_artifact_without_scores_is_drawn_without_shades(tmp_path: Path) -> None:
    artifact, arrays = build_every_kind()
    arrays |= {"chosen.recall": np.zeros((1, 1), dtype=np.float32)}
    artifacts.save(artifact, tmp_path / "cfg.yaml", arrays)
    _, _, numbers = draw_pattern_map(tmp_path / "cfg.yaml", tmp_path / "map")
    rows = list(csv.DictReader(numbers.open(newline="")))
    assert rows and all(row["recall"] == row["error"] == row["density"] == "" for row in rows)


def test_kinds_that_shades_could_be_taken_for_carry_their_letter() -> None:
    artifact, arrays = build_every_kind()
    drawn = figure(artifact, arrays["chosen.recall"])
    letters = {text.get_position(): text.get_text() for text in drawn.axes[0].texts}
    assert letters == {(2, 1): "T", (2, 2): "L", (2, 3): "S", (3, 0): "F", (4, 2): "K", (4, 3): "M"}
    assert {kind for kind, record in RECORDS.items() if record.lettered} == {
        artifact.patterns[artifact.prefill.layers[x][y]].kind for x, y in letters
    }
