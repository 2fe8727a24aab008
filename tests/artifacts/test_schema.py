"""Names, sizes at a length, fronts and windows of artifacts made in Python."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

import artifacts
from artifacts import (
    ArtifactError,
    BlockSparse,
    Dense,
    Dilated,
    Full,
    Growth,
    KVCache,
    Static,
    Streaming,
    Strided,
    Summary,
    TriShape,
    VerticalSlash,
    grown,
    pattern_name,
    save,
)
from artifacts.schema.validation import to_artifact


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (Dense(), "dense"),
        (VerticalSlash(vertical=1000, slash=6096), "vs_1000_6096"),
        (
            VerticalSlash(vertical=1000, slash=6096, last_q=32, coverage=0.57),
            "vs_1000_6096_q32_c57",
        ),
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


def test_a_row_is_one_policy_for_all_kv_heads_or_one_for_each():
    policies = {"full": Full(), "stream": Streaming()}
    section = KVCache(policies=policies, layers=("stream", None, ("full", "stream")))
    assert section.heads(0, 2) == ("stream", "stream")
    assert section.heads(1, 2) is None
    assert section.heads(2, 2) == ("full", "stream")


def refused(fields, message):
    with pytest.raises(ArtifactError) as caught:
        to_artifact(fields)
    assert message in str(caught.value)


def test_sizes_at_a_length(make):
    growth = Growth(
        length=4096, powers={"vertical_slash": {"vertical": 0.5, "slash": 1.0}, "block_sparse": {}}
    )
    pattern = VerticalSlash(vertical=100, slash=1000, last_q=32, coverage=0.9)
    assert (
        grown(pattern, growth, 4096)
        == grown(pattern, growth, 4033)
        == pattern
        == grown(pattern, None, 9)
    )
    assert grown(pattern, growth, 16_384) == pattern.model_copy(
        update={"vertical": 200, "slash": 4000}
    )
    assert grown(pattern, growth, 1) == pattern.model_copy(update={"vertical": 12, "slash": 16})
    assert grown(BlockSparse(blocks=9), growth, 16_384) == BlockSparse(blocks=9)


def test_rows_of_points_come_back(every_kind, tmp_path):
    artifact, arrays = every_kind
    save(artifact, tmp_path / "cfg.yaml", arrays)
    artifact, arrays = artifacts.load_pair(tmp_path / "cfg.yaml")
    fast = (("a_64_512",) * 4, None, *[("bs_9",) * 4] * 3)
    assert artifacts.front_rows(artifact, arrays, 0) == fast
    assert artifacts.front_rows(artifact, arrays, 1) == artifact.prefill.layers
    assert artifacts.at_target(artifact, arrays, target_speedup=4).prefill.layers == fast
    with pytest.raises(
        ArtifactError, match=r"the front names 'nine', which patterns does not hold"
    ):
        artifacts.front_arrays(artifact.patterns, [(("nine",),)])
    with pytest.raises(ArtifactError, match=r"the front's points have rows of unlike lengths"):
        artifacts.front_arrays(artifact.patterns, [(("bs_9",),), (("bs_9",), ("bs_9",))])


def test_a_pattern_that_only_the_front_uses_is_used(every_kind, tmp_path):
    artifact, arrays = every_kind
    rows = tuple(row and ("dense",) * 4 for row in artifact.prefill.layers)
    changed = artifact.model_copy(
        update={"prefill": artifact.prefill.model_copy(update={"layers": rows})}
    )
    assert save(changed, tmp_path / "cfg.yaml", arrays).prefill.layers == rows
    nowhere = arrays | artifacts.front_arrays(artifact.patterns, [rows, rows])
    with pytest.raises(
        ArtifactError,
        match=r"patterns\.'a_64_512' is used by no head, of prefill\.layers or of a poi",
    ):
        save(changed, tmp_path / "cfg.yaml", nowhere)
    plain = changed.model_copy(
        update={"prefill": changed.prefill.model_copy(update={"front": None})}
    )
    refused(plain.model_dump(mode="json"), "patterns.vs_100_1800 is used by no head")


def test_seen_windows(every_kind):
    assert artifacts.seen_windows(every_kind[1]) == {"0" * 64, "f" * 64}
    assert artifacts.seen_windows({}) == frozenset()
    for wrong in ("x" * 64, "ab", "\u0661" * 64, "A" * 64):
        with pytest.raises(ArtifactError, match=f"must have 64 hex digits, got '{wrong[:40]}"):
            artifacts.window_arrays(["a" * 64, wrong])
