"""SmolLM2 out of vLLM against SmolLM2 out of transformers, by the same artifact."""

from __future__ import annotations

from pathlib import Path

import pytest

import artifacts
from profiling.models.loading import load_model
from runtime.fingerprint import fingerprint
from tests.runtime.conftest import search_info
from tests.vllm.agree import Run, prompts_of
from tests.vllm.conftest import PATTERNS


@pytest.mark.model
def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    loaded = load_model("smollm2", dtype="float32")
    names = ("vs", "a", "bs")
    rows = tuple(
        tuple(names[(layer + head) % 3] for head in range(9)) if layer > 1 else None
        for layer in range(30)
    )
    artifact = artifacts.Artifact(
        model=fingerprint(loaded.model, name=loaded.name),
        search=search_info(),
        patterns={name: PATTERNS[name] for name in names},
        prefill=artifacts.Prefill(dense_below=512, layers=rows),
    )
    artifacts.save(artifact, tmp_path / "cfg.yaml")
    prompts = prompts_of(loaded.tokenizer, 2, 900, 1301)
    folder = str(loaded.model.config._name_or_path)
    run = Run(loaded.model, folder, str(tmp_path / "cfg.yaml"), prompts, 8)
    found = [*run.alone(), *run.batched(), *run.chunked()]
    assert [part for part in found if not part[2]] == []
    assert any(differs for _, _, differs in run.dense())
