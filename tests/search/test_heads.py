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
from search.published.search import HeadSearch, run
from tests import processes
from tests.processes import Process

LENGTH = 1000


def config(model: Path, out: Path, **changes: object) -> HeadSearch:
    settings = {
        "length": LENGTH,
        "budget": "0.6",
        "dtype": "float32",
        "calibration": "passkey",
        "command": "test",
    }
    return HeadSearch(model=str(model), out=out, **settings | changes)


@pytest.fixture(scope="module")
def found(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("found") / "cfg.yaml"
    run(config(tiny_model, out))
    return out


def test_writes_a_valid_pair_and_the_picture_and_nothing_else(found: Path) -> None:
    artifact = artifacts.load(found)
    assert artifact.sidecar is not None
    expected = {"cfg.yaml", artifact.sidecar.file, "cfg.png", "cfg.svg", "cfg.csv"}
    assert {path.name for path in found.parent.iterdir()} == expected
    assert artifact.prefill.dense_below == LENGTH // 2
    assert artifact.prefill.dense_tail == 0
    assert len((found.parent / "cfg.csv").read_text().splitlines()) == 1 + 3 * 6


def test_scores_are_what_the_artifact_has_on_the_prompt(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "cfg.yaml"
    run(config(tiny_model, out, dense_tail=64))
    artifact, arrays = artifacts.load_pair(out)
    loaded = load_model(str(tiny_model), dtype="float32")
    (prompt,) = make_prompts("passkey", loaded.tokenizer, length=LENGTH, samples=1, seed=0)
    expected = fidelity(loaded.model, artifact, prompt)
    for name in ("error", "recall", "density"):
        np.testing.assert_allclose(arrays[f"chosen.{name}"], getattr(expected, name), atol=1e-5)


def test_the_winner_has_the_smallest_error_and_keeps_to_the_budget(found: Path) -> None:
    artifact, arrays = artifacts.load_pair(found)
    errors = [
        values
        for name, values in arrays.items()
        if name.startswith("candidates") and name.endswith(".error")
    ]
    assert len(errors) == 6
    np.testing.assert_array_equal(arrays["chosen.error"], np.min(errors, axis=0))
    assert (
        0.5
        < artifact.search.summary.density
        <= arrays["chosen.density"].max()
        <= artifact.search.target_density
    )
    assert sum(artifact.search.summary.winners.values()) == 18


def test_same_command_and_seed_give_the_same_hash(
    found: Path, tiny_model: Path, tmp_path: Path
) -> None:
    again = run(config(tiny_model, tmp_path / "cfg.yaml"))
    assert again.content_sha256 == artifacts.load(found).content_sha256
    other = run(config(tiny_model, tmp_path / "other.yaml", seed=1))
    assert other.content_sha256 != again.content_sha256


@pytest.mark.slow
def test_killed_in_mid_search_goes_on_and_finds_the_same(
    found: Path, tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "cfg.yaml"
    resume = tmp_path / "cfg.yaml.heads.ledger"
    options = f"--preset paper --length {LENGTH} --budget 0.6 --dtype float32 --task passkey"
    words = ["--model", str(tiny_model), "--out", str(out), *options.split()]
    process = Process("search.heads", *words)
    while len(list(resume.glob("*.unit"))) < 1:
        assert process.code is None, "finished before it could be killed"
        time.sleep(0.002)
    process.kill()
    finished = len(list(resume.glob("*.unit")))
    assert not out.exists()
    if finished == 3:
        pytest.skip("it finished all layers before the kill reached it")
    code, _, said = processes.run("search.heads", *words)
    assert code == 0 and f"{finished} units are finished" in said
    assert artifacts.load(out).content_sha256 == artifacts.load(found).content_sha256
    assert not resume.exists()
