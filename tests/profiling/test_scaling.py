"""Scaling: a law that is put in comes out, what is measured is kept, and what cannot be is one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from artifacts import HeadwiseError
from profiling import scaling
from tests.search.conftest import save_tiny


@pytest.mark.parametrize("exponent", [0.4, 1.0])
def test_a_law_that_was_put_in_is_found(exponent: float) -> None:
    lengths, densities = [1448, 2896, 5793, 11585], [0.09, 0.15, 0.25, 0.4, 0.7]
    budget = np.array(densities)[:, None] * np.array(lengths)
    law = (np.array(lengths) ** exponent / budget) ** 1.5
    noise = np.exp(np.random.default_rng(3).normal(0, 0.05, (6, 1, 1)))
    found = scaling.fitted(law * noise, densities, lengths)
    assert found.low is not None and found.high is not None and found.low <= found.exponent <= found.high
    assert found.exponent == pytest.approx(exponent, abs=0.03) == pytest.approx(np.mean(found.exponents))
    assert np.interp(-np.log(found.target), -np.log((law * noise).mean(0)[:, 2]), densities) > 0
    # Two tiles are computed at the least: less is no budget.
    assert min(scaling.fitted(law * noise, [density / 50 for density in densities], lengths).budgets) > 127.999
    with pytest.raises(HeadwiseError, match="no loss was reached at every length: measure more densities"):
        scaling.fitted(np.array([[[1.0, 0.1], [0.5, 0.05]]]), [0.1, 0.2], [1000, 2000])


def test_an_interval_is_students_over_prompts_and_of_two_there_is_none() -> None:
    lengths, densities = [1448, 2896, 5793, 11585], [0.09, 0.15, 0.25, 0.4, 0.7]
    budget = np.array(densities)[:, None] * np.array(lengths)
    powers = (0.5, 0.6, 0.7, 0.9)
    laws = np.stack([(1000 * (np.array(lengths) / 4000) ** power / budget) ** 1.5 for power in powers])
    found = scaling.fitted(laws, densities, lengths)
    assert found.exponents == pytest.approx(powers, abs=0.02)
    # Student's t of 3 degrees of freedom is 3.182.
    half = 3.182 * float(np.std(found.exponents, ddof=1)) / 2
    assert (found.low, found.high) == pytest.approx((found.exponent - half, found.exponent + half), rel=1e-3)
    # One prompt that had no KL at all lengths alike has no power, and the others keep theirs.
    apart = np.where(np.arange(4) > 1, 1e-4, 1e2) * np.ones((1, len(densities), 4))
    more = scaling.fitted(np.concatenate([laws * 1e4, apart]), densities, lengths)
    assert len(more.exponents) == 4
    two = scaling.fitted(laws[:2], densities, lengths)
    assert two.low is two.high is None and two.exponent == pytest.approx(0.55, abs=0.02)


def test_octaves_end_where_the_prompt_does() -> None:
    assert scaling.octaves(16384) == [(1024, 2048), (2048, 4096), (4096, 8192), (8192, 16384)]


def test_it_measures_draws_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = save_tiny(tmp_path / "tiny", max_position_embeddings=4096), tmp_path / "out.json"
    words = ["--model", str(model), "--length", "4096", "--samples", "2", "--density", "0.1", "0.5", "--places", "64"]
    words += ["--dtype", "float32", "--out", str(out)]
    assert scaling.main(words) == 0
    record = json.loads(out.read_text())
    kl = np.array(record["kl"])
    assert kl.shape == (2, 2, 2) and (kl[:, 0] > kl[:, 1]).all() and (kl > 0).all()
    assert 1400 < record["lengths"][0] < 1500 and record["low"] is None and len(record["exponents"]) == 2
    assert (tmp_path / "out.png").exists() and (tmp_path / "out.svg").exists()
    assert "(2 prompts, too few for an interval)" in capsys.readouterr().out
    monkeypatch.setattr(scaling, "choosing", None)
    assert scaling.main(words) == 0 and json.loads(out.read_text()) == record


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (("--length", "1000"), "--length must be at least 4096, got 1000"),
        (("--samples", "1"), "--samples must be at least 2, got 1"),
        (("--density", "0.1", "1.5"), "--density must be at least two values between 0 and 1, got 0.1 1.5"),
    ],
)
def test_bad_use(tmp_path: Path, more: tuple[str, ...], line: str) -> None:
    with pytest.raises(HeadwiseError, match=line):
        scaling.main(["--model", "none", "--out", str(tmp_path / "x.json"), *more])
    assert not list(tmp_path.iterdir())
