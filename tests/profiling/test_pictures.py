"""Pictures of a profile, a model and an artifact, with the numbers behind them."""

from __future__ import annotations

import csv
import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import artifacts
from artifacts import HeadwiseError
from artifacts.schema.patterns import RECORDS
from headwise.__main__ import main
from profiling import plot
from profiling.models.loading import load_model
from profiling.pictures.attention import HeadMap, attention_figure, measure
from profiling.pictures.candidates import candidates_figure, frontier
from profiling.pictures.drawing import save, shade
from profiling.pictures.patterns import draw_pattern_map, figure
from profiling.pictures.similarity import curve_figure, similarity_figure
from profiling.similarities.similarity_profile import save_profile
from tests.artifacts.conftest import build_every_kind
from tests.profiling.pictures import random_profile, texts_outside
from tests.sampling import sampled
from tests.typed import make_prompts

LENGTH = 900


def read(path: Path) -> tuple[list[str], np.ndarray]:
    with path.open() as file:
        header, *rows = list(csv.reader(file))
    return header, np.array([[float(cell or "nan") for cell in row] for row in rows])


@pytest.mark.usefixtures("sketched")
def test_heatmaps_of_a_profile_have_its_numbers(tmp_path, capsys):
    profile = random_profile(6, sliding=True)
    out = tmp_path / "out"
    save_profile(profile, tmp_path)
    main(["heatmaps", "--profile", str(tmp_path), "--out", str(out)])
    names = ["similarity", "similarity.multi_hop_a.txt", "similarity.passkey"]
    names += ["ability", "hit", "variability"]
    expected = {f"{name}.{kind}" for name in names for kind in ("png", "svg", "csv")}
    assert {path.name for path in out.iterdir()} == expected
    assert {Path(line).name for line in capsys.readouterr().out.splitlines()} == expected
    header, rows = read(out / "similarity.csv")
    assert header[:2] == ["layer", "layer 0"] and rows[:, 0].tolist() == list(range(6))
    np.testing.assert_allclose(rows[:, 1:], profile.mass(), rtol=1e-4)
    header, rows = read(out / "ability.csv")
    assert header[2] == "multi_hop:a.txt, next 16"
    np.testing.assert_allclose(rows[:, 2], profile.ability("multi_hop:a.txt", 16), rtol=1e-4)
    np.testing.assert_allclose(read(out / "hit.csv")[1][:, 2], profile.hit("passkey"), rtol=1e-4)
    missed = np.nanmean(profile.variability("passkey"), axis=0)
    np.testing.assert_allclose(read(out / "variability.csv")[1][:, 2], missed, rtol=1e-4)


@pytest.mark.usefixtures("sketched")
def test_attention_picture_equals_pooled_weights(searched, tmp_path):
    model, config = searched / "tiny", searched / "cfg.yaml"
    words = f"--model {model} {config} --length {LENGTH} --dtype float32 --out {tmp_path}"
    main(["heatmaps", *f"{words} --head 2.5 --picture attention".split()])
    assert {path.name for path in tmp_path.iterdir()} == {
        f"attention.2.5.{kind}" for kind in ("png", "svg", "csv")
    }
    header, rows = read(tmp_path / "attention.2.5.csv")
    assert header == ["query", "key", "attention", "computed"]
    loaded = load_model(str(model), dtype="float32")
    prompt = make_prompts("passkey", loaded.tokenizer, length=LENGTH, samples=1, seed=0)[0]
    head_map = measure(loaded, prompt, 2, 5, artifacts.load(config))
    loaded.model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = loaded.model(torch.tensor([prompt.input_ids]), output_attentions=True).attentions
    attention = weights[2][0, 5].numpy()
    pooled = {(query, key): value for query, key, value, _ in rows.tolist()}
    assert pooled[64, 0] == pytest.approx(attention[64:128, :64].sum(1).mean(), rel=1e-3)
    cells = -(-LENGTH // 64)
    assert len(rows) == cells * (cells + 1) // 2
    for query in range(0, LENGTH, 64):
        assert sum(rows[rows[:, 0] == query, 2]) == pytest.approx(1, rel=1e-4)
    assert head_map.computed is not None and head_map.recall is not None
    expected = head_map.computed[np.tril_indices(cells)]
    np.testing.assert_allclose(rows[:, 3], expected, rtol=1e-4)
    # A kernel computes whole tiles of single columns, of which a cell has its part.
    assert 0 < expected.mean() <= head_map.density
    assert 0 < head_map.recall <= 1


@pytest.mark.usefixtures("sketched")
def test_heatmaps_of_a_model_measure_a_profile(searched, tmp_path):
    model = searched / "tiny"
    words = f"--model {model} --length 256 --dtype float32 --out {tmp_path} --picture similarity"
    main(["heatmaps", *words.split()])
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"similarity.safetensors", *(f"similarity.{k}" for k in ("png", "svg", "csv"))}
    assert len([name for name in names if name.endswith(".png")]) == 1


def test_save_writes_the_same_bytes_without_a_window_system(tmp_path, monkeypatch):
    # matplotlib itself refuses such a name when it is imported.
    import matplotlib  # noqa: F401

    monkeypatch.setenv("MPLBACKEND", "nowhere")
    mass = random_profile(5).mass()
    files = [
        save(similarity_figure(mass, "title", "caption", filters=(1,)), tmp_path / name)
        for name in ("a.1", "b.1")
    ]
    assert [path.name for path in files[0]] == ["a.1.png", "a.1.svg"]
    for first, second in zip(*files, strict=True):
        assert first.read_bytes() == second.read_bytes(), first.name


SHAPES = [(1, 1), (5, 4), (24, 14), (30, 9), (80, 64), (1, 64), (80, 1)]
EXTREMES = [(1, 1), (1, 64), (80, 1)]


@pytest.mark.parametrize(("layers", "heads"), sampled(SHAPES, (30, 9), *EXTREMES))
def test_pattern_map_of_any_shape_contains_its_texts(layers, heads):
    artifact, _ = build_every_kind()
    names = list(artifact.patterns)
    rows = tuple(
        tuple(names[(layer + head) % len(names)] for head in range(heads))
        for layer in range(layers)
    )
    model = artifact.model.model_copy(
        update={"name": "Some-Model-1.5B-Instruct-Long", "num_layers": layers, "num_heads": heads}
    )
    prefill = artifact.prefill.model_copy(update={"layers": rows})
    shaped = artifact.model_copy(update={"model": model, "prefill": prefill})
    assert texts_outside(figure(shaped, np.full((layers, heads), 0.8))) == []


@pytest.mark.parametrize("layers", sampled([1, 12, 30, 80], 1, 30))
def test_similarity_pictures_of_long_names_contain_their_texts(layers):
    mass = np.triu(np.full((layers, layers), 0.8))
    title = "Some-Model-1.5B-Instruct, multi_hop:a_file_of_a_long_name.txt"
    filters = range(0, layers, 2)
    assert texts_outside(similarity_figure(mass, title, "caption", tuple(filters))) == []
    lines = {
        f"multi_hop:file_of_a_long_name_{at}.txt, next 16": np.full(layers, 0.5) for at in range(12)
    }
    drawn = curve_figure("ability", lines, random_profile(layers), "caption")
    assert texts_outside(drawn) == []


def test_attention_figure_of_a_long_pattern_contains_its_texts():
    head_map = HeadMap(
        layer=29,
        head=13,
        cell=64,
        attention=np.full((8, 8), 0.1),
        pattern="vertical_slash_1000_6096_q256_c0.95",
        computed=np.full((8, 8), 0.6),
        density=0.3,
        recall=0.9,
    )
    assert texts_outside(attention_figure(head_map, "caption")) == []


def test_shade_of_nan_is_gray():
    colors, _ = shade(np.array([0.0, 0.5, 1.0, np.nan]), 0.0, 1.0)
    assert len({tuple(color.round(3)) for color in colors}) == 4
    assert len(set(colors[3].round(6))) == 1, "grey"


def test_heatmaps_refuses_a_head_of_a_sliding_layer(hybrid, tmp_path):
    words = f"--model {hybrid} --length 400 --dtype float32 --out {tmp_path / 'out'}"
    with pytest.raises(HeadwiseError, match="layer 2 of hybrid"):
        main(["heatmaps", *f"{words} --picture attention --head 2.0".split()])
    assert not (tmp_path / "out").exists()


def test_heatmaps_refuses_an_artifact_of_another_model(searched, tmp_path):
    save_profile(random_profile(3), tmp_path)
    with pytest.raises(HeadwiseError, match=r"some-model.* tiny"):
        main(
            ["heatmaps", *f"--profile {tmp_path} {searched}/cfg.yaml --out {tmp_path}/out".split()]
        )


@pytest.fixture
def scored(tmp_path):
    """An artifact with scores, of a model whose name is a broken formula and moves the cursor."""
    artifact, arrays = build_every_kind()
    half = np.where(np.isnan(arrays["chosen.recall"]), np.nan, 0.5).astype(np.float32)
    arrays |= {"chosen.error": half, "chosen.density": half}
    named = artifact.model_copy(
        update={"model": artifact.model.model_copy(update={"name": "$\\frac{a$ \x1b[2J"})}
    )
    artifacts.save(named, tmp_path / "cfg.yaml", arrays)
    return tmp_path / "cfg.yaml"


@pytest.mark.usefixtures("sketched")
def test_plot_writes_a_row_per_head(scored, tmp_path):
    for out, stem in (("x", "x"), ("y.png", "y"), ("model-1.5", "model-1.5")):
        paths = plot.draw(plot.Config(artifact=scored, out=tmp_path / out, picture="patterns"))
        assert paths == [tmp_path / f"{stem}.{kind}" for kind in ("png", "svg", "csv")]
    png, svg, table = paths
    assert png.is_file() and svg.is_file()
    lines = list(csv.DictReader(table.open()))
    kinds = [(line["layer"], line["kind"]) for line in lines[4:8]]
    assert kinds == [
        ("2", kind) for kind in ("dense", "block_sparse", "block_sparse", "vertical_slash")
    ]


def with_candidates(scored, **arrays):
    """The artifact of `scored` with candidates of its heads: one cheap, one good, one neither."""
    artifact, former = artifacts.load_pair(scored)
    shape = (artifact.model.num_layers, artifact.model.num_heads)
    scores = {"a_64_128": (3.0, 1.0), "vs_64_64": (1.0, 2.0), "bs_9": (2.0, 2.5)}
    own = {"chosen.candidate": np.full(shape, 1, np.int32)}
    for number, (name, (loss, seconds)) in enumerate(scores.items()):
        for score, value in (("objective", loss), ("error", loss / 2), ("seconds", seconds)):
            key = f"candidates.{number}.{name}.{score}"
            own[key] = np.full(shape, value, np.float32)
    artifacts.save(artifact, scored, {**former, **own, **arrays})
    return scored


@pytest.mark.usefixtures("sketched")
def test_plot_of_a_head_has_a_line_for_each_candidate(scored, tmp_path):
    config = with_candidates(scored)
    assert main(["plot", str(config), "--head", "2.1", "--out", str(tmp_path / "head")]) == 0
    lines = list(csv.DictReader((tmp_path / "head.csv").open()))
    assert [line["candidate"] for line in lines] == ["a_64_128", "vs_64_64", "bs_9"]
    assert [line["frontier"] for line in lines] == ["True", "True", "False"]
    assert [line["chosen"] for line in lines] == ["False", "True", "False"]
    assert [float(line["seconds"]) for line in lines] == [1.0, 2.0, 2.5]
    assert (tmp_path / "head.png").is_file() and (tmp_path / "head.svg").is_file()


def test_candidates_of_a_head_are_marked_in_the_figure():
    points = {0: (1.0, 3.0), 1: (2.0, 1.0), 2: (2.5, 2.0)}
    assert frontier(points) == [0, 1]
    names = {0: "a_64_128", 1: "vs_128_256", 2: "vs_512_512"}
    drawn = candidates_figure(
        points, [0, 1], 1, names=names, title="layer 2, head 1", axes=("seconds", "error")
    )
    (panel,) = drawn.axes
    a_shape, vertical_slash, chosen = panel.collections
    assert a_shape.get_offsets().tolist() == [[1.0, 3.0]]
    assert vertical_slash.get_offsets().tolist() == [[2.0, 1.0], [2.5, 2.0]]
    assert chosen.get_offsets().tolist() == [[2.0, 1.0]]
    assert chosen.get_label() == "chosen: vs_128_256"
    assert panel.lines[0].get_xydata().tolist() == [[1.0, 3.0], [2.0, 1.0]]
    assert texts_outside(drawn) == []


def test_plot_names_a_head_without_candidates(scored, tmp_path):
    with pytest.raises(HeadwiseError, match=r"head 2\.1"):
        main(["plot", str(scored), "--out", str(tmp_path / "head"), "--head", "2.1"])
    assert not list(tmp_path.glob("head.*"))


@pytest.mark.parametrize("name", ["patterns", "frontier"])
def test_plot_escapes_formulas_and_control_characters(name, scored, tmp_path, capsys):
    stem = tmp_path / "map\x1b[2J"
    assert main(["plot", str(scored), "--picture", name, "--out", str(stem)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == [f"{tmp_path}/map\\x1b[2J.{kind}" for kind in ("png", "svg", "csv")]
    assert "\x1b" not in stem.with_name(f"{stem.name}.svg").read_text()
    with pytest.raises(HeadwiseError, match="--out"):
        main(["plot", str(scored), "--out", ""])


@pytest.mark.usefixtures("sketched")
def test_pattern_map_on_a_full_disk_leaves_no_file(scored, tmp_path, monkeypatch):
    def full(handle, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    before = sorted(tmp_path.iterdir())
    says = r"cannot write '.*map\.png': no space left on device"
    with pytest.raises(HeadwiseError, match=says):
        draw_pattern_map(scored, tmp_path / "map")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.usefixtures("sketched")
def test_pattern_map_without_scores_has_empty_columns(tmp_path):
    artifact, arrays = build_every_kind()
    del arrays["chosen.recall"]
    artifacts.save(artifact, tmp_path / "cfg.yaml", arrays)
    _, _, numbers = draw_pattern_map(tmp_path / "cfg.yaml", tmp_path / "map")
    rows = list(csv.DictReader(numbers.open(newline="")))
    assert rows and all(row["recall"] == row["error"] == row["density"] == "" for row in rows)


def test_pattern_map_letters_mark_similar_colors():
    artifact, arrays = build_every_kind()
    drawn = figure(artifact, arrays["chosen.recall"])
    letters = {text.get_position(): text.get_text() for text in drawn.axes[0].texts}
    assert letters == {(4, 2): "K"}
    assert {kind for kind, record in RECORDS.items() if record.lettered} == {
        artifact.patterns[artifact.prefill.layers[x][y]].kind for x, y in letters
    }
