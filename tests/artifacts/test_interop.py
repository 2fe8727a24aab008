"""Lists of heads and tables of KV heads, in and out, and the files of all formats refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest

import artifacts
from artifacts import (
    ArtifactError,
    AShape,
    BlockSparse,
    HeadwiseError,
    Streaming,
    VerticalSlash,
    load,
    load_pair,
)
from artifacts.cli.arguments import STDOUT
from artifacts.commands.convert import Config, run
from tests.artifacts.conftest import build

FILES = Path(__file__).parent / "interop"
MODEL = FILES / "model.json"


def convert(file, out, **options):
    return run(Config(file=file, out=out, **options))


def report(outcome):
    return json.loads(outcome.text)["report"]


def imported(tmp_path, name, **options):
    out = tmp_path / "cfg.yaml"
    said = report(convert(FILES / name, out, as_json=STDOUT, **{"config": MODEL, **options}))
    return *load_pair(out), said


@pytest.mark.parametrize(
    "name", ["head_patterns.json", "error_counts.json", "sparse_attention_config.json"]
)
def test_a_file_comes_back_as_it_was(tmp_path, name):
    imported(tmp_path, name)
    target = "sparse_attention_config" if name == "sparse_attention_config.json" else "minference"
    said = report(
        convert(tmp_path / "cfg.yaml", tmp_path / "back.json", target=target, as_json=STDOUT)
    )
    assert json.loads((tmp_path / "back.json").read_text()) == json.loads(
        (FILES / name).read_text()
    )
    assert (said["heads"], said["exact"], said["lossy"]) == (8, 8, False)


def test_every_name_of_minference(tmp_path):
    artifact, arrays, said = imported(tmp_path, "head_patterns.json")
    first, second = artifact.prefill.layers
    patterns = [artifact.patterns[name] for name in (*first, *second)]
    assert patterns == [
        VerticalSlash(vertical=1000, slash=6096),
        AShape(sink=128, window=1024),
        BlockSparse(blocks=100),
        VerticalSlash(vertical=30, slash=800),
        VerticalSlash(vertical=1000, slash=6096),
        VerticalSlash(vertical=3500, slash=100),
        AShape(sink=128, window=1024),
        VerticalSlash(vertical=4096, slash=4096, coverage=0.9),
    ]
    assert artifact.search is None and artifact.model.weights_sha256 is None
    assert (
        artifact.prefill.imported.format == "minference"
        and artifact.prefill.imported.scores == "recall"
    )
    assert artifact.model.architecture == "TinyForCausalLM" and artifact.model.head_dim == 64
    assert arrays["imported.score"][1, 1] == 1.00004
    assert {note["effect"] for note in said["notes"]} == {"computes more", "same"}


def test_scores_that_are_no_recalls_are_kept_and_said(tmp_path):
    artifact, arrays, said = imported(tmp_path, "error_counts.json")
    assert (
        artifact.prefill.imported.scores == "other" and arrays["imported.score"].max() == 14994473
    )
    assert any("no recalls" in note["what"] for note in said["notes"])
    convert(tmp_path / "cfg.yaml", tmp_path / "back.json", target="minference")
    assert "14994473]" in (tmp_path / "back.json").read_text()


def test_vllm_and_sglang_read_their_own_way(tmp_path):
    artifact, _, said = imported(tmp_path, "sparse_attention_config.json")
    assert artifact.patterns[artifact.prefill.layers[0][1]] == VerticalSlash(
        vertical=130, slash=800, last_q=32
    )
    assert artifact.prefill.dense_below == 16385
    assert [note["heads"] for note in said["notes"] if "130" in note["what"]] == [2]
    with pytest.raises(
        ArtifactError, match=r"layer 0, head 1: must be one of vertical_and_slash, got 'stream_llm'"
    ):
        convert(
            FILES / "head_patterns.json",
            tmp_path / "x.yaml",
            source="sparse_attention_config",
            config=MODEL,
        )


ANGELSLIM = {
    "schema_version": 1,
    "model_fingerprint": {
        "model_type": "toy",
        "rope_theta": 1000000.0,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 128,
        "max_position_embeddings": 32768,
    },
    "best_pattern": {
        "2": {"0": ["stream_llm", 128, 1024, 1], "1": ["block_sparse", 100, 1, 1]},
        "0": {"1": ["vertical_and_slash", 500, 700, 1], "0": ["vertical_and_slash", 64, 64, 1]},
    },
}


def angelslim(tmp_path, change=(), **options):
    document = copy.deepcopy(ANGELSLIM)
    for path, value in change:
        *folders, last = path.split(".")
        within = document
        for folder in folders:
            within = within[folder]
        within[last] = value
    (tmp_path / "pattern.json").write_text(json.dumps(document))
    options = {"head_dim": 64, "as_json": STDOUT, **options}
    said = report(convert(tmp_path / "pattern.json", tmp_path / "cfg.yaml", **options))
    return *load_pair(tmp_path / "cfg.yaml"), said


def test_angelslims_pattern_file_holds_minferences_entries(tmp_path):
    artifact, _, said = angelslim(tmp_path)
    assert artifact.prefill.layers == (
        ("vs_64_64", "vs_500_700"),
        ("vs_1000_6096",) * 2,
        ("a_128_1024", "bs_100"),
    )
    model = artifact.model
    sizes = (model.num_layers, model.num_heads, model.num_kv_heads, model.max_positions)
    assert sizes == (3, 2, 1, 32768)
    # The 1 in place of a score says nothing.
    assert artifact.prefill.imported.scores is None
    assert {(note["effect"], note["heads"]) for note in said["notes"]} == {
        ("filled in", 2),
        ("chooses otherwise", 1),
        ("same", 0),
    }
    assert (said["heads"], said["exact"]) == (6, 3)
    convert(tmp_path / "cfg.yaml", tmp_path / "list.json", target="minference")
    listed = json.loads((tmp_path / "list.json").read_text())
    assert [listed[0], listed[2]] == [
        ANGELSLIM["best_pattern"]["0"],
        ANGELSLIM["best_pattern"]["2"],
    ]


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ([("schema_version", 2)], {}, "schema_version must be 1, got 2"),
        ([("best_pattern", [])], {}, "best_pattern must be a mapping from layers to heads, got []"),
        ([("best_pattern.x", {})], {}, "best_pattern: a layer must be a number from 0 on, got 'x'"),
        (
            [("best_pattern.5000", {})],
            {},
            "best_pattern: a layer must be a number from 0 on, got '5000'",
        ),
        ([("best_pattern.2", [])], {}, "layer 2: must be a mapping from heads to patterns, got []"),
        ([("best_pattern.3", {})], {}, "names layer 3, the model has 3 layers"),
        (
            [("best_pattern.0.2", ["stream_llm", 1, 1, 1])],
            {},
            "names head 2, the model has 2 query heads",
        ),
        ([("model_fingerprint", 7)], {}, "model_fingerprint must be a mapping, got 7"),
        (
            [("model_fingerprint.num_attention_heads", "2")],
            {},
            "model_fingerprint.num_attention_heads: must be a whole number, got '2'",
        ),
        (
            [],
            {"head_dim": None},
            "does not say how many channels a head the model has: give --config",
        ),
        ([], {"kv_heads": 2}, "--kv-heads says 2 KV heads, the file says 1: which model is it?"),
        (
            [],
            {"layers": 4},
            "model_fingerprint.num_hidden_layers is 3, the model has 4: which one is it?",
        ),
    ],
)
def test_pattern_files_of_angelslim_that_are_refused(tmp_path, change, options, said):
    with pytest.raises(ArtifactError) as caught:
        angelslim(tmp_path, change, **options)
    assert said in str(caught.value) and not (tmp_path / "cfg.yaml").exists()


def test_a_fingerprint_of_another_model_is_refused(tmp_path):
    config = {**ANGELSLIM["model_fingerprint"], "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert angelslim(tmp_path, head_dim=None, config=tmp_path)[0].model.head_dim == 64
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 10000}))
    with pytest.raises(
        ArtifactError,
        match=r"model_fingerprint.rope_theta is 1000000.0, the model has 10000: which",
    ):
        angelslim(tmp_path, head_dim=None, config=tmp_path)


def test_what_is_left_out_is_filled_in_as_minference_does(tmp_path):
    file = tmp_path / "short.json"
    file.write_text('[{"0": ["stream_llm", 64, 512, 0.5], "3": ["stream_llm", 64, 512, 0.5]}]')
    outcome = convert(file, tmp_path / "cfg.yaml", config=MODEL, as_json=STDOUT)
    artifact = load(tmp_path / "cfg.yaml")
    assert artifact.prefill.layers == (
        ("a_64_512", "vs_1000_6096", "vs_1000_6096", "a_64_512"),
        ("vs_1000_6096",) * 4,
    )
    (note,) = [note for note in report(outcome)["notes"] if note["effect"] == "filled in"]
    assert (note["heads"], report(outcome)["exact"], report(outcome)["lossy"]) == (6, 2, True)


def test_layers_that_slide_are_left_alone(tmp_path):
    config = json.loads(MODEL.read_text()) | {
        "layer_types": ["sliding_attention", "full_attention"]
    }
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    artifact, _, said = imported(tmp_path, "head_patterns.json", config=tmp_path)
    assert artifact.prefill.layers[0] is None and len(artifact.prefill.layers[1]) == 4
    assert said["exact"] == 4 and "bs_100" not in artifact.patterns


def test_changed_heads_are_written_anew_with_their_recall(tmp_path):
    artifact, arrays, _ = imported(tmp_path, "head_patterns.json")
    row = ("a_128_1024", *artifact.prefill.layers[0][1:])
    prefill = artifact.prefill.model_copy(update={"layers": (row, artifact.prefill.layers[1])})
    arrays = arrays | {"chosen.recall": np.full((2, 4), 0.25, dtype=np.float32)}
    artifacts.save(artifact.model_copy(update={"prefill": prefill}), tmp_path / "new.yaml", arrays)
    convert(tmp_path / "new.yaml", tmp_path / "back.json", target="minference")
    first, _ = json.loads((tmp_path / "back.json").read_text())
    assert first["0"] == ["stream_llm", 128, 1024, 0.25] and first["2"] == [
        "block_sparse",
        8,
        1,
        0.75,
    ]


def test_an_export_says_what_does_not_fit(tmp_path, every_kind):
    artifact, arrays = every_kind
    artifacts.save(artifact, tmp_path / "cfg.yaml", arrays)
    said = report(
        convert(tmp_path / "cfg.yaml", tmp_path / "out.json", target="minference", as_json=STDOUT)
    )
    layers = json.loads((tmp_path / "out.json").read_text())
    names = [[layers[layer][str(head)][:3] for head in range(4)] for layer in range(5)]
    assert names[0] == [
        ["vertical_and_slash", 100, 1800],
        ["vertical_and_slash", 30, 2048],
        ["stream_llm", 64, 512],
        ["block_sparse", 9, 1],
    ]
    assert names[1] == [["vertical_and_slash", 31, 8192]] * 4
    assert names[2][1:] == [
        ["stream_llm", 64, 512],
        ["stream_llm", 64, 1024],
        ["stream_llm", 64, 256],
    ]
    assert names[3][0] == ["vertical_and_slash", 67, 256] and layers[0]["0"][3] == pytest.approx(
        0.5
    )
    by_what = {note["what"]: (note["effect"], note["heads"]) for note in said["notes"]}
    assert by_what["a coverage is left out: always all that the sizes allow"] == (
        "computes more",
        1,
    )
    assert by_what["the last 64 queries choose, here 32"] == ("chooses otherwise", 1)
    assert by_what["always 100 blocks, here 9"] == ("computes more", 1)
    assert by_what["the kv_cache section has no place in this format"] == ("not carried over", 0)
    assert by_what["sizes go with the length here; written are those of 4096 tokens"] == (
        "not carried over",
        0,
    )
    assert by_what["written is prefill.layers, of a front of 2 points"] == ("not carried over", 0)
    assert by_what["dense is written as 8,192 diagonals"] == ("same", 4)
    assert by_what["skip-softmax is written as dense: nothing is skipped"] == ("computes more", 1)
    told = "memory units are written as stream_llm: what they look up is left out"
    assert by_what[told] == ("keeps less", 1) and names[4][3] == ["stream_llm", 128, 1024]
    assert said["lossy"] and "cfg.yaml back.yaml --model MODEL --fidelity" in said["measure"]


def test_an_export_for_vllm_takes_minferences_own_substitutes(tmp_path, make):
    artifacts.save(make(), tmp_path / "cfg.yaml")
    outcome = convert(
        tmp_path / "cfg.yaml",
        tmp_path / "out.json",
        target="sparse_attention_config",
        as_json=STDOUT,
    )
    first, *_ = json.loads((tmp_path / "out.json").read_text())
    assert [first[str(head)][:3] for head in range(4)] == [
        ["vertical_and_slash", 100, 1800],
        ["vertical_and_slash", 30, 2048],
        ["vertical_and_slash", 64, 512],
        ["vertical_and_slash", 1000, 6096],
    ]
    assert any(
        '"sparse_attention_threshold": 4095' in note["what"] for note in report(outcome)["notes"]
    )


def test_strict_writes_nothing_that_is_lossy(tmp_path, make):
    artifacts.save(make(), tmp_path / "cfg.yaml")
    outcome = convert(
        tmp_path / "cfg.yaml", tmp_path / "out.json", target="minference", strict=True
    )
    assert (
        outcome.status == 3
        and "wrote nothing" in outcome.text
        and not (tmp_path / "out.json").exists()
    )
    imported(tmp_path, "head_patterns.json")
    outcome = convert(
        tmp_path / "cfg.yaml", tmp_path / "out.json", target="minference", strict=True
    )
    assert outcome.status == 0 and (tmp_path / "out.json").exists()


def test_duo_attention_both_ways(tmp_path):
    artifact, _, said = imported(tmp_path, "full_attention_heads.tsv")
    # In decode a token sees recent_size tokens and itself.
    stream = "stream_64_193"
    assert artifact.kv_cache.policies[stream] == Streaming(
        sinks=64, window=193, positions="original"
    )
    assert artifact.kv_cache.layers == (("full", stream), (stream, "full"))
    assert artifact.patterns == {} and artifact.prefill.layers == (None, None)
    assert said["exact"] == 2 and ("keeps less", 2) in {
        (note["effect"], note["heads"]) for note in said["notes"]
    }
    out = tmp_path / "duo" / "full_attention_heads.tsv"
    out.parent.mkdir()
    convert(tmp_path / "cfg.yaml", out, target="duo_attention")
    assert out.read_text() == (FILES / "full_attention_heads.tsv").read_text()
    beside = json.loads((out.parent / "config.json").read_text())
    assert (beside["sink_size"], beside["recent_size"]) == (64, 192) and 0.24902343 < beside[
        "threshold"
    ] <= 0.6054687
    assert (
        convert(out, tmp_path / "again.yaml", config=MODEL, threshold=beside["threshold"]).status
        == 0
    )
    assert load(tmp_path / "again.yaml").kv_cache.layers == artifact.kv_cache.layers


@pytest.mark.parametrize(
    ("options", "full"),
    [
        ({"sparsity": 0.75}, [(1, 1)]),
        ({"sparsity": 0.0}, [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ({"sparsity": 1.0}, []),
        ({"threshold": 0.2}, [(0, 0), (1, 0), (1, 1)]),
    ],
)
def test_how_many_kv_heads_stream(tmp_path, options, full):
    artifact, _, _ = imported(tmp_path, "full_attention_heads.tsv", sinks=0, window=7, **options)
    rows = artifact.kv_cache.layers
    assert [
        (i, j) for i, row in enumerate(rows) for j, name in enumerate(row) if name == "full"
    ] == full
    assert artifact.kv_cache.policies.keys() == {name for row in rows for name in row}


def test_other_policies_and_a_models_config_beside(tmp_path, every_kind):
    artifact, arrays = every_kind
    artifacts.save(artifact, tmp_path / "cfg.yaml", arrays)
    said = report(
        convert(tmp_path / "cfg.yaml", tmp_path / "t.tsv", target="duo_attention", as_json=STDOUT)
    )
    effects = {note["what"]: note["effect"] for note in said["notes"]}
    assert (
        effects["h2o is written as full"] == effects["snapkv is written as full"] == "computes more"
    )
    assert (tmp_path / "t.tsv").read_text().split()[4:6] == ["0.000000000000000000e+00"] * 2
    (tmp_path / "config.json").write_text(MODEL.read_text())
    with pytest.raises(ArtifactError, match=r"config.json: is there and not DuoAttention's"):
        convert(tmp_path / "cfg.yaml", tmp_path / "t.tsv", target="duo_attention")
    assert (tmp_path / "config.json").read_text() == MODEL.read_text()


def test_an_artifact_without_the_section(tmp_path, make):
    artifacts.save(make(), tmp_path / "cfg.yaml")
    with pytest.raises(ArtifactError, match="has no kv_cache section"):
        convert(tmp_path / "cfg.yaml", tmp_path / "t.tsv", target="duo_attention")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {},
            "the file does not say how many KV heads, channels a head, positions the model has: "
            "give --config config.json or --kv-heads --head-dim --max-positions",
        ),
        (
            {"kv_heads": 2, "head_dim": 8},
            "how many positions the model has: give --config config.json or --max-positions",
        ),
        ({"config": MODEL, "heads": 8}, "--heads says 8 query heads, "),
        ({"config": MODEL, "layers": 1}, "--layers says 1 layers, "),
        ({"config": FILES / "none"}, "none: no such file"),
        ({"config": FILES / "error_counts.json"}, "must be a model's config.json"),
        (
            {"kv_heads": 3, "head_dim": 8, "max_positions": 64},
            "the KV heads must divide the 4 query heads, got 3",
        ),
        (
            {"kv_heads": 0, "head_dim": 8, "max_positions": 64},
            "--kv-heads: must be from 1 to 4096, got 0",
        ),
        (
            {"config": MODEL, "max_positions": 10**12},
            "--max-positions: must be from 1 to 2147483647, got 1000000000000",
        ),
        (
            {"kv_heads": 2, "head_dim": 8, "max_positions": 64, "layers": 5000},
            "--layers: must be from 1 to 4096",
        ),
        ({"config": MODEL, "sinks": 4}, "--sinks means nothing for minference"),
        ({"config": MODEL, "dense_below": -1}, "--dense-below must be at least 0, got -1"),
        (
            {"source": "minference", "target": "minference"},
            "give --from for an import or --to for an export",
        ),
        (
            {"source": "duo_attention", "config": MODEL, "sparsity": 1.5},
            "--sparsity must be from 0 to 1, got 1.5",
        ),
        (
            {"source": "duo_attention", "config": MODEL, "dense_tail": 64},
            "--dense-tail means nothing for duo_attention",
        ),
    ],
)
def test_options_that_are_refused(tmp_path, options, said):
    with pytest.raises(HeadwiseError) as caught:
        convert(FILES / "head_patterns.json", tmp_path / "cfg.yaml", **options)
    assert said in str(caught.value) and not list(tmp_path.iterdir())


def test_an_artifact_needs_a_target(tmp_path):
    artifacts.save(build(), tmp_path / "cfg.yaml")
    with pytest.raises(ArtifactError, match="say with --to what to write from it"):
        convert(tmp_path / "cfg.yaml", tmp_path / "x.json")


def test_flags_alone_say_the_shape(tmp_path):
    artifact, _, _ = imported(
        tmp_path,
        "head_patterns.json",
        config=None,
        kv_heads=1,
        head_dim=8,
        max_positions=99,
        model="my/model",
    )
    model = artifact.model
    assert model.name == "my/model"
    assert (model.num_kv_heads, model.head_dim, model.max_positions) == (1, 8, 99)
    assert artifact.prefill.dense_below == 1024


def test_numbers_that_were_chosen_are_kept(tmp_path):
    artifact, _, _ = imported(tmp_path, "head_patterns.json", dense_below=0, dense_tail=64)
    assert (artifact.prefill.dense_below, artifact.prefill.dense_tail) == (0, 64)


def test_a_config_that_claims_too_much(tmp_path):
    """The model's config.json comes from somewhere, too."""
    for field, value in (
        ("num_hidden_layers", 10**9),
        ("max_position_embeddings", 10**30),
        ("head_dim", -1),
    ):
        (tmp_path / "config.json").write_text(
            json.dumps(json.loads(MODEL.read_text()) | {field: value})
        )
        with pytest.raises(ArtifactError, match=f"{field}: must be from 1 to"):
            convert(FILES / "head_patterns.json", tmp_path / "cfg.yaml", config=tmp_path)


SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 64, "max_positions": 8192}
OPTIONS = {
    "minference": {"config": MODEL},
    "duo_attention": {"config": MODEL},
    "index_topk_pattern": SHAPE,
    "sparse_vllm": SHAPE | {"layers": 6},
    "modelopt": SHAPE | {"layers": 3},
}
REFUSED = [
    [cell.strip() for cell in row.split("|", 2)]
    for row in (FILES.parent / "refused_files.txt").read_text().splitlines()
    if not row.startswith("#")
]
LARGE = [
    ("minference", "[" * 100_000, "nested too deep"),
    ("minference", "[" + "{}," * 5000 + "{}]", "has 5001 layers, the most that make sense are"),
    ("minference", "[" + " " * 5 * 2**20 + "]", "has more than 4194304 bytes"),
    ("minference", '[{"0": ["stream_llm", 1, 1, ' + "9" * 10_000 + "]}]", "too many digits"),
    ("duo_attention", "0\t" * 5000 + "0\n", "line 1: more than 4096 layers or heads"),
    ("duo_attention", "0\n" * 5000, "line 4097: more than 4096 layers or heads"),
]


@pytest.mark.parametrize(
    ("format", "text", "says"),
    [*REFUSED, *LARGE],
    ids=[f"{format}-{says[-40:]}" for format, _, says in (*REFUSED, *LARGE)],
)
def test_files_that_are_refused(tmp_path, format, text, says):
    file = tmp_path / ("bad.tsv" if format == "duo_attention" else "bad.json")
    file.write_text(text.replace("\\t", "\t").replace("\\n", "\n"))
    with pytest.raises(ArtifactError) as caught:
        convert(file, tmp_path / "cfg.yaml", source=format, **OPTIONS[format])
    assert str(caught.value).startswith(f"{file}: ") and says in str(caught.value)
    assert list(tmp_path.iterdir()) == [file]
