"""Formats that name layers, KV heads or one threshold, in and out, with their reports.

The files are made here, in the exact shape of each tool's own.
"""

from __future__ import annotations

import json
import pickle
import zipfile

import numpy as np
import pytest

import artifacts
from artifacts import ArtifactError, HeadwiseError, load_pair
from artifacts.__main__ import main
from artifacts.cli.arguments import STDOUT
from artifacts.commands import validate
from artifacts.commands.convert import Config, run
from tests.artifacts.conftest import build

SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 64, "max_positions": 8192}


def convert(file, out, **options):
    return json.loads(run(Config(file=file, out=out, as_json=STDOUT, **options)).text)["report"]


def effects(report):
    return {(note["effect"], note["heads"]) for note in report["notes"]}


def there_and_back(tmp_path, name, content, target, **options):
    """The artifact and its arrays, what was said on both ways, and the file that came back."""
    file, cfg, back = tmp_path / name, tmp_path / "cfg.yaml", tmp_path / "back" / name
    back.parent.mkdir()
    file.write_bytes(content)
    there = convert(file, cfg, **SHAPE | options)
    return *load_pair(cfg), there, convert(cfg, back, target=target), back


MODELOPT = {
    "config_groups": {
        "group_0": {
            "algorithm": "skip_softmax", "targets": ["LlamaAttention"],
            "ignore": ["model.layers.0.self_attn"],
            "threshold_scale_factor": {
                "formula": "a * exp(b * target_sparsity)", "prefill": {"a": 5.5, "b": 7.0},
                "decode": {"a": 0.2, "b": 9.0},
            },
            "target_sparsity": {"prefill": 0.5, "decode": 0.4},
        },
        "group_1": {
            "algorithm": "sparse_softmax", "targets": ["LlamaAttention"], "sparsity_n": 2,
            "sparsity_m": 4,
            "dense_sink_tokens": 0, "dense_recent_tokens": 64,
        },
    },
    "producer": {"name": "modelopt", "version": "0.47.0"},
}  # fmt: skip


def test_modelopt_there_and_back(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 3,
        "sparse_attention_config": MODELOPT,
    }
    data = json.dumps(config).encode()
    artifact, _, there, back, file = there_and_back(
        tmp_path, "config.json", data, "modelopt", source="modelopt"
    )
    assert file.read_bytes() == data and not back["lossy"]
    assert (
        artifact.prefill.layers[0] == ("dense",) * 4
        and artifact.prefill.imported.format == "modelopt"
    )
    name = artifact.prefill.layers[1][0]
    assert artifact.patterns[name] == artifacts.SkipSoftmax(scale_factor=182.135)
    assert (there["heads"], there["exact"], there["lossy"]) == (12, 4, True)
    assert (
        effects(there) == {("chooses otherwise", 8), ("not carried over", 8)}
        and len(there["notes"]) == 3
    )
    assert "headwise evaluate" in there["measure"]


@pytest.mark.parametrize(
    ("given", "notes"),
    [
        ({"algorithm": "skip_softmax", "target_sparsity": {"prefill": 0.5}}, []),
        ({"target_sparsity": 0.5}, ["decode skips 0.5 of its tiles"]),
        (
            {
                "config_groups": {"a": {"sparse_algo": "softmax_skip"}},
                "sparse_softmax": {"sparsity_n": 2},
            },
            ["of every few keys some are kept in prefill: 2 of None"],
        ),
    ],
)
def test_the_same_without_groups_and_as_it_once_was(tmp_path, given, notes):
    file = _write(tmp_path, {"sparse_attention_config": given}, "config.json")
    said = convert(file, tmp_path / "cfg.yaml", source="modelopt", layers=3, **SHAPE)
    artifact = load_pair(tmp_path / "cfg.yaml")[0]
    assert artifacts.analysis.density.mean_density(artifact, 8192) == pytest.approx(0.5, abs=0.02)
    assert [note["what"] for note in said["notes"][1:]] == notes


FIT = {"a": 5.5, "b": 7.0}
FORMULA = "a * exp(b * target_sparsity)"


@pytest.mark.parametrize(
    ("threshold", "target", "prefill", "decode"),
    [
        (
            {"formula": FORMULA, "coefficients": FIT},
            {"prefill": 0.5, "decode": 0.3},
            182.135,
            "0.3 of its tiles",
        ),
        ({"formula": "a*exp(b*target_sparsity)", **FIT}, 0.5, 182.135, "0.5 of its tiles"),
        ({"prefill": 40, "coefficients": FIT}, {"prefill": 0.9}, 40, "0.5 of its tiles"),
        (
            {"prefill": FIT, "decode": {"a": 0.2, "b": 9.0}},
            {"prefill": 0.5},
            182.135,
            "0.5 of its tiles",
        ),
        ({"prefill": FIT, "decode": {"a": 0.2, "b": 9.0}}, None, 182.135, "0.5 of its tiles"),
        ({"prefill": 40, "decode": 7}, None, 40, "tiles by a scale factor of 7"),
        (40, {"prefill": 0.9}, 40, "tiles by a scale factor of 40"),
        ({"formula": FORMULA, "prefill": FIT}, {"prefill": 0.0}, 5.5, None),
    ],
)
def test_every_form_of_a_scale_factor_is_read_and_decode_is_said(
    tmp_path, threshold, target, prefill, decode
):
    """By a exp(b target): 5.5 exp(7 / 2) = 182.135. A target that is missing is 0.5."""
    given = {"threshold_scale_factor": threshold} | (
        {} if target is None else {"target_sparsity": target}
    )
    said = convert(
        _write(tmp_path, given), tmp_path / "cfg.yaml", source="modelopt", layers=3, **SHAPE
    )
    (pattern,) = load_pair(tmp_path / "cfg.yaml")[0].patterns.values()
    assert pattern == artifacts.SkipSoftmax(scale_factor=prefill)
    dropped = [note["what"] for note in said["notes"] if note["effect"] == "not carried over"]
    assert dropped == ([] if decode is None else [f"decode skips {decode}"])


def test_what_was_imported_fits_the_model_and_is_merged_with_its_section(tmp_path):
    """Prefill of one tool and decode of another: both files come back as they were."""
    one, two = tmp_path / "prefill.yaml", tmp_path / "decode.yaml"
    options = {"full_attention_layers": "0,2", "decode_keep_tokens": 64, "num_hidden_layers": 3}
    convert(_write(tmp_path, MODELOPT), one, source="modelopt", layers=3, **SHAPE)
    convert(_write(tmp_path, options, "y.json"), two, source="sparse_vllm", **SHAPE)
    assert (
        main(["merge", str(one), "--decode", str(two), "--out", str(tmp_path / "both.yaml")]) == 0
    )
    said = convert(tmp_path / "both.yaml", tmp_path / "a.json", target="modelopt")
    assert [note["what"] for note in said["notes"]] == [
        "the decode section has no place in this format"
    ]
    said = convert(tmp_path / "both.yaml", tmp_path / "b.json", target="sparse_vllm")
    assert [note["what"] for note in said["notes"]] == [
        "the prefill section has no place in this format"
    ]
    assert json.loads((tmp_path / "a.json").read_text()) == MODELOPT
    assert json.loads((tmp_path / "b.json").read_text()) == options
    validated = validate.run(validate.Config(file=tmp_path / "both.yaml", level="error"))
    assert validated.status == 0


@pytest.mark.parametrize("given", [3.5, {"prefill": 3.5}, {"prefill": {"a": 3.5, "b": 0}}])
def test_a_threshold_for_all_heads_there_and_back(tmp_path, given):
    convert(
        _write(tmp_path, {"threshold_scale_factor": given, "ignore": ["model.layers.2.self_attn"]}),
        tmp_path / "cfg.yaml",
        source="modelopt",
        layers=3,
        **SHAPE,
    )
    artifact, _ = load_pair(tmp_path / "cfg.yaml")
    assert set(artifact.patterns) == {"skip_3.5", "dense"}
    # As if it had been searched, so that it is not handed back as it was read.
    found = build()
    prefill = found.prefill.model_copy(
        update={"layers": artifact.prefill.layers, "growth": None, "front": None}
    )
    own = found.model_copy(update={"patterns": artifact.patterns, "prefill": prefill})
    artifacts.save(own, tmp_path / "own.yaml")
    said = convert(tmp_path / "own.yaml", tmp_path / "x.json", target="modelopt")
    made = json.loads((tmp_path / "x.json").read_text())["sparse_attention_config"][
        "config_groups"
    ]["group_0"]
    assert made["threshold_scale_factor"]["prefill"] == {"a": 3.5, "b": 0.0}
    assert made["ignore"] == ["model.layers.2.self_attn"] and effects(said) == {
        ("chooses otherwise", 8)
    }


def test_modelopt_of_patterns_that_were_searched(tmp_path):
    artifacts.save(build(), tmp_path / "cfg.yaml")
    said = convert(tmp_path / "cfg.yaml", tmp_path / "x.json", target="modelopt", model="my/model")
    made = json.loads((tmp_path / "x.json").read_text())["sparse_attention_config"][
        "config_groups"
    ]["group_0"]
    expected = 1 - artifacts.analysis.density.mean_density(build(), 4096)
    assert made["target_sparsity"]["prefill"] == pytest.approx(expected, abs=1e-4)
    assert made["ignore"] == ["model.layers.1.self_attn"] and made["targets"] == ["LlamaAttention"]
    assert (said["heads"], said["exact"]) == (12, 4) and "threshold_scale_factor" not in made
    assert "cfg.yaml back.yaml --model my/model --fidelity" in said["measure"]
    with pytest.raises(HeadwiseError, match="must have one group of skip_softmax, got 0"):
        convert(
            _write(tmp_path, {"config_groups": {}}), tmp_path / "y.yaml", source="modelopt", **SHAPE
        )


def test_an_export_is_measured_by_what_the_tool_makes_of_it(tmp_path, monkeypatch):
    """The report's command reads the file back into the model that it was written from."""
    monkeypatch.chdir(tmp_path)
    artifacts.save(build(), tmp_path / "cfg.yaml")
    for target in ("minference", "sparse_attention_config", "modelopt"):
        command = convert(tmp_path / "cfg.yaml", tmp_path / "out.json", target=target)["measure"]
        words = command.partition("headwise ")[2].partition(" && ")[0].split()
        assert main(words) == 0
        back = load_pair(tmp_path / "back.yaml")[0].model
        sizes = (back.num_layers, back.num_heads, back.num_kv_heads, back.max_positions)
        assert sizes == (3, 4, 2, 8192), target


@pytest.mark.parametrize(
    ("format", "content"),
    [("modelopt", MODELOPT), ("sparse_vllm", {"full_attention_layers": "0,2"})],
)
def test_a_file_that_does_not_say_how_many_layers_there_are(tmp_path, format, content):
    with pytest.raises(
        ArtifactError, match=r"does not say how many layers the model has: give .* --layers"
    ):
        convert(_write(tmp_path, content), tmp_path / "cfg.yaml", source=format, **SHAPE)


def _write(tmp_path, value, name="x.json"):
    (tmp_path / name).write_text(json.dumps(value))
    return tmp_path / name


@pytest.mark.parametrize(
    "given",
    [
        {"index_topk_pattern": "FFSSFS"},
        {
            "indexer_types": ["full", "full", "shared", "shared", "full", "shared"],
            "index_topk_pattern": "FSSSSS",
        },
    ],
)
def test_index_pattern_there_and_back(tmp_path, given):
    config = {"num_hidden_layers": 6, "index_topk": 1024, **given}
    data = json.dumps(config).encode()
    artifact, _, there, back, file = there_and_back(
        tmp_path, "config.json", data, "index_topk_pattern"
    )
    omnikv = artifact.decode.omnikv
    assert (omnikv.filter_layers, omnikv.dense_layers, omnikv.budget) == ((1, 4), (), 1024)
    made = json.loads(file.read_text())
    assert made["index_topk_pattern"] == "FFSSFS" and made["index_topk"] == 1024
    assert made["indexer_types"] == ["full", "full", "shared", "shared", "full", "shared"]
    assert (there["heads"], there["exact"], there["unit"]) == (6, 0, "layer")
    assert back["exact"] == 0 and effects(there) == {("computes more", 3), ("chooses otherwise", 3)}
    assert effects(back) == {("keeps less", 3), ("chooses otherwise", 3)}


@pytest.mark.parametrize(
    ("offset", "expected"), [({}, "FFSSSFSSSF"), ({"index_skip_topk_offset": 3}, "FFFSSSFSSS")]
)
def test_index_frequencies_are_read_as_the_tools_read_them(tmp_path, offset, expected):
    file = _write(
        tmp_path, {"num_hidden_layers": 10, "index_topk_freq": 4, **offset}, "config.json"
    )
    convert(file, tmp_path / "cfg.yaml", **SHAPE)
    convert(tmp_path / "cfg.yaml", tmp_path / "back.json", target="index_topk_pattern")
    assert json.loads((tmp_path / "back.json").read_text())["index_topk_pattern"] == expected


def test_sparse_vllm_there_and_back(tmp_path):
    options = {
        "sparse_method": "omnikv", "full_attention_layers": "0,2,3", "decode_keep_tokens": 2048,
        "sink_keep_tokens": 4,
        "recent_keep_tokens": 32, "engine_prefill_chunk_size": 4096,
    }  # fmt: skip
    data = json.dumps(options).encode()
    artifact, _, there, back, file = there_and_back(
        tmp_path, "omnikv.json", data, "sparse_vllm", source="sparse_vllm", layers=6
    )
    omnikv = artifact.decode.omnikv
    assert (omnikv.filter_layers, omnikv.dense_layers, omnikv.budget) == ((0, 3), (2,), 2048)
    assert file.read_bytes() == data
    assert (there["exact"], back["exact"], back["lossy"]) == (3, 6, False)
    assert effects(there) == {("keeps less", 3), ("not carried over", 0)}
    run_set = tmp_path / "set.yaml"
    main(["set", str(tmp_path / "cfg.yaml"), "decode.omnikv.budget=0.25", "--out", str(run_set)])
    said = convert(run_set, tmp_path / "new.json", target="sparse_vllm")
    made = json.loads((tmp_path / "new.json").read_text())
    assert made["full_attention_layers"] == "0,2,3" and made["decode_keep_tokens"] == 2048
    assert ("chooses otherwise", 3) in effects(said) and said["exact"] == 3


def test_what_the_search_of_sparse_vllm_selected(tmp_path):
    found = {
        "selected_full_layers": [0, 3],
        "full_attention_layers": "0,3",
        "num_hidden_layers": 5,
        "topk": 512,
    }
    convert(_write(tmp_path, found, "selected_full_layers.json"), tmp_path / "cfg.yaml", **SHAPE)
    omnikv = load_pair(tmp_path / "cfg.yaml")[0].decode.omnikv
    assert (omnikv.filter_layers, omnikv.budget) == ((0, 3), 512)


def npy(table):
    import io

    stream = io.BytesIO()
    np.save(stream, np.array(table, dtype="<i4"))
    return stream.getvalue()


def test_kascade_there_and_back(tmp_path):
    data, name = npy([[0, 1]] * 4), "Toy-1B_layers_0_2.npy"
    artifact, arrays, there, back, file = there_and_back(tmp_path, name, data, "kascade")
    assert artifact.decode.omnikv.filter_layers == (0, 2) and artifact.decode.omnikv.budget == 0.1
    assert file.read_bytes() == data
    assert not arrays
    # Layer 0 alone does the same on both sides.
    assert (there["heads"], there["exact"], back["exact"]) == (8, 2, 2)
    assert effects(there) == {("computes more", 2), ("chooses otherwise", 4), ("keeps less", 0)}
    assert any("--recompute_layers 0 2 --topk 10" in note["what"] for note in back["notes"])
    with pytest.raises(ArtifactError, match=r"call it MODEL_layers_0_2\.npy"):
        convert(tmp_path / "cfg.yaml", tmp_path / "map.npy", target="kascade")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("map.npy", npy([[0, 1]]), "the name must say the anchors"),
        ("M_layers_1.npy", npy([[0, 1], [0, 1]]), "0 among them, got 1"),
        ("M_layers_0_5.npy", npy([[0, 1], [0, 1]]), "layers from 0 to 1"),
        ("M_layers_0.npy", npy([[0, 2], [0, 1]]), "must hold KV heads from 0 to 1, got 0 to 2"),
        ("M_layers_0.npy", npy([0, 1]), "must be int32 of shape"),
        ("M_layers_0.npy", npy([[0, 1]])[:-1], "bytes for 2 heads of 4 each"),
        ("M_layers_0.npy", b"nonsense", "is no .npy file"),
    ],
)
def test_maps_that_cannot_be(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ArtifactError, match=message):
        convert(tmp_path / name, tmp_path / "cfg.yaml", **SHAPE)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_kvzip_there_and_back(tmp_path, dtype):
    import torch

    scores = torch.tensor([[0.03, 1.0], [0.4, 0.11], [0.9, 0.2]], dtype=getattr(torch, dtype))
    torch.save(scores, tmp_path / "made.pt")
    artifact, _, there, back, file = there_and_back(
        tmp_path, "toy-scbench-0.pt", (tmp_path / "made.pt").read_bytes(), "kvzip", sparsity=0.5
    )
    # As KVzip cuts: 3 of 6 kept, less the one at the cut.
    kept = [[name == "full" for name in row] for row in artifact.kv_cache.layers]
    assert kept == [[False, True], [False, False], [True, False]]
    assert (there["exact"], there["heads"], there["unit"]) == (2, 6, "KV head")
    assert effects(there) == {("chooses otherwise", 4), ("chooses otherwise", 0), ("same", 0)}
    assert ("keeps less", 4) in effects(back)
    for weights_only in (True, False):
        found = torch.load(file, weights_only=weights_only)
        assert found.dtype == scores.dtype and torch.equal(found, scores)


def test_tensors_that_cannot_be(tmp_path):
    import torch

    class Evil:
        def __reduce__(self):
            return print, ("called",)

    for number, (value, message) in enumerate(
        (
            (torch.zeros(3), "must be of shape"),
            (torch.full((2, 2), 2.0), "must hold scores from 0 to 1, got 2 to 2"),
            (torch.tensor([[0.5, float("nan")]]), "must hold scores from 0 to 1"),
            (
                torch.zeros(2, 2, dtype=torch.int64),
                "is no .pt file of one tensor of floating-point numbers",
            ),
            ({"a": torch.zeros(2)}, "is no .pt file of one tensor"),
            (torch.zeros(1).expand(2**30, 2**30), "must be of shape"),
            (torch.zeros(2, 2).to_sparse(), "is no .pt file of one tensor"),
        )
    ):
        file = tmp_path / f"{number}.pt"
        torch.save(value, file)
        with pytest.raises(ArtifactError, match=message):
            convert(file, tmp_path / "cfg.yaml", **SHAPE)
    with zipfile.ZipFile(tmp_path / "evil.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Evil()))
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(2**23))
    with pytest.raises(
        ArtifactError, match=r"bomb\.pt: is no \.pt file of one tensor: 'unpacks to 8388608 bytes'"
    ):
        convert(tmp_path / "bomb.pt", tmp_path / "cfg.yaml", **SHAPE)
    for data in (b"", b"nonsense", (tmp_path / "evil.pt").read_bytes()):
        (tmp_path / "x.pt").write_bytes(data)
        with pytest.raises(ArtifactError, match=r"x\.pt: is no \.pt file of one tensor"):
            convert(tmp_path / "x.pt", tmp_path / "cfg.yaml", **SHAPE)
