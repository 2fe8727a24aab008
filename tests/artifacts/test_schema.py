"""What the models refuse when an artifact is made in Python, and what they leave alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

import artifacts
from artifacts import (
    ArtifactError,
    AShape,
    BlockSparse,
    Dense,
    Dilated,
    Growth,
    Prefill,
    Static,
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
        (AShape(sink=1024, window=4096), "a_1024_4096"),
        (VerticalSlash(vertical=1000, slash=6096), "vs_1000_6096"),
        (VerticalSlash(vertical=1000, slash=6096, last_q=32), "vs_1000_6096_q32"),
        (VerticalSlash(vertical=1000, slash=6096, coverage=0.95), "vs_1000_6096_c95"),
        (
            VerticalSlash(vertical=1000, slash=6096, last_q=32, coverage=0.57),
            "vs_1000_6096_q32_c57",
        ),
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
    assert (
        make(patterns={}, prefill=Prefill(dense_below=0, layers=(None,) * 3)).prefill.layers
        == (None,) * 3
    )


def test_made_now_unless_told(make):
    fields = {name: getattr(make(), name) for name in ("model", "search", "patterns", "prefill")}
    artifact = type(make())(**fields)
    assert artifact.created_at.endswith("Z") and artifact.created_at > "2025"
    assert (
        artifact.evidence == artifacts.Evidence()
        and artifact.sidecar is None
        and artifact.content_sha256 == ""
    )


def test_importing_loads_nothing_heavy():
    code = "import sys, artifacts, artifacts.cli.command; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "artifacts.store.read" in loaded
    assert not {"torch", "numpy", "safetensors", "transformers", "kernels", "runtime"} & set(loaded)


def refused(fields, message):
    with pytest.raises(ArtifactError) as caught:
        to_artifact(fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("growth", "message"),
    [
        ({"length": 0, "powers": {}}, "prefill.growth.length: must be at least 1, got 0"),
        (
            {"length": 64, "powers": {"a_shape": {"window": 1.5}}},
            "powers.a_shape.window: must be at most 1.0, got 1.5",
        ),
        (
            {"length": 64, "powers": {"a_shape": {"window": -0.1}}},
            "powers.a_shape.window: must be at least 0",
        ),
        (
            {"length": 64, "powers": {"vertical": {"slash": 1.0}}},
            "prefill.growth.powers.vertical: must be one of dense",
        ),
        (
            {"length": 64, "powers": {"a_shape": {"slash": 1.0}}},
            "powers.a_shape names 'slash', sizes of a_shape that may",
        ),
        (
            {"length": 64, "powers": {"vertical_slash": {"coverage": 0.5}}},
            "prefill.growth: powers.vertical_slash names 'coverage', sizes of vertical_slash that "
            "may grow are: v",
        ),
        (
            {"length": 64, "powers": {"vertical_slash": {"last_q": 0.5}}},
            "powers.vertical_slash names 'last_q'",
        ),
        (
            {"length": 64, "powers": {"static": {"indices": 0.5}}},
            "sizes of static that may grow are: none",
        ),
        ({"length": 64}, "prefill.growth.powers: missing"),
    ],
)
def test_growth_that_cannot_be(growth, message, make):
    fields = make().model_dump(mode="json")
    fields["prefill"]["growth"] = growth
    refused(fields, message)


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


def every_field(every_kind):
    return every_kind[0].model_dump(mode="json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda points: points.reverse(),
            "prefill.front: points must get dearer, but points[1] costs 0.5 after 1",
        ),
        (
            lambda points: points[1].update(kl=0.25),
            "points[1] costs more than the one before without being better",
        ),
        (
            lambda points: points[1].update(speedup=3.0),
            "points[1].speedup is 3, dense_cost over cost is 2",
        ),
        (lambda points: points.clear(), "prefill.front.points: must not be empty"),
        (lambda points: points.extend(points * 16), "at most 32"),
        (
            lambda points: points[0].update(lost=15),
            "lost is 15, but dense attention answers 14 right",
        ),
        (
            lambda points: points[0].update(kl=-0.1),
            "prefill.front.points[0].kl: must be at least 0",
        ),
        (
            lambda points: points[0].update(seconds=1.0),
            "prefill.front.points[0].seconds: unknown field",
        ),
    ],
)
def test_fronts_that_cannot_be(change, message, every_kind):
    fields = every_field(every_kind)
    change(fields["prefill"]["front"]["points"])
    refused(fields, message)


def at(table, *places):
    """The array with another number at one place."""
    *place, number = places
    changed = table.copy()
    changed[tuple(place)] = number
    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda rows: None,
            "prefill.front: the sidecar has no array front.rows, and the points' rows are there",
        ),
        (
            lambda rows: rows[:, 1:],
            "front.rows must be int16 of shape (2, 5, 4), got int16 of shape (2, 4, 4)",
        ),
        (
            lambda rows: rows[..., :3],
            "front.rows must be int16 of shape (2, 5, 4), got int16 of shape (2, 5, 3)",
        ),
        (
            lambda rows: rows[:1],
            "front.rows must be int16 of shape (2, 5, 4), got int16 of shape (1, 5, 4)",
        ),
        (
            lambda rows: rows.astype("int64"),
            "front.rows must be int16 of shape (2, 5, 4), got int64",
        ),
        (
            lambda rows: at(rows, 0, 1, 0),
            "must leave alone (-1) the layers that prefill.layers leaves alone",
        ),
        (
            lambda rows: at(rows, 1, 2, 0, -1),
            "must leave alone (-1) the layers that prefill.layers leaves alone",
        ),
        (lambda rows: at(rows, 0, 2, 3, 13), "front.rows names pattern 13, there are 13 from 0 on"),
    ],
)
def test_rows_of_points_that_cannot_be(change, message, every_kind, tmp_path):
    artifact, arrays = every_kind
    arrays["front.rows"] = change(arrays["front.rows"])
    with pytest.raises(ArtifactError) as caught:
        save(
            artifact,
            tmp_path / "cfg.yaml",
            {name: array for name, array in arrays.items() if array is not None},
        )
    assert message in str(caught.value) and not list(tmp_path.iterdir())


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


def test_seen_windows(every_kind, tmp_path):
    artifact, arrays = every_kind
    assert (
        artifacts.seen_windows(arrays) == {"0" * 64, "f" * 64}
        and artifacts.seen_windows({}) == frozenset()
    )
    del arrays["calibration.seen_windows"]
    with pytest.raises(
        ArtifactError, match=r"calibration\.seen_windows: says 2, and the sidecar has no array"
    ):
        save(artifact, tmp_path / "cfg.yaml", arrays)
    arrays |= artifacts.window_arrays(["a" * 64])
    with pytest.raises(
        ArtifactError, match=r"must be uint8 of shape \(2, 32\), got uint8 of shape \(1, 32\)"
    ):
        save(artifact, tmp_path / "cfg.yaml", arrays)
    for wrong in ("x" * 64, "ab", "\u0661" * 64, "A" * 64):
        with pytest.raises(ArtifactError, match=f"must have 64 hex digits, got '{wrong[:40]}"):
            artifacts.window_arrays(["a" * 64, wrong])


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"lost": 1}, "lost is 1, but dense attention answers 0 right"),
        ({"dense_right": 3, "lost": 4}, "lost is 4, but dense attention answers 3 right"),
        ({"dense_right": 17}, "dense_right is 17, there are 16 answers"),
        ({"nll_rise_low": 0.1}, "nll_rise_low and nll_rise_high go together"),
        (
            {"nll_rise": 0.3, "nll_rise_low": 0.1, "nll_rise_high": 0.2},
            "must lie from nll_rise_low to nll_rise_high",
        ),
        ({"kl": -0.1}, "evidence.tasks[0].kl: must be at least 0"),
        ({"perplexity_ratio": 0.0}, "evidence.tasks[0].perplexity_ratio: must be more than 0"),
    ],
)
def test_figures_that_cannot_be(figures, message, make):
    fields = make().model_dump(mode="json")
    fields["evidence"]["tasks"] = [{"task": "passkey", "prompts": 16, "kl": 0.1} | figures]
    refused(fields, message)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"num_layers": 10**8}, "model.num_layers: must be at most 4096, got 100000000"),
        ({"num_heads": 10**20}, "model.num_heads: must be at most 4096"),
        ({"num_kv_heads": 2**40}, "model.num_kv_heads: must be at most 4096"),
        (
            {"num_layers": 4096, "num_heads": 32},
            "num_layers * num_heads must be at most 65536, got 4096 layers of 32",
        ),
        ({"head_dim": 10**6}, "model.head_dim: must be at most 65536"),
        ({"max_positions": 2**31}, "model.max_positions: must be at most 2147483647"),
    ],
)
def test_counts_that_no_model_has(counts, message, make):
    fields = make().model_dump(mode="json")
    fields["model"] |= counts
    refused(fields, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda f: f["costs"][0].update(optimised=False),
            "exactly one table is optimised for where search.cost has se",
        ),
        (
            lambda f: f["costs"].append(f["costs"][0]),
            "exactly one table is optimised for where search.cost has seconds",
        ),
        (
            lambda f: f["costs"][0].update(device="x"),
            "costs[0].device is 'x', but search.cost.device 'a processor'",
        ),
        (
            lambda f: f["search"].update(cost=None),
            "no table can be optimised for where search.cost has no unit",
        ),
        (
            lambda f: f["search"]["cost"].update(unit="flops"),
            "no table can be optimised for where search.cost has flops",
        ),
        (
            lambda f: f["prefill"]["front"].update(unit="flops"),
            "front.unit is flops, but search.cost has seconds",
        ),
        (
            lambda f: f["search"]["calibration"].update(tasks=[]),
            "search.calibration.tasks: must not be empty",
        ),
        (
            lambda f: f["search"].update(allocation="layers"),
            "search.allocation: must be 'heads' or 'model'",
        ),
        (lambda f: f["search"].update(n_trials=-1), "search.n_trials: must be at least 0, got -1"),
    ],
)
def test_searches_and_costs_that_do_not_go_together(change, message, every_kind):
    fields = every_field(every_kind)
    change(fields)
    refused(fields, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda a: [a.pop(name) for name in list(a) if name.startswith("cost.")],
            "costs[0]: the sidecar has no arrays",
        ),
        (
            lambda a: a.update({"cost.0.pattern": a["cost.0.pattern"][:1]}),
            "must be columns of one length, got [(1,), (2",
        ),
        (
            lambda a: [a.update({n: a[n][:0]}) for n in list(a) if n.startswith("cost.")],
            "columns of one length, got [(0",
        ),
    ],
)
def test_cost_tables_are_in_the_sidecar(change, message, every_kind, tmp_path):
    artifact, arrays = every_kind
    change(arrays)
    with pytest.raises(ArtifactError) as caught:
        save(artifact, tmp_path / "cfg.yaml", arrays)
    assert message in str(caught.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"filter_layers": []}, "filter_layers: must not be empty"),
        ({"filter_layers": [2, 1]}, "must be different layers in ascending order"),
        ({"filter_layers": [1, 1]}, "must be different layers in ascending order"),
        (
            {"filter_layers": [1], "dense_layers": [0, 1]},
            "layer 1 is both in filter_layers and in dense_layers",
        ),
        (
            {"filter_layers": [3]},
            "decode.omnikv.filter_layers names layer 3, the model has 3 layers",
        ),
        (
            {"filter_layers": [1], "dense_layers": [9]},
            "decode.omnikv.dense_layers names layer 9, the model has 3",
        ),
        ({"filter_layers": [1], "budget": 0}, "budget"),
        (
            {"filter_layers": [1], "budget": 1.0},
            "must be a whole number of tokens, or a share of the context",
        ),
        ({"filter_layers": [1], "selector": "first"}, "selector"),
        ({"filter_layers": [1], "window": 0}, "window"),
        ({"filter_layers": [1], "layers": [2]}, "layers"),
    ],
)
def test_decode_sections_that_cannot_be(section, message, make):
    fields = make().model_dump(mode="json") | {"decode": {"omnikv": section}}
    with pytest.raises(ArtifactError, match=message):
        to_artifact(fields)
