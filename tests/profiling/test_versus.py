"""python -m profiling.versus on a tiny model: artifacts side by side."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from artifacts import HeadwiseError
from profiling.models.loading import load_model
from profiling.prompts.prompt import make_prompts
from profiling.speed.attention_time import attention_seconds, build_of
from profiling.speed.baselines import KERNEL, LABELS, MODEL
from profiling.versus import Versus, main, run
from search.published.config import HeadSearch
from search.published.head_budget import run as search
from tests.search.conftest import save_tiny

LENGTH = 600


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def artifacts(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("found")
    shared = {
        "model": str(tiny),
        "length": LENGTH,
        "dtype": "float32",
        "calibration": "passkey",
        "picture": False,
        "command": "test",
    }
    for budget in ("0.7", "1"):
        search(HeadSearch(out=folder / f"b{budget}.yaml", budget=budget, **shared))
    return folder / "b0.7.yaml", folder / "b1.yaml"


def test_the_denser_artifact_is_nearer_and_both_are_told(
    tiny: Path, artifacts: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "versus.json"
    words = [*map(str, artifacts), "--model", str(tiny), "--length", str(LENGTH), "--task", "passkey", "--task=prose"]
    assert main([*words, "--samples", "1", "--repeats", "1", "--dtype", "float32", "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    sparse, dense = record["rows"]
    assert set(record["dense_seconds"]) == {MODEL, KERNEL}
    assert sparse["density"] < dense["density"]
    assert dense["kl"] < sparse["kl"]
    assert sparse["seconds"] > 0 and dense["seconds"] > 0
    assert sparse["index_seconds"] > 0 and dense["index_seconds"] > 0
    assert sparse["kl"] == pytest.approx(np.mean(list(sparse["kl_by_task"].values())))
    told = capsys.readouterr().out
    assert "b0.7.yaml" in told and "b1.yaml" in told and LABELS[MODEL] in told and LABELS[KERNEL] in told


def test_one_prompt_has_no_standard_error(
    tiny: Path, artifacts: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "versus.json"
    words = [*map(str, artifacts), "--model", str(tiny), "--length", str(LENGTH), "--task=prose", "--samples", "1"]
    assert main([*words, "--repeats", "0", "--dtype", "float32", "--json", str(out)]) == 0
    assert [row["kl_error"] for row in json.loads(out.read_text())["rows"]] == [None, None]
    assert "NaN" not in out.read_text() and "nan" not in capsys.readouterr().out


def test_what_would_be_dense_is_refused_in_one_line(tiny: Path, artifacts: tuple[Path, Path]) -> None:
    with pytest.raises(HeadwiseError, match="below the dense_below of 300") as caught:
        run(Versus(configs=artifacts, model=str(tiny), tasks=("passkey",), length=200, dtype="float32"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("option", "least"), [({"places": 0}, 1), ({"places": -3}, 1), ({"repeats": -1}, 0)])
def test_a_count_that_is_none_is_refused(option: dict[str, int], least: int, tmp_path: Path) -> None:
    """Before anything is read."""
    config = Versus(configs=(tmp_path / "none.yaml",), model="none", tasks=("passkey",), length=600, **option)
    with pytest.raises(HeadwiseError, match=rf"^--(places|repeats) must be at least {least}, got "):
        run(config)


def test_attention_is_timed_for_every_set_of_plans_and_dense(tiny: Path) -> None:
    from kernels.patterns import LayerPlan, make

    loaded = load_model(str(tiny), dtype="float32")
    prompt = make_prompts("prose", loaded.tokenizer, length=LENGTH, samples=1, seed=0)[0]
    plan = LayerPlan([make("a_shape", sink=64, window=64)] * 6, 2)
    calls: list[int] = []
    build = plan.build
    plan.build = lambda *args, **kwargs: calls.append(1) or build(*args, **kwargs)  # type: ignore[method-assign]
    with torch.inference_mode():
        found = attention_seconds(loaded, prompt, {"one": {0: plan, 2: plan}}, repeats=2, dense=True)
        assert set(found) == {"one", MODEL, KERNEL} and min(found.values()) > 0
        # Two layers, one round that is not timed and two that are.
        assert len(calls) == 6
        found = attention_seconds(loaded, prompt, {"one": {0: plan, 2: plan}}, repeats=2, builds=True)
        assert set(found) == {"one", build_of("one")} and len(calls) == 18
