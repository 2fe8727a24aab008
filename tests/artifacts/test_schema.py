"""What the models refuse when an artifact is made in Python, and what they leave alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from artifacts import (
    ArtifactError,
    AShape,
    BlockSparse,
    Dense,
    Dilated,
    Prefill,
    Static,
    Strided,
    Summary,
    TriShape,
    VerticalSlash,
    pattern_name,
)
from artifacts.validation import to_artifact


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (Dense(), "dense"),
        (AShape(sink=1024, window=4096), "a_1024_4096"),
        (VerticalSlash(vertical=1000, slash=6096), "vs_1000_6096"),
        (VerticalSlash(vertical=1000, slash=6096, last_q=32), "vs_1000_6096_q32"),
        (VerticalSlash(vertical=1000, slash=6096, coverage=0.95), "vs_1000_6096_c95"),
        (VerticalSlash(vertical=1000, slash=6096, last_q=32, coverage=0.57), "vs_1000_6096_q32_c57"),
        (BlockSparse(blocks=100), "bs_100"),
        (BlockSparse(blocks=100, coverage=0.9), "bs_100_c90"),
        (BlockSparse(blocks=100, coverage=0.995), "bs_100_c99.5"),
        (BlockSparse(blocks=100, coverage=1.0), "bs_100_c100"),
        (BlockSparse(blocks=100, coverage=1e-5), "bs_100_c0.001"),
        (TriShape(sink=1024, window=4096, last=128), "tri_1024_4096_128"),
        (Dilated(sink=1024, window=4096, dilation=2), "dil_1024_4096_2"),
        (Strided(sink=1024, window=4096, stride=8), "str_1024_4096_8"),
        (Static(indices="mean-2"), "static_mean-2"),
    ],
)
def test_pattern_name(pattern, name):
    assert pattern_name(pattern) == name


@pytest.mark.parametrize(
    ("make_pattern", "sizes"),
    [
        (AShape, {"sink": 0, "window": 1}),
        (AShape, {"sink": 1.0, "window": 1}),
        (AShape, {"sink": True, "window": 1}),
        (AShape, {"sink": 1, "window": 1, "extra": 1}),
        (VerticalSlash, {"vertical": 1, "slash": 1, "last_q": 1025}),
        (BlockSparse, {}),
        (BlockSparse, {"blocks": 1, "coverage": 0.0}),
        (BlockSparse, {"blocks": 1, "coverage": 1.01}),
        (VerticalSlash, {"vertical": 1, "slash": 1, "coverage": "0.9"}),
        (TriShape, {"sink": 1, "window": 1}),
        (Strided, {"sink": 1, "window": 1, "stride": 0}),
        (Static, {"indices": ""}),
        (Static, {"indices": "a.b"}),
        (Static, {"indices": "a" * 49}),
    ],
)
def test_wrong_sizes_are_refused(make_pattern, sizes):
    with pytest.raises(ValidationError):
        make_pattern(**sizes)


def test_artifacts_do_not_change(make):
    artifact = make()
    with pytest.raises(ValidationError):
        artifact.model = None
    with pytest.raises(ValidationError):
        artifact.prefill.dense_below = 1


def test_a_mean_a_rounding_error_above_one_is_one(make):
    summary = make().search.summary.model_dump()
    assert Summary(**summary | {"recall": 1.0 + 1e-6}).recall == 1.0
    with pytest.raises(ValidationError):
        Summary(**summary | {"recall": 1.01})


def test_all_layers_may_be_left_alone(make):
    assert make(patterns={}, prefill=Prefill(dense_below=0, layers=(None,) * 3)).prefill.layers == (None,) * 3


def test_made_now_unless_told(make):
    fields = {name: getattr(make(), name) for name in ("model", "search", "patterns", "prefill")}
    artifact = type(make())(**fields)
    assert artifact.created_at.endswith("Z") and artifact.created_at > "2025"
    assert artifact.evidence == () and artifact.sidecar is None and artifact.content_sha256 == ""


def test_importing_loads_nothing_heavy():
    code = "import sys, artifacts, artifacts.command_line; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "artifacts.store" in loaded
    assert not {"torch", "numpy", "safetensors", "transformers", "kernels", "runtime"} & set(loaded)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"filter_layers": []}, "filter_layers: must not be empty"),
        ({"filter_layers": [2, 1]}, "must be different layers in ascending order"),
        ({"filter_layers": [1, 1]}, "must be different layers in ascending order"),
        ({"filter_layers": [1], "dense_layers": [0, 1]}, "layer 1 is both in filter_layers and in dense_layers"),
        ({"filter_layers": [3]}, "decode.omnikv.filter_layers names layer 3, the model has 3 layers"),
        ({"filter_layers": [1], "dense_layers": [9]}, "decode.omnikv.dense_layers names layer 9, the model has 3"),
        ({"filter_layers": [1], "budget": 0}, "budget"),
        ({"filter_layers": [1], "budget": 1.0}, "must be a whole number of tokens, or a share of the context"),
        ({"filter_layers": [1], "selector": "first"}, "selector"),
        ({"filter_layers": [1], "window": 0}, "window"),
        ({"filter_layers": [1], "layers": [2]}, "layers"),
    ],
)
def test_decode_sections_that_cannot_be(section, message, make):
    fields = make().model_dump(mode="json") | {"decode": {"omnikv": section}}
    with pytest.raises(ArtifactError, match=message):
        to_artifact(fields)
