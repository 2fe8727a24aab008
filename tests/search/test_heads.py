"""headwise search as its users run it, on a tiny model."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import artifacts
from profiling.inside.head_fidelity import fidelity
from profiling.models.loading import load_model
from profiling.prompts.prompt import make_prompts
from search.heads import main
from search.published.search import HeadSearch, run
from tests.processes import Process
from tests.search.conftest import PUBLISHED


def test_writes_a_pair_and_the_picture_and_scores_are_what_the_artifact_has_on_the_prompt(
    tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "cfg.yaml"
    run(HeadSearch(model=str(tiny_model), out=out, dense_tail=64, **PUBLISHED))
    artifact, arrays = artifacts.load_pair(out)
    expected = {"cfg.yaml", artifact.sidecar.file, "cfg.png", "cfg.svg", "cfg.csv"}
    assert {path.name for path in tmp_path.iterdir()} == expected
    assert len(out.with_suffix(".csv").read_text().splitlines()) == 1 + 3 * 6
    loaded = load_model(str(tiny_model), dtype="float32")
    (prompt,) = make_prompts("passkey", loaded.tokenizer, length=1000, samples=1, seed=0)
    measured = fidelity(loaded.model, artifact, prompt)
    for name in ("error", "recall", "density"):
        np.testing.assert_allclose(arrays[f"chosen.{name}"], getattr(measured, name), atol=1e-5)


def test_the_winner_has_the_smallest_error_and_keeps_to_the_budget(by_head: Path) -> None:
    artifact, arrays = artifacts.load_pair(by_head)
    errors = [
        values
        for name, values in arrays.items()
        if name.startswith("candidates") and name.endswith(".error")
    ]
    assert len(errors) == 6
    assert (artifact.prefill.dense_below, artifact.prefill.dense_tail) == (500, 0)
    np.testing.assert_array_equal(arrays["chosen.error"], np.min(errors, axis=0))
    assert 0.5 < artifact.search.summary.density <= arrays["chosen.density"].max()
    assert arrays["chosen.density"].max() <= artifact.search.target_density
    assert sum(artifact.search.summary.winners.values()) == 18


@pytest.mark.slow
def test_killed_in_mid_search_goes_on_and_finds_the_same(
    by_head: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cfg.yaml"
    resume = tmp_path / "cfg.yaml.heads.ledger"
    options = "--preset paper --length 1000 --budget 0.6 --dtype float32 --task passkey"
    words = ["--model", str(tiny_model), "--out", str(out), *options.split(), "--no-picture"]
    process = Process("search.heads", *words)
    while len(list(resume.glob("*.unit"))) < 1:
        assert process.code is None, "finished before it could be killed"
        time.sleep(0.002)
    process.kill()
    finished = len(list(resume.glob("*.unit")))
    assert not out.exists()
    if finished == 3:
        pytest.skip("it finished all layers before the kill reached it")
    assert main(words) == 0 and f"{finished} units are finished" in capsys.readouterr().err
    assert artifacts.load(out).content_sha256 == artifacts.load(by_head).content_sha256
    assert not resume.exists()
