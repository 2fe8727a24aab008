"""python -m search.gate: what passes, what does not, and how that is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import artifacts
from artifacts import HeadwiseError, Prefill
from profiling.models.loading import load_model
from runtime.fingerprint import fingerprint
from search.common.check import Gate, run
from search.gate import main
from search.model.gate import Limits

LENGTH = 700
WIDE, NARROW = artifacts.Dense(), artifacts.AShape(sink=64, window=64)


def artifact_of(model: Path, out: Path, pattern: artifacts.Pattern, **changes: object) -> Path:
    loaded = load_model(str(model), dtype="float32")
    info = fingerprint(loaded.model, name=loaded.name)
    name = artifacts.pattern_name(pattern)
    imported = artifacts.Imported(format="minference", file="best_pattern.json", sha256="0" * 64)
    prefill = Prefill(dense_below=128, dense_tail=64, layers=((name,) * 6,) * 3, imported=imported, **changes)
    artifacts.save(artifacts.Artifact(model=info, search=None, patterns={name: pattern}, prefill=prefill), out)
    return out


@pytest.fixture(scope="module")
def exact(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact_of(tiny_model, tmp_path_factory.mktemp("gate") / "exact.yaml", WIDE)


@pytest.fixture(scope="module")
def poor(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact_of(tiny_model, tmp_path_factory.mktemp("gate") / "poor.yaml", NARROW)


def options(model: Path, *more: str) -> list[str]:
    return ["--model", str(model), "--dtype", "float32", "--length", str(LENGTH), "--task", "passkey", *more]


def test_an_artifact_that_loses_nothing_passes(
    exact: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(exact), *options(tiny_model)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "passes" and len(said) == 2 and "KL 0.000" in said[1]


def test_one_that_loses_more_than_allowed_fails_and_names_heads(
    poor: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(poor), *options(tiny_model)]) == 3
    said = capsys.readouterr().out
    assert said.startswith("fails: passkey: ")
    assert len([line for line in said.splitlines() if line.startswith("  head ")]) == 10
    wide = [word for name in ("kl", "perplexity", "nll", "lost") for word in (f"--max-{name}", "1000")]
    assert main([str(poor), *options(tiny_model, *wide)]) == 0


def test_the_heads_that_are_named_are_the_worst(poor: Path, tiny_model: Path) -> None:
    asked = Gate(
        config=poor, model=str(tiny_model), limits=Limits(), tasks=("passkey",), length=LENGTH, dtype="float32"
    )
    heads = run(asked).heads
    errors = [error for _, _, error, _ in heads]
    assert errors == sorted(errors, reverse=True) and len({head[:2] for head in heads}) == 10


def test_what_grows_is_judged_at_the_length_of_the_prompts(tiny_model: Path, tmp_path: Path) -> None:
    """Windows that are a tile at 64 tokens and all of the prompt at 700 lose nothing there."""
    growth = artifacts.Growth(length=64, powers={"a_shape": {"window": 1.0}})
    grown = artifact_of(tiny_model, tmp_path / "grown.yaml", NARROW, growth=growth)
    assert main([str(grown), *options(tiny_model)]) == 0


@pytest.mark.parametrize(
    "changes, says",
    [
        (["--length", "100"], r"--length 100 is below the artifact's dense_below of 128"),
        (["--task", "guessing"], "unknown task"),
        (["--max-kl", "0"], r"--max-kl must be above 0, got 0\.0"),
        (["--samples", "0"], "samples must be at least 1"),
        (["--model", "no/such-model-anywhere"], "unknown model"),
    ],
)
def test_mistakes_are_one_line(
    exact: Path, tiny_model: Path, changes: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HeadwiseError, match=says) as error:
        main([str(exact), *options(tiny_model), *changes])
    assert "\n" not in str(error.value)


def test_without_a_search_the_length_has_to_be_told(exact: Path, tiny_model: Path) -> None:
    with pytest.raises(HeadwiseError, match="give --length"):
        main([str(exact), "--model", str(tiny_model), "--dtype", "float32"])


@pytest.mark.slow
def test_exit_codes(exact: Path, poor: Path, tiny_model: Path) -> None:
    def code(config: Path) -> int:
        command = [sys.executable, "-m", "search.gate", str(config), *options(tiny_model)]
        return subprocess.run(command, capture_output=True).returncode

    assert [code(exact), code(poor), code(poor.with_name("missing.yaml"))] == [0, 3, 2]


def swapped(source: Path, out: Path, count: int) -> Path:
    """The artifact with the patterns of its `count` densest and sparsest heads swapped."""
    artifact, arrays = artifacts.load_pair(source)
    density = np.asarray(arrays["chosen.density"])
    order = np.argsort(density, axis=None)
    rows = [list(row or ()) for row in artifact.prefill.layers]
    heads = density.shape[1]
    for low, high in zip(order[: count // 2], order[::-1][: count // 2], strict=True):
        (a, b), (c, d) = divmod(int(low), heads), divmod(int(high), heads)
        rows[a][b], rows[c][d] = rows[c][d], rows[a][b]
    prefill = artifact.prefill.model_copy(update={"layers": tuple(map(tuple, rows))})
    artifacts.save(artifact.model_copy(update={"prefill": prefill}), out, arrays)
    return out


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.model
def test_a_sabotaged_artifact_is_caught(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SmolLM2: what the search wrote passes the gate, and with the patterns of ten heads swapped it does not."""
    from search.heads import main as search

    out = tmp_path / "cfg.yaml"
    told = ["--model", "smollm2", "--out", str(out), "--length", "1024", "--cost", "flops", "--n-trials", "1"]
    assert search([*told, "--task", "passkey", "--task", "prose", "--budget", "0.4", "--no-picture"]) == 0
    gate = ["--model", "smollm2", "--task", "passkey", "--task", "prose"]
    assert main([str(out), *gate]) == 0
    assert main([str(swapped(out, tmp_path / "sabotaged.yaml", 10)), *gate]) == 1
    assert "  head " in capsys.readouterr().err
