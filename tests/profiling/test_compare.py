"""Fidelity, quality and the comparison table, on a tiny model with an artifact whose effect is known."""

from __future__ import annotations

import json
from operator import truediv
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch

import artifacts
from artifacts import HeadwiseError
from profiling.compare import Comparison, compare, main, table
from profiling.inside.head_fidelity import fidelity
from profiling.models.loading import load_model
from profiling.prompts.prompt import Prompt
from profiling.quality.answers import is_right, negative_log_likelihood, perplexity
from profiling.speed.latency import interleaved, medians
from search.published.config import HeadSearch
from search.published.head_budget import run
from tests.search.conftest import save_tiny

LENGTH = 700


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("compare")
    model = save_tiny(folder / "tiny")
    run(
        HeadSearch(model=str(model), out=folder / "cfg.yaml", length=LENGTH, budget="0.8", dtype="float32", command="x")
    )
    return model, folder / "cfg.yaml"


def test_fidelity_on_the_calibration_prompt_is_what_the_search_wrote(searched: tuple[Path, Path]) -> None:
    from profiling.prompts.prompt import make_prompts

    model, config = searched
    loaded = load_model(str(model), dtype="float32")
    prompt = make_prompts("passkey", loaded.tokenizer, length=LENGTH, samples=1, seed=0)[0]
    measured, arrays = fidelity(loaded.model, artifacts.load(config), prompt), artifacts.load_arrays(config)
    for name in ("error", "recall", "density"):
        np.testing.assert_allclose(getattr(measured, name), arrays[f"chosen.{name}"], rtol=1e-5, atol=1e-6)


def test_perplexity_is_that_of_the_models_own_loss(searched: tuple[Path, Path]) -> None:
    model, _ = searched
    loaded = load_model(str(model), dtype="float32")
    ids = torch.randint(0, 256, (1, 600))
    prompt = Prompt(tuple(ids[0].tolist()), None)
    with torch.no_grad():
        loss = loaded.model(ids, labels=ids).loss
    assert negative_log_likelihood(loaded.model, prompt).shape == (599,)
    assert perplexity(loaded.model, [prompt]) == pytest.approx(loss.exp().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("given", "right"), [("123.", True), ("123", True), ("1234", True), ("12", False), ("x123", False)]
)
def test_answers_must_begin_with_what_was_expected(given: str, right: bool) -> None:
    assert is_right(Prompt((1,), " 123"), given) is right


def test_interleaving_takes_turns_and_drops_the_first_round() -> None:
    from contextlib import contextmanager

    order: list[str] = []

    def context(name: str):
        @contextmanager
        def entered():
            order.append(name)
            yield

        return entered

    seconds = interleaved({"a": context("a"), "b": context("b")}, lambda: None, repeats=3, device="cpu")
    assert order == ["a", "b"] * 4
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}
    assert medians({"a": [3.0, 1.0, 2.0]}) == {"a": 2.0}


def test_the_command_measures_both_sides(searched: tuple[Path, Path], tmp_path: Path, capsys) -> None:
    model, config = searched
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"line {i} of a text about nothing in particular." for i in range(400)))
    out = tmp_path / "compared.json"
    options = ["--model", str(model), str(config), "--length", str(LENGTH), "--text", str(text)]
    main([*options, "--passkeys", "2", "--repeats", "2", "--dtype", "float32", "--json", str(out)])
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["prefill", "dense", "dense_kernel", "headwise"]
    record = json.loads(out.read_text())
    dense, kernel, sparse = record["rows"]
    assert dense["density"] == dense["recall"] == kernel["density"] == 1.0
    assert kernel["perplexity"] is None and kernel["answers"] == []
    seconds = record["all_seconds"]
    over = {name: median(map(truediv, seconds[name], seconds["headwise"])) for name in ("dense", "dense_kernel")}
    assert record["speedups"]["headwise"] == pytest.approx(over)
    assert printed[-1].split()[2:4] == [f"{min(over.values()):.2f}x", f"{over['dense']:.2f}x"]
    assert 0 < sparse["density"] <= 0.85 and 0 < sparse["recall"] < 1
    assert sparse["perplexity"] != dense["perplexity"]
    assert len(record["expected"]) == 2 and len(record["all_seconds"]["headwise"]) == 2


def test_a_comparison_of_dense_with_dense_is_refused(searched: tuple[Path, Path]) -> None:
    model, config = searched
    loaded = load_model(str(model), dtype="float32")
    with pytest.raises(HeadwiseError, match="below the artifact's dense_below of 350"):
        compare(Comparison(model=str(model), config=config, length=349), loaded)


def test_table_lines_up(searched: tuple[Path, Path]) -> None:
    model, config = searched
    loaded = load_model(str(model), dtype="float32")
    result = compare(Comparison(model=str(model), config=config, length=LENGTH, passkeys=0, repeats=0), loaded)
    lines = table(result).splitlines()
    assert len({len(line) for line in lines}) == 1 and lines[1].split()[1:] == [
        "-",
        "-",
        "-",
        "1.000",
        "1.000",
        "-",
        "-",
    ]
    assert [line.split()[0] for line in lines[1:]] == ["dense", "headwise"]
