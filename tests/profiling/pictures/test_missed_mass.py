"""The attention that a head's pattern misses, against plain softmax."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import artifacts
from artifacts import AShape, Imported, Prefill, pattern_name
from kernels.patterns import LayerPlan, make
from profiling.inside.capture import LayerInputs, capture
from profiling.models.loading import load_model
from profiling.pictures.missed_mass import missed_mass
from profiling.prompts.prompt import make_prompts
from runtime.fingerprint import fingerprint
from tests.search.conftest import save_tiny

LENGTH = 1000


def test_it_is_what_plain_softmax_says(tmp_path: Path) -> None:
    loaded = load_model(str(save_tiny(tmp_path / "tiny")), dtype="float32")
    pattern = AShape(sink=64, window=100)
    imported = Imported(format="minference", file="best.json", sha256="0" * 64)
    rows = ((pattern_name(pattern),) * 6,) * 3
    artifact = artifacts.Artifact(
        model=fingerprint(loaded.model, name=loaded.name),
        search=None,
        patterns={pattern_name(pattern): pattern},
        prefill=Prefill(dense_below=128, dense_tail=64, layers=rows, imported=imported),
    )
    prompt = make_prompts("passkey", loaded.tokenizer, length=LENGTH, samples=1, seed=3)[0]
    layer, head = 1, 4
    missed = missed_mass(loaded.model, artifact, {}, prompt, layer, head)

    def visit(inputs: LayerInputs) -> None:
        if inputs.layer != layer:
            return
        plan = LayerPlan([make(**pattern.model_dump())] * 6, 2, dense_tail=64)
        index = plan.build(inputs.q, inputs.k)
        logits = inputs.q[0, head] @ inputs.k[0, head // 3].T * inputs.scale
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        weights = logits.masked_fill(~causal, float("-inf")).softmax(-1)
        lost = weights * ~index.to_mask()[0, head]
        np.testing.assert_allclose(missed.by_query, lost.sum(1), atol=1e-5)
        np.testing.assert_allclose(missed.by_key, lost.sum(0), atol=1e-4)
        cells = torch.nn.functional.pad(lost, (0, 24, 0, 24)).reshape(16, 64, 16, 64).sum((1, 3))
        counts = torch.tensor([64.0] * 15 + [40.0])[:, None]
        np.testing.assert_allclose(missed.cells, cells / counts, atol=1e-5)
        assert missed.drawn.density == pytest.approx(float(index.density()[0, head]), abs=1e-6)

    capture(loaded.model, torch.tensor([prompt.input_ids]), visit)
    assert missed.by_query.sum() > 0
    assert missed.drawn.recall == pytest.approx(1 - missed.by_query.mean(), abs=1e-6)
