"""Names, sizes, fronts and windows of artifacts made in Python, and the schema's fields."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

import artifacts
from artifacts import (
    ArtifactError,
    AShape,
    BlockSparse,
    Full,
    KVCache,
    Streaming,
    Summary,
    VerticalSlash,
    grown,
    pattern_name,
    save,
)
from artifacts.commands.schema import schema
from artifacts.schema.artifact import SCHEMA_VERSION
from artifacts.schema.fields import LARGEST
from artifacts.schema.validation import to_artifact
from artifacts.store.write import SCHEMA_FILE
from headwise.__main__ import main
from tests.artifacts.conftest import counting


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (VerticalSlash(vertical=10, slash=60, last_q=32, coverage=0.57), "vs_10_60_q32_c57"),
        (BlockSparse(blocks=100, coverage=1.0), "bs_100_c100"),
        (BlockSparse(blocks=100, coverage=1e-5), "bs_100_c0.001"),
    ],
)
def test_pattern_name_of_coverage_and_last_queries(pattern, name):
    assert pattern_name(pattern) == name


def test_artifact_is_frozen(make):
    artifact = make()
    with pytest.raises(ValidationError):
        artifact.model = None
    with pytest.raises(ValidationError):
        artifact.prefill.dense_below = 1


def test_summary_recall_is_clamped_within_rounding_errors(make):
    summary = make().search.summary.model_dump()
    assert Summary(**summary | {"recall": 1.0 + 1e-6}).recall == 1.0
    with pytest.raises(ValidationError):
        Summary(**summary | {"recall": 1.01})


def test_kv_cache_row_is_one_policy_or_one_per_head():
    policies = {"full": Full(), "stream": Streaming()}
    section = KVCache(policies=policies, layers=("stream", None, ("full", "stream")))
    assert section.heads(0, 2) == ("stream", "stream")
    assert section.heads(1, 2) is None
    assert section.heads(2, 2) == ("full", "stream")


def test_grown_on_more_keys_scales_sizes_in_proportion():
    pattern = VerticalSlash(vertical=100, slash=1000, last_q=32, coverage=0.9)
    assert grown(pattern, None, 9) == pattern
    for length, vertical, slash in (
        (1, 100, 1000),
        (4096, 100, 1000),
        (4097, 102, 1016),
        (16_384, 400, 4000),
    ):
        sizes = {"vertical": vertical, "slash": slash}
        assert grown(pattern, 4096, length) == pattern.model_copy(update=sizes)
    assert grown(BlockSparse(blocks=9), 4096, 16_384) == BlockSparse(blocks=36)
    assert grown(AShape(sink=64, window=9), 4096, 8192) == AShape(sink=64, window=18)
    assert grown(VerticalSlash(vertical=1, slash=1 << 30), 1, 1 << 20).slash == LARGEST


def test_rows_of_points_round_trip(every_kind, tmp_path):
    artifact, arrays = every_kind
    save(artifact, tmp_path / "cfg.yaml", arrays)
    artifact = artifacts.load(tmp_path / "cfg.yaml")
    fast = (("a_64_512",) * 4, None, *[("bs_9",) * 4] * 3)
    assert [point.layers for point in artifact.prefill.front.points] == [fast, None]
    for point, rows in (("speedup=4", fast), ("kl=0.01", artifact.prefill.layers)):
        chosen = artifact.at_point(point)
        assert chosen.prefill.layers == rows and chosen.prefill.front is None
        # The gate measured the default rows alone.
        proven = rows == artifact.prefill.layers
        assert chosen.evidence == (artifact.evidence if proven else artifacts.Evidence())


def test_front_has_at_most_three_points(every_kind):
    fields = every_kind[0].model_dump(mode="json")
    first, last = fields["prefill"]["front"]["points"]
    between = [first | {"cost": cost, "speedup": 2 / cost, "kl": 0.1 / cost} for cost in (0.6, 0.8)]
    fields["prefill"]["front"]["points"] = [first, between[0], last]
    assert len(to_artifact(fields).prefill.front.points) == 3
    fields["prefill"]["front"]["points"] = [first, *between, last]
    with pytest.raises(ArtifactError, match=r"prefill\.front\.points: .* at most 3 items"):
        to_artifact(fields)


def test_save_accepts_a_pattern_that_only_the_front_uses(every_kind, tmp_path):
    artifact, arrays = every_kind
    rows = tuple(row and ("dense",) * 4 for row in artifact.prefill.layers)

    def changed(**point):
        front = artifact.prefill.front
        slow = front.points[1].model_copy(update=point)
        front = front.model_copy(update={"points": (front.points[0], slow)})
        new = artifact.prefill.model_copy(update={"layers": rows, "front": front})
        search = counting(artifact.search, rows, artifact.patterns)
        return artifact.model_copy(update={"prefill": new, "search": search})

    both = changed(layers=artifact.prefill.layers)
    assert save(both, tmp_path / "cfg.yaml", arrays).prefill.layers == rows
    with pytest.raises(ArtifactError, match=r"patterns\.vs_100_1800 is used by no head"):
        save(changed(), tmp_path / "cfg.yaml", arrays)


def test_seen_windows_round_trip_and_refuse_other_digests(every_kind):
    assert artifacts.seen_windows(every_kind[1]) == {"0" * 64, "f" * 64}
    assert artifacts.seen_windows({}) == frozenset()
    for wrong in ("x" * 64, "ab", "\u0661" * 64, "A" * 64):
        with pytest.raises(ArtifactError, match=f"must have 64 hex digits, got '{wrong[:40]}"):
            artifacts.window_arrays(["a" * 64, wrong])


def test_schema_describes_every_field(capsys):
    assert main(["schema", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == schema() and f"version {SCHEMA_VERSION}" in document["title"]
    assert document["$schema"].startswith("https://json-schema.org/")
    for part in (document, *document["$defs"].values()):
        for name, field in part.get("properties", {}).items():
            assert field["description"], f"{name}: describe it where it is declared"


def test_saved_file_names_the_schema_file(saved, capsys):
    first = saved.read_text().splitlines()[0]
    assert first == f"# yaml-language-server: $schema={SCHEMA_FILE}"
    assert main(["schema", "--out", str(saved.parent)]) == 0
    assert capsys.readouterr().out == f"wrote {saved.with_name(SCHEMA_FILE)}\n"
    assert json.loads(saved.with_name(SCHEMA_FILE).read_text()) == schema()
