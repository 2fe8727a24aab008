"""After a search with one budget for the model: its report, and a head as `show` has it."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import artifacts
from artifacts.commands.show import Config as ShowConfig
from artifacts.commands.show import run as show
from search.heads import main as heads


@pytest.fixture(scope="module")
def done(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The artifact of a search, and its report."""
    out = tmp_path_factory.mktemp("searched") / "cfg.yaml"
    options = (
        "--length 1000 --dtype float32 --cost flops --budget 0.7 --n-trials 2 --no-picture "
        "--task passkey --task line_turns@questions=2 "
        "--max-kl 100 --max-perplexity 100 --max-nll 100 --max-lost 1"
    )
    said = io.StringIO()
    with redirect_stdout(said):
        assert heads(["--model", str(tiny_model), "--out", str(out), *options.split()]) == 0
    return out, said.getvalue()


@pytest.fixture(scope="module")
def searched(done: tuple[Path, str]) -> Path:
    return done[0]


def test_the_report_says_what_was_found_and_what_to_type_next(
    done: tuple[Path, str], tiny_model: Path
) -> None:
    searched, said = done
    artifact = artifacts.load(searched)
    assert (
        artifact.search is not None
        and f"{sum(artifact.search.summary.winners.values())} heads" in said
    )
    for task in artifact.evidence.tasks:
        assert task.task in said
        assert f"accuracy dense 0.00, artifact 0.00 of {task.answers} questions" in said
    assert "counted and not timed" in said and "held-out prompts against dense attention:" in said
    assert said.endswith(f"headwise gate {searched} --model {tiny_model} --task text:FILE\n")


def test_a_head_shows_its_curve_its_neighbours_and_its_picture(searched: Path) -> None:
    artifact, arrays = artifacts.load_pair(searched)
    for head in range(6):
        said = show(ShowConfig(file=searched, head=f"1.{head}")).text.splitlines()
        row = artifact.prefill.layers[1]
        assert row is not None and said[0] == f"layer 1, head {head}: {row[head]}"
        table = [line for line in said if " frontier" in line or line.startswith("*")]
        (chosen,) = (line for line in said if line.startswith("*  "))
        assert chosen.split()[1] == row[head] and len(table) > 1
        number = int(arrays["chosen.candidate"][1, head])
        loss = arrays[f"candidates.{number}.{row[head]}.objective"][1, head]
        assert chosen.split()[2] == f"{loss:.3g}"
        assert any(line.startswith("next dearer") for line in said) or row[head] == "dense"
        assert any(line.startswith("the price of the model's budget") for line in said)
        assert (
            len([line for line in said if line.startswith("  ") and line.strip(" ·░▒▓█") == ""])
            == 24
        )
