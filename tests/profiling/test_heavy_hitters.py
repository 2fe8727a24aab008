"""What few tokens keep of attention, with its pictures and the arrays behind them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from artifacts import HeadwiseError
from profiling import heavy_hitters
from profiling.heavy_hitters import FILE, HeavyHitters, main, report
from profiling.models.loading import LoadedModel
from tests.profiling.conftest import tiny
from tests.profiling.tokenizers import byte_level


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=["llama", "gemma3"])
def loaded(request: Any, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    model, tokenizer = tiny(request.param), byte_level()
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    made = LoadedModel(model, tokenizer, request.param, None)
    monkeypatch.setattr(heavy_hitters, "load_model", lambda *args, **options: made)
    return made


def test_the_profile_and_its_pictures(loaded: LoadedModel, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "heavy"
    options = ["--model", "tiny", "--out", str(out), "--length", "200", "--dtype", "float32", "--task", "passkey"]
    assert main(options) == 0
    assert "budget  kept  by the worst KV head" in capsys.readouterr().out
    with safe_open(out / FILE, framework="numpy") as stored:
        about = json.loads(stored.metadata()["headwise"])
        arrays = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    assert about["model"] == loaded.name and "--length 200" in about["command"] and about["samples"] == 2
    shares, kept = arrays["heavy.shares"], arrays["heavy.kept"]
    assert kept.shape == arrays["heavy.error"].shape == (3, 2, len(shares))
    assert arrays["heavy.sparsity"].shape == (3, 4) and arrays["heavy.totals"].shape == (3, 200)
    measured = [0, 1, 2] if loaded.name == "llama" else [1]
    for name in ("heavy.kept", "heavy.error", "heavy.sparsity", "heavy.totals"):
        finite = np.isfinite(arrays[name]).reshape(3, -1)
        assert np.flatnonzero(finite.all(1)).tolist() == measured == np.flatnonzero(finite.any(1)).tolist(), name
    assert (np.diff(kept[measured], axis=-1) > 0).all() and (kept[measured] <= 1.001).all()
    totals = arrays["heavy.totals"][measured]
    np.testing.assert_allclose(totals.sum(1), 1, rtol=1e-5)
    assert (np.diff(totals, axis=1) <= 0).all()
    rows = list(csv.reader((out / "kept.csv").open()))
    assert rows[0][:3] == ["layer", "kv_head", f"{shares[0]:.6g}"] and len(rows) == 1 + 3 * 2
    table = np.array([[float(cell or "nan") for cell in row[2:]] for row in rows[1:]])
    np.testing.assert_allclose(table, kept.reshape(-1, len(shares)), rtol=1e-4)
    for name in ("sparsity", "totals", "kept"):
        assert (out / f"{name}.png").stat().st_size > 5_000 and (out / f"{name}.svg").is_file()


def test_the_report_names_the_worst_head() -> None:
    kept = np.full((3, 2, 2), 0.9)
    kept[2, 1, 0], kept[0] = 0.25, np.nan
    arrays = {
        "heavy.shares": np.array([0.1, 0.5]),
        "heavy.kept": kept,
        "heavy.sparsity": np.array([[np.nan] * 2, [0.8, 0.8], [0.6, 0.7]]),
        "heavy.totals": np.array([[np.nan] * 20, [0.05] * 20, [0.5, 0.5] + [0.0] * 18]),
    }
    text = report(arrays)
    assert "0.725 of all, least in layer 2 (0.650)" in text and "gets 0.550 of all" in text
    assert "0.1000  0.738  0.250 (2.1)" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"length": 63}, "--length must be at least 64"), ({"samples": 0}, "--samples must be"), ({"task": "x"}, "task")],
)
def test_what_cannot_be_measured_is_said_in_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(HeadwiseError, match=message):
        HeavyHitters(model="tiny", out=tmp_path, **changes)
