"""From the patterns of an artifact to those that are built: every kind, every version, arrays from
the sidecar."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import artifacts
from artifacts import ArtifactError
from kernels.patterns import make
from runtime import Headwise, load
from runtime.layers import kernel_patterns
from tests.artifacts.conftest import build_every_kind

GOLDEN = Path(__file__).parents[1] / "artifacts" / "golden"


def test_every_kind_is_made_as_it_is_written() -> None:
    artifact, arrays = build_every_kind()
    made = kernel_patterns(artifact, arrays)
    assert list(made) == list(artifact.patterns)
    columns = (*range(64), 99, 512, 700)
    assert made["static_mean"] == make("static", columns=columns, diagonals=(0, 1, 2, 9))
    assert made["vs_100_1800_c95"] == make(
        "vertical_slash", vertical=100, slash=1800, coverage=0.95
    )
    for name, pattern in artifact.patterns.items():
        assert made[name].kind == pattern.kind
        if pattern.kind != "static":
            assert made[name] == make(**pattern.model_dump())


def test_the_golden_artifact_loads() -> None:
    headwise = load(GOLDEN / "v1.yaml")
    assert kernel_patterns(headwise.artifact, headwise.arrays)["bs_9"] == make(
        "block_sparse", blocks=9
    )


def test_static_patterns_need_their_arrays(build) -> None:
    artifact, arrays = build_every_kind()
    with pytest.raises(
        ArtifactError, match=r"static_mean: the array static\.mean\.columns must be in the sidecar"
    ):
        kernel_patterns(artifact)
    del arrays["static.mean.diagonals"]
    with pytest.raises(ArtifactError, match=r"the sidecar has no array static\.mean\.diagonals"):
        kernel_patterns(artifact, arrays)


def test_an_a_shape_frozen_serves_as_the_a_shape(build, artifact_for, ids, tmp_path) -> None:
    """64 sinks and a window of 64 are the first tile, the own tile and the one before it."""
    model = build()
    config = model.config
    rows = [["a_64_64"] * config.num_attention_heads] * config.num_hidden_layers
    plain = artifact_for(model, rows=rows)
    static = plain.model_copy(
        update={
            "patterns": {"frozen": artifacts.Static(indices="local")},
            "prefill": plain.prefill.model_copy(
                update={"layers": tuple(("frozen",) * len(row) for row in plain.prefill.layers)}
            ),
        }
    )
    arrays = {
        "static.local.columns": np.arange(64, dtype=np.int32),
        "static.local.diagonals": np.array([0, 1], dtype=np.int32),
    }
    artifacts.save(static, tmp_path / "cfg.yaml", arrays)
    prompt = ids(300)
    dense = model(prompt).logits
    with Headwise(plain).apply(model, strict=True, backend="reference"):
        expected = model(prompt).logits
    with load(tmp_path / "cfg.yaml").apply(model, strict=True, backend="reference") as handle:
        assert torch.equal(model(prompt).logits, expected)
        assert handle.stats()["sparse"] == config.num_hidden_layers
    assert not torch.equal(expected, dense)
