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


def test_three_files_with_a_line_for_each_head(tmp_path: Path) -> None:
    artifact, arrays = build_every_kind()
    arrays |= {
        f"chosen.{name}": np.full((5, 4), 0.5, dtype=np.float32) for name in ("error", "density")
    }
    artifacts.save(artifact, tmp_path / "cfg.yaml", arrays)
    png, svg, table = draw_pattern_map(tmp_path / "cfg.yaml", tmp_path / "map")
    assert png.read_bytes()[:4] == b"\x89PNG" and svg.read_text().startswith("<?xml")
    lines = list(csv.DictReader(table.open()))
    assert [(line["layer"], line["kind"]) for line in lines[4:8]] == [
        ("2", "dense"),
        ("2", "tri_shape"),
        ("2", "dilated"),
        ("2", "strided"),
    ]


@pytest.mark.parametrize(
    ("out", "stem"),
    [("x", "x"), ("x.png", "x"), ("x.svg", "x"), ("x.csv", "x"), ("model-1.5", "model-1.5")],
)
def test_a_file_that_is_asked_for_by_name_is_written(
    scored: Path, tmp_path: Path, out: str, stem: str
) -> None:
    paths = draw_pattern_map(scored, tmp_path / out)
    assert paths == [tmp_path / f"{stem}.{kind}" for kind in ("png", "svg", "csv")]
    assert all(path.is_file() for path in paths)


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


def test_a_name_is_no_formula_and_moves_no_cursor(
    scored: Path, tmp_path: Path, capsys: Any
) -> None:
    stem = tmp_path / "map\x1b[2J"
    assert main([str(scored), "--out", str(stem)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/map\\x1b[2J.{kind}" for kind in ("png", "svg", "csv")
    ]
    assert "\x1b" not in stem.with_name(f"{stem.name}.svg").read_text()


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


def test_no_stem_is_refused_in_one_line(scored: Path) -> None:
    with pytest.raises(artifacts.HeadwiseError, match="--out: give the stem"):
        main([str(scored), "--out", ""])


def test_an_artifact_without_scores_is_drawn_without_shades(tmp_path: Path) -> None:
    artifact, arrays = build_every_kind()
    artifacts.save(
        artifact,
        tmp_path / "cfg.yaml",
        arrays | {"chosen.recall": np.zeros((1, 1), dtype=np.float32)},
    )
    _, _, numbers = draw_pattern_map(tmp_path / "cfg.yaml", tmp_path / "map")
    with numbers.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows and all(row["recall"] == row["error"] == row["density"] == "" for row in rows)
    drawn = figure(artifact, None)
    (legend,) = drawn.legends
    assert not any("recall" in text.get_text() for text in legend.get_texts())


def test_kinds_that_shades_could_be_taken_for_carry_their_letter() -> None:
    artifact, arrays = build_every_kind()
    drawn = figure(artifact, arrays["chosen.recall"])
    letters = {text.get_position(): text.get_text() for text in drawn.axes[0].texts}
    assert letters == {(2, 1): "T", (2, 2): "L", (2, 3): "S", (3, 0): "F", (4, 2): "K", (4, 3): "M"}
    assert {kind for kind, record in RECORDS.items() if record.lettered} == {
        artifact.patterns[artifact.prefill.layers[x][y]].kind for x, y in letters
    }
    (legend,) = drawn.legends
    assert {"T: tri_shape 1", "vertical_slash 3", "sliding-window layer"} <= {
        t.get_text() for t in legend.get_texts()
    }
