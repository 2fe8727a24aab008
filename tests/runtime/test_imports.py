"""Artifacts that were imported from other tools' files are served by the runtime."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import runtime
from artifacts.commands.convert import Config as Convert
from artifacts.commands.convert import run as convert
from profiling.models.loading import load_model
from tests.search.conftest import save_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("imports") / "tiny")


def test_patterns_of_minference_are_served(tiny: Path, tmp_path: Path) -> None:
    rows = [{str(head): ["stream_llm", 64, 64, 0.5] for head in range(6)} for _ in range(3)]
    (tmp_path / "heads.json").write_text(json.dumps(rows))
    convert(Convert(file=tmp_path / "heads.json", config=tiny, out=tmp_path / "cfg.yaml"))
    model = load_model(str(tiny), dtype="float32").model
    ids = torch.randint(0, 256, (1, 1024))
    with torch.no_grad():
        dense = model(ids).logits
        with runtime.load(tmp_path / "cfg.yaml").apply(
            model, strict=True, backend="reference"
        ) as handle:
            sparse = model(ids).logits
            assert handle.stats()["sparse"] == 3
    assert not torch.allclose(sparse, dense, atol=1e-3)


def test_heads_of_duoattention_leave_prefill_as_it_is(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "duo.tsv").write_text("0.9\t0.1\n" * 3)
    convert(Convert(file=tmp_path / "duo.tsv", config=tiny, out=tmp_path / "kv.yaml"))
    model = load_model(str(tiny), dtype="float32").model
    # Fewer keys than Headwise's kernel serves densely: the very same function runs.
    ids = torch.randint(0, 256, (1, 1000))
    with torch.no_grad():
        alone = model(ids).logits
        with runtime.load(tmp_path / "kv.yaml").apply(model):
            assert torch.equal(model(ids).logits, alone)
