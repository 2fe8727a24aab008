"""Conformance of other tools' formats: every format goes through import, export and round trip.

Files and published values are those that each tool's own code writes and reads.
"""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import artifacts
from artifacts import (
    Artifact,
    ArtifactError,
    HeadwiseError,
    SkipSoftmax,
    Streaming,
    load,
    load_pair,
)
from artifacts.analysis.density import mean_density
from artifacts.cli.arguments import STDOUT
from artifacts.commands import validate
from artifacts.commands.convert import Config, run
from artifacts.interop.formats import FORMATS, guess
from headwise.__main__ import main
from tests.artifacts.conftest import build, build_every_kind

FILES = Path(__file__).parents[1] / "artifacts" / "interop"
MODEL = FILES / "model.json"
# Of a config.json that ModelOpt wrote into.
KEY = "sparse_attention_config"
SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 64, "max_positions": 8192}
# Options of an import of each format.
OPTIONS = {
    "minference": {"config": MODEL},
    "duo_attention": {"config": MODEL},
    "modelopt": SHAPE | {"layers": 3},
}


def patterns_of(artifact: Artifact) -> str:
    """Pattern of each head, or policy of each KV head."""
    section = artifact.prefill if artifact.kv_cache is None else artifact.kv_cache
    return " / ".join(" ".join(row) for row in section.layers)


@dataclass(frozen=True)
class Case:
    """A file of a tool, its patterns, and the losses of import and export (outcome).

    comes_back: the export of the import equals the file.
    """

    format: str
    name: str
    data: bytes
    expected: str
    there: str
    back: str
    options: dict[str, Any] | None = None
    comes_back: bool = True

    @property
    def import_options(self) -> dict[str, Any]:
        return OPTIONS[self.format] if self.options is None else self.options

    def __str__(self) -> str:
        return f"{self.format}-{self.name}-{len(self.data)}"


def of_file(format: str, name: str, *outcomes: str, **more: Any) -> Case:
    file = FILES / name
    return Case(format, file.name, file.read_bytes(), *outcomes, **more)


CASES = [
    of_file(
        "minference",
        "head_patterns.json",
        "vs_1000_6096 a_128_1024 bs_100 vs_30_800 / "
        "vs_1000_6096 vs_3500_100 a_128_1024 vs_4096_4096_c90",
        "7 of 8 heads: 0 same, 1 computes more",
        "8 of 8 heads: ",
    ),
    of_file(
        "minference",
        "error_counts.json",
        " / ".join(["vs_30_800 vs_100_800 vs_170_800 vs_240_800"] * 2),
        "6 of 8 heads: 0 same, 2 computes more",
        "8 of 8 heads: ",
    ),
    # Missing heads are filled in as MInference does.
    of_file(
        "minference",
        "short.json",
        "a_64_512 vs_1000_6096 vs_1000_6096 a_64_512 / " + " ".join(["vs_1000_6096"] * 4),
        "2 of 8 heads: 0 same, 6 filled in",
        "8 of 8 heads: ",
        comes_back=False,
    ),
    # AngelSlim's pattern file, whose 1 in place of a score has no meaning.
    of_file(
        "minference",
        "pattern.json",
        "vs_64_64 vs_500_700 / vs_1000_6096 vs_1000_6096 / a_128_1024 bs_100",
        "3 of 6 heads: 0 same, 1 chooses otherwise, 2 filled in",
        "6 of 6 heads: ",
        options={"head_dim": 64},
        comes_back=False,
    ),
    # 5.5 exp(7 / 2) = 182.135.
    of_file(
        "modelopt",
        "modelopt/config.json",
        " / ".join([" ".join([name] * 4) for name in ("dense", "skip_182.135", "skip_182.135")]),
        "4 of 12 heads: 8 chooses otherwise, 8 not carried over",
        "12 of 12 heads: ",
        options=SHAPE,
    ),
    # In decode a token sees recent_size tokens and itself.
    of_file(
        "duo_attention",
        "full_attention_heads.tsv",
        "full stream_64_193 / stream_64_193 full",
        "2 of 4 KV heads: 0 same, 2 keeps less",
        "2 of 4 KV heads: 0 same, 2 computes more",
    ),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def convert(file: Path, out: Path, **options: Any) -> dict[str, Any]:
    """The report of a conversion."""
    with redirect_stdout(StringIO()) as printed:
        run(Config(file=file, out=out, as_json=STDOUT, **options))
    return json.loads(printed.getvalue())["report"]


def outcome(report: dict[str, Any]) -> str:
    """Heads that are the same on both sides, and effects on the others."""
    effects = {f"{note['heads']} {note['effect']}" for note in report["notes"]}
    counts = f"{report['exact']} of {report['heads']} {report['unit']}s"
    return f"{counts}: {', '.join(sorted(effects))}"


def notes(report: dict[str, Any]) -> list[str]:
    return [note["what"] for note in report["notes"]]


def imported(folder: Path, case: Case, **options: Any) -> dict[str, Any]:
    """Import a case's file, next to the others of its folder, into cfg.yaml."""
    (folder / case.name).write_bytes(case.data)
    if case.format == "duo_attention":
        (folder / "config.json").write_bytes((FILES / "config.json").read_bytes())
    arguments = {"source": case.format, **case.import_options, **options}
    return convert(folder / case.name, folder / "cfg.yaml", **arguments)


def case_of(path: str) -> Case:
    data = (FILES / path).read_bytes()
    return next(case for case in CASES if case.data == data)


def test_formats_every_entry_has_a_case_and_is_guessed_by_name():
    assert {case.format for case in CASES} == set(FORMATS)
    for case in CASES:
        assert guess(Path(case.name)) == case.format


@every_case
def test_import_reads_patterns_and_reports_losses(case, tmp_path):
    report = imported(tmp_path, case)
    artifact = load(tmp_path / "cfg.yaml")
    assert patterns_of(artifact) == case.expected
    assert outcome(report) == case.there
    assert artifact.search is None and artifact.model.weights_sha256 is None
    assert validate.run(validate.Config(file=tmp_path / "cfg.yaml")) == 0


@every_case
def test_export_of_an_import_returns_the_file(case, tmp_path):
    imported(tmp_path, case)
    back = tmp_path / "back" / case.name
    back.parent.mkdir()
    report = convert(tmp_path / "cfg.yaml", back, target=case.format)
    assert outcome(report) == case.back
    if case.comes_back:
        same = back.read_bytes() == case.data
        assert same or json.loads(back.read_bytes()) == json.loads(case.data)
    model = load(tmp_path / "cfg.yaml").model
    shape = {
        "layers": model.num_layers,
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_positions": model.max_positions,
    }
    convert(back, tmp_path / "again.yaml", source=case.format, **shape | case.import_options)
    assert patterns_of(load(tmp_path / "again.yaml")) == case.expected


@pytest.mark.parametrize("name", [name for name, format in FORMATS.items() if format.patterns])
def test_export_reports_a_command_that_reads_it_back(name, tmp_path, monkeypatch):
    """The report's command reads the file back into the model that it was written from."""
    monkeypatch.chdir(tmp_path)
    artifacts.save(build(), tmp_path / "cfg.yaml")
    command = convert(tmp_path / "cfg.yaml", tmp_path / "out.json", target=name)["measure"]
    assert main(command.partition("headwise ")[2].partition(" && ")[0].split()) == 0
    back = load(tmp_path / "back.yaml").model
    sizes = (back.num_layers, back.num_heads, back.num_kv_heads, back.max_positions)
    assert sizes == (3, 4, 2, 8192)


@pytest.mark.parametrize(
    ("file", "kind"),
    [("head_patterns.json", "recall"), ("error_counts.json", "other"), ("pattern.json", None)],
)
def test_import_minference_keeps_scores_and_reports_their_kind(file, kind, tmp_path):
    report = imported(tmp_path, case_of(file))
    artifact, arrays = load_pair(tmp_path / "cfg.yaml")
    assert artifact.prefill.imported.scores == kind
    assert any("no recalls" in what for what in notes(report)) == (kind == "other")
    if kind == "recall":
        assert arrays["imported.score"][1, 1] == 1.00004
    elif kind == "other":
        assert arrays["imported.score"].max() == 14994473


def test_export_minference_writes_changed_heads_with_their_recall(tmp_path):
    imported(tmp_path, case_of("head_patterns.json"))
    artifact, arrays = load_pair(tmp_path / "cfg.yaml")
    row = ("a_128_1024", *artifact.prefill.layers[0][1:])
    prefill = artifact.prefill.model_copy(update={"layers": (row, artifact.prefill.layers[1])})
    arrays = arrays | {"chosen.recall": np.full((2, 4), 0.25, dtype=np.float32)}
    artifacts.save(artifact.model_copy(update={"prefill": prefill}), tmp_path / "new.yaml", arrays)
    report = convert(tmp_path / "new.yaml", tmp_path / "back.json", target="minference")
    first, _ = json.loads((tmp_path / "back.json").read_text())
    assert first["0"] == ["stream_llm", 128, 1024, 0.25]
    assert first["2"] == ["block_sparse", 8, 1, 0.75]
    assert report["exact"] == 8


VS = "vertical_and_slash"


def test_export_minference_writes_the_nearest_pattern(tmp_path):
    artifact, arrays = build_every_kind()
    artifacts.save(artifact, tmp_path / "cfg.yaml", arrays)
    report = convert(tmp_path / "cfg.yaml", tmp_path / "out.json", target="minference")
    listed = json.loads((tmp_path / "out.json").read_text())
    assert [listed[0][str(head)][:3] for head in range(4)] == [
        [VS, 100, 1800],
        [VS, 30, 2048],
        ["stream_llm", 64, 512],
        ["block_sparse", 9, 1],
    ]
    assert listed[0]["0"][3] == pytest.approx(0.5)
    # Dense, and a layer with a sliding window: more diagonals than tokens.
    assert [listed[1][str(head)][:3] for head in range(4)] == [[VS, 31, 8192]] * 4
    assert (report["heads"], report["exact"]) == (20, 2)
    assert "always 100 blocks, here 9" in notes(report)
    assert "the kv_cache section has no place in this format" in notes(report)
    assert "written is prefill.layers, of a front of 2 points" in notes(report)


def test_export_duo_writes_other_policies_as_full(tmp_path):
    artifact, arrays = build_every_kind()
    artifacts.save(artifact, tmp_path / "cfg.yaml", arrays)
    report = convert(tmp_path / "cfg.yaml", tmp_path / "t.tsv", target="duo_attention")
    assert {"h2o is written as full", "snapkv is written as full"} <= set(notes(report))


@pytest.mark.parametrize("searched", [False, True])
def test_export_modelopt_has_one_threshold_or_a_target_density(searched, tmp_path):
    artifact = build()
    if searched:
        row = ("skip_3.5",) * 4
        prefill = artifacts.Prefill(dense_below=0, layers=(row, None, row))
        artifact = build(patterns={"skip_3.5": SkipSoftmax(scale_factor=3.5)}, prefill=prefill)
    artifacts.save(artifact, tmp_path / "cfg.yaml")
    report = convert(tmp_path / "cfg.yaml", tmp_path / "x.json", target="modelopt")
    group = json.loads((tmp_path / "x.json").read_text())[KEY]["config_groups"]["group_0"]
    assert group["ignore"] == ["model.layers.1.self_attn"]
    assert (report["heads"], report["exact"]) == (12, 4)
    if searched:
        assert group["threshold_scale_factor"]["prefill"] == {"a": 3.5, "b": 0.0}
        assert outcome(report) == "4 of 12 heads: 8 chooses otherwise"
    else:
        expected = 1 - mean_density(artifact, 4096)
        assert group["target_sparsity"]["prefill"] == pytest.approx(expected, abs=1e-4)


def test_convert_strict_writes_no_lossy_file(tmp_path):
    strict = {"out": tmp_path / "out.json", "target": "minference", "strict": True}
    artifacts.save(build(), tmp_path / "cfg.yaml")
    assert run(Config(file=tmp_path / "cfg.yaml", **strict)) == 3
    assert not (tmp_path / "out.json").exists()
    imported(tmp_path, case_of("head_patterns.json"))
    assert run(Config(file=tmp_path / "cfg.yaml", **strict)) == 0
    assert (tmp_path / "out.json").exists()


def test_import_leaves_sliding_layers_alone(tmp_path):
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    config = json.loads(MODEL.read_text()) | kinds
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    report = imported(tmp_path, case_of("head_patterns.json"), config=tmp_path)
    artifact = load(tmp_path / "cfg.yaml")
    assert artifact.prefill.layers[0] is None and len(artifact.prefill.layers[1]) == 4
    assert report["exact"] == 4 and "bs_100" not in artifact.patterns


def test_import_options_override_the_shape(tmp_path):
    flags = {"config": None, "kv_heads": 1, "head_dim": 8, "max_positions": 99, "dense_tail": 64}
    imported(tmp_path, case_of("head_patterns.json"), **flags)
    artifact = load(tmp_path / "cfg.yaml")
    assert (artifact.model.num_kv_heads, artifact.model.head_dim) == (1, 8)
    assert (artifact.prefill.dense_below, artifact.prefill.dense_tail) == (1024, 64)


def test_import_duo_streams_heads_below_a_threshold(tmp_path):
    """Which heads a share makes stream is in tests/artifacts/test_duo_attention.py."""
    case = case_of("full_attention_heads.tsv")
    imported(tmp_path, case, sinks=0, window=7, threshold=0.2)
    cache = load(tmp_path / "cfg.yaml").kv_cache
    assert cache.layers == (("full", "stream_0_7"), ("full", "full"))
    assert cache.policies["stream_0_7"] == Streaming(sinks=0, window=7, positions="original")


def test_export_duo_does_not_overwrite_a_model_config(tmp_path):
    """DuoAttention's sizes are in a config.json next to its table."""
    imported(tmp_path, case_of("full_attention_heads.tsv"))
    out = tmp_path / "out" / "full_attention_heads.tsv"
    out.parent.mkdir()
    convert(tmp_path / "cfg.yaml", out, target="duo_attention")
    sizes = json.loads((out.parent / "config.json").read_text())
    assert (sizes["sink_size"], sizes["recent_size"]) == (64, 192)
    assert 0.24902343 < sizes["threshold"] <= 0.6054687
    (out.parent / "config.json").write_text(MODEL.read_text())
    with pytest.raises(ArtifactError, match=r"config.json: exists and is not DuoAttention's"):
        convert(tmp_path / "cfg.yaml", out, target="duo_attention")
    assert (out.parent / "config.json").read_text() == MODEL.read_text()


FIT = {"a": 5.5, "b": 7.0}
FORMULA = "a * exp(b * target_sparsity)"
COEFFICIENTS = {"coefficients": FIT}
SPLIT = {"prefill": FIT, "decode": {"a": 0.2, "b": 9}}
HALF = "0.5 of its tiles"


@pytest.mark.parametrize(
    ("threshold", "target", "prefill", "decode"),
    [
        (
            {"formula": FORMULA, **COEFFICIENTS},
            {"prefill": 0.5, "decode": 0.3},
            182.135,
            "0.3 of its tiles",
        ),
        ({"formula": FORMULA.replace(" ", ""), **FIT}, 0.5, 182.135, HALF),
        ({"prefill": 40, **COEFFICIENTS}, {"prefill": 0.9}, 40, HALF),
        (SPLIT, None, 182.135, HALF),
        ({"prefill": 40, "decode": 7}, None, 40, "tiles by a scale factor of 7"),
        (40, {"prefill": 0.9}, 40, "tiles by a scale factor of 40"),
        ({"formula": FORMULA, "prefill": FIT}, {"prefill": 0.0}, 5.5, None),
    ],
)
def test_import_modelopt_reads_every_form_of_a_scale_factor(
    threshold, target, prefill, decode, tmp_path
):
    """By a exp(b target): 5.5 exp(7 / 2) = 182.135. A target that is missing is 0.5."""
    section = {"threshold_scale_factor": threshold}
    if target is not None:
        section["target_sparsity"] = target
    (tmp_path / "x.json").write_text(json.dumps(section))
    options = OPTIONS["modelopt"]
    report = convert(tmp_path / "x.json", tmp_path / "cfg.yaml", source="modelopt", **options)
    (pattern,) = load(tmp_path / "cfg.yaml").patterns.values()
    assert pattern == SkipSoftmax(scale_factor=prefill)
    dropped = [note["what"] for note in report["notes"] if note["effect"] == "not carried over"]
    assert dropped == ([] if decode is None else [f"decode skips {decode}"])


@pytest.mark.parametrize(
    "section",
    [
        {"algorithm": "skip_softmax", "target_sparsity": 0.5},
        {"config_groups": {"a": {"sparse_algo": "softmax_skip"}}},
    ],
)
def test_import_modelopt_without_thresholds_or_of_older_releases(section, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({KEY: section}))
    options = OPTIONS["modelopt"]
    convert(tmp_path / "config.json", tmp_path / "cfg.yaml", source="modelopt", **options)
    assert mean_density(load(tmp_path / "cfg.yaml"), 8192) == pytest.approx(0.5, abs=0.02)


def test_convert_into_keeps_sections_of_two_tools(tmp_path):
    """Into an artifact with search, evidence and decode of its model."""
    artifact, arrays = build_every_kind()
    own = artifacts.KVCache(policies={"f": artifacts.Full()}, layers=("f",) * 5)
    both = tmp_path / "both.yaml"
    artifacts.save(artifact.model_copy(update={"kv_cache": own}), both, arrays)
    table = "0.25\t1\n1\t0\n0\t1\n1\t1\n1\t1\n"
    (tmp_path / "kv.tsv").write_text(table)
    data = case_of("modelopt/config.json").data
    data = data.replace(b'"num_hidden_layers": 3', b'"num_hidden_layers": 5')
    (tmp_path / "config.json").write_bytes(data)
    report = convert(tmp_path / "config.json", None, into=both)
    after, left = load_pair(both)
    assert (after.model, after.decode, after.kv_cache) == (artifact.model, artifact.decode, own)
    assert after.search is None and not after.evidence
    assert left.keys() == {"imported.prefill", *(n for n in arrays if n.startswith("similarity."))}
    assert report["heads"] == 20
    artifacts.update(both, lambda a, b: (a.model_copy(update={"decode": None}), b))
    convert(tmp_path / "kv.tsv", None, into=both)
    with_table = load(both)
    assert with_table.patterns == after.patterns and len(with_table.kv_cache.policies) == 2
    (tmp_path / "out").mkdir()
    report = convert(both, tmp_path / "out" / "back.json", target="modelopt")
    assert notes(report) == ["the kv_cache section has no place in this format"]
    assert (tmp_path / "out" / "back.json").read_bytes() == data
    report = convert(both, tmp_path / "out" / "back.tsv", target="duo_attention")
    assert "the prefill section has no place in this format" in notes(report)
    there, back = (np.loadtxt(tmp_path / name) for name in ("kv.tsv", "out/back.tsv"))
    assert there.tolist() == back.tolist()
    # A section that was changed since is rewritten.
    row = ("dense",) * 4
    layers = (row, row, *with_table.prefill.layers[2:])
    prefill = with_table.prefill.model_copy(update={"layers": layers})
    artifacts.update(both, lambda a, b: (a.model_copy(update={"prefill": prefill}), b))
    convert(both, tmp_path / "new.json", target="modelopt")
    group = json.loads((tmp_path / "new.json").read_text())[KEY]["config_groups"]["group_0"]
    assert group["ignore"] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def test_convert_into_an_artifact_of_another_shape_is_refused(tmp_path):
    both = tmp_path / "both.yaml"
    artifacts.save(build(), both)
    before = both.read_bytes()
    for rows, says in (("1\t1\n", "has 1 layers, the model has 3"), ("1\n1\n1\n", "KV heads")):
        (tmp_path / "kv.tsv").write_text(rows)
        with pytest.raises(ArtifactError, match=says):
            convert(tmp_path / "kv.tsv", None, into=both)
    with pytest.raises(ArtifactError, match="--into is for imports"):
        convert(both, None, target="duo_attention", into=both)
    assert both.read_bytes() == before


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
TEXTS = [
    (
        format,
        "bad.tsv" if format == "duo_attention" else "bad.json",
        text.replace("\\t", "\t").replace("\\n", "\n").encode(),
        says,
    )
    for format, text, says in (*REFUSED, *LARGE)
]


@pytest.mark.parametrize(
    ("format", "name", "data", "says"),
    TEXTS,
    ids=[f"{format}-{says[-40:]}" for format, _, _, says in TEXTS],
)
def test_import_of_a_wrong_file_names_the_fault(format, name, data, says, tmp_path, capsys):
    file = tmp_path / name
    file.write_bytes(data)
    # Named if the file's name does not imply it.
    source = None if guess(file) == format else format
    with pytest.raises(ArtifactError) as caught:
        convert(file, tmp_path / "cfg.yaml", source=source, **OPTIONS[format])
    assert str(caught.value).startswith(f"{file}: ") and says in str(caught.value)
    assert list(tmp_path.iterdir()) == [file] and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "give --config config.json or --kv-heads --head-dim --max-positions"),
        ({"config": MODEL, "heads": 8}, "--heads says 8 query heads, "),
        ({"config": FILES / "error_counts.json"}, "must be a model's config.json"),
        ({**SHAPE, "kv_heads": 3}, "the KV heads must divide the 4 query heads, got 3"),
        ({**SHAPE, "kv_heads": 0}, "--kv-heads: must be from 1 to 4096, got 0"),
        ({"config": MODEL, "sinks": 4}, "--sinks means nothing for minference"),
        ({"config": MODEL, "dense_below": -1}, "--dense-below must be at least 0, got -1"),
        ({"source": "minference", "target": "minference"}, "give --from for an import or --to"),
        ({"source": "duo_attention", "config": MODEL, "sparsity": 1.5}, "from 0 to 1, got 1.5"),
    ],
)
def test_convert_with_wrong_options_names_them(options, says, tmp_path):
    with pytest.raises(HeadwiseError) as caught:
        convert(FILES / "head_patterns.json", tmp_path / "cfg.yaml", **options)
    assert says in str(caught.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("target", "says"),
    [(None, "say with --to what to write from it"), ("duo_attention", "has no kv_cache section")],
)
def test_export_without_its_section_is_refused(target, says, tmp_path):
    artifacts.save(build(), tmp_path / "cfg.yaml")
    with pytest.raises(ArtifactError, match=says):
        convert(tmp_path / "cfg.yaml", tmp_path / "out", target=target)


def test_import_with_a_wrong_model_config_is_refused(tmp_path):
    """The config.json of the model is checked too."""
    for name, value in (("num_hidden_layers", 10**9), ("head_dim", -1)):
        config = json.loads(MODEL.read_text()) | {name: value}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ArtifactError, match=f"{name}: must be from 1 to"):
            convert(FILES / "head_patterns.json", tmp_path / "cfg.yaml", config=tmp_path)


def test_import_with_another_model_fingerprint_is_refused(tmp_path):
    case = case_of("pattern.json")
    config = {**json.loads(case.data)["model_fingerprint"], "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    imported(tmp_path, case, head_dim=None, config=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 10000}))
    says = r"model_fingerprint.rope_theta is 1000000.0, the model has 10000"
    with pytest.raises(ArtifactError, match=says):
        imported(tmp_path, case, head_dim=None, config=tmp_path)
