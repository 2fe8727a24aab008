"""Pictures come out of a profile and of a model, hold the numbers they claim, and can be read."""

from __future__ import annotations

import csv
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import artifacts
from artifacts import HeadwiseError, OmniKV
from profiling.heatmaps import main
from profiling.models.loading import load_model
from profiling.pictures.drawing import new_figure, save, shade, ticks
from profiling.pictures.head_pictures import grid_figure
from profiling.pictures.layer_pictures import curve_figure, draw_layers, similarity_figure
from profiling.pictures.model_pictures import spread
from profiling.prompts.prompt import make_prompts
from profiling.similarities.mass import ability
from profiling.similarities.similarity_profile import Profile, save_profile
from search.published.search import HeadSearch, run
from tests.search.conftest import save_tiny

LENGTH = 700


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("heatmaps")
    model = save_tiny(folder / "tiny")
    config = folder / "cfg.yaml"
    run(
        HeadSearch(
            model=str(model),
            out=config,
            length=LENGTH,
            budget="0.6",
            dtype="float32",
            picture=False,
            command="x",
        )
    )
    return model, config


def profile(
    layers: int, *, sliding: bool = False, tasks: tuple[str, ...] = ("multi_hop:a.txt", "passkey")
) -> Profile:
    random = np.random.default_rng(0)
    left_out = np.arange(layers) % 6 == 5 if sliding else np.zeros(layers, dtype=bool)
    arrays: dict[str, np.ndarray] = {"agreement": np.ones((len(tasks), len(tasks)))}
    for task in tasks:
        mass = random.random((layers, layers))
        mass[left_out] = mass[:, left_out] = np.nan
        arrays |= {f"mass.{task}.max": mass, f"mass.{task}.mean": mass}
        by_head = np.tile(mass[:, :, None], (1, 1, 2))
        arrays |= {f"{kind}.{task}": by_head for kind in ("error", "worst")}
        arrays |= {f"ability.{task}.next{reach}": ability(mass, reach) for reach in (8, 16)}
        arrays[f"hit.{task}"] = np.where(left_out, np.nan, random.random(layers))
        arrays[f"variability.{task}"] = np.where(
            left_out[:, None], np.nan, random.random((layers, 20))
        )
    settings = {
        "length": 4096,
        "samples": 2,
        "steps": 20,
        "top_k": 512,
        "dtype": "bfloat16",
        "device": "cpu",
    }
    about = {
        **{
            "format": 5,
            "kv_heads": 2,
            "model": "some-model",
            "num_layers": layers,
            "command": "headwise similarity --x",
        },
        **{
            "layers": np.flatnonzero(~left_out).tolist(),
            "sliding_layers": np.flatnonzero(left_out).tolist(),
        },
        **{
            "tasks": [{"name": task, "sha256": "0123456789" * 6} for task in tasks],
            "weights_sha256": "f" * 64,
        },
    }
    return Profile(arrays=arrays, about=about | settings)


def read(path: Path) -> tuple[list[str], np.ndarray]:
    with path.open() as file:
        header, *rows = list(csv.reader(file))
    return header, np.array([[float(cell or "nan") for cell in row] for row in rows])


def test_a_profile_becomes_pictures_with_their_numbers(tmp_path: Path, capsys: Any) -> None:
    made, out = profile(30, sliding=True), tmp_path / "out"
    save_profile(made, tmp_path)
    main(["--profile", str(tmp_path), "--out", str(out)])
    names = {
        "similarity",
        "similarity.multi_hop_a.txt",
        "similarity.passkey",
        "ability",
        "hit",
        "variability",
    }
    expected = {f"{name}.{kind}" for name in names for kind in ("png", "svg", "csv")}
    assert {path.name for path in out.iterdir()} == expected
    assert {Path(line).name for line in capsys.readouterr().out.splitlines()} == expected
    for path in out.glob("*.png"):
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    header, rows = read(out / "similarity.csv")
    assert header[:2] == ["layer", "layer 0"] and rows[:, 0].tolist() == list(range(30))
    np.testing.assert_allclose(rows[:, 1:], made.mass(), rtol=1e-4)
    header, rows = read(out / "ability.csv")
    assert header[2] == "multi_hop:a.txt, next 16"
    np.testing.assert_allclose(rows[:, 2], made.ability("multi_hop:a.txt", 16), rtol=1e-4)
    np.testing.assert_allclose(read(out / "hit.csv")[1][:, 2], made.hit("passkey"), rtol=1e-4)
    missed = np.nanmean(made.variability("passkey"), axis=0)
    np.testing.assert_allclose(read(out / "variability.csv")[1][:, 2], missed, rtol=1e-4)


def test_a_model_becomes_pictures_with_their_numbers(
    searched: tuple[Path, Path], tmp_path: Path
) -> None:
    model, config = searched
    options = ["--model", str(model), str(config), "--length", str(LENGTH), "--dtype", "float32"]
    main(
        [
            *options,
            "--out",
            str(tmp_path),
            "--heads",
            "2.5,0.1",
            "--picture",
            "maps",
            "--picture",
            "sparsity",
        ]
    )
    names = {"maps.safetensors", *(f"maps.{kind}" for kind in ("png", "svg"))}
    names |= {
        f"{name}.{kind}"
        for name in ("sparsity", "kernel_sparsity")
        for kind in ("png", "svg", "csv")
    }
    assert {path.name for path in tmp_path.iterdir()} == names
    arrays = load_file(tmp_path / "maps.safetensors")
    assert set(arrays) == {
        f"{at}.{what}" for at in ("2.5", "0.1") for what in ("attention", "computed")
    }
    loaded = load_model(str(model), dtype="float32")
    prompt = make_prompts("passkey", loaded.tokenizer, length=LENGTH, samples=1, seed=0)[0]
    loaded.model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = loaded.model(torch.tensor([prompt.input_ids]), output_attentions=True).attentions
    attention = weights[2][0, 5].numpy()
    np.testing.assert_allclose(
        arrays["2.5.attention"][1, 0], attention[64:128, :64].sum(1).mean(), rtol=1e-3
    )
    np.testing.assert_allclose(arrays["2.5.attention"].sum(1), 1, rtol=1e-4)
    density = artifacts.load_arrays(config)["chosen.density"]
    np.testing.assert_allclose(
        read(tmp_path / "kernel_sparsity.csv")[1][:, 1:], 1 - density, rtol=1e-3
    )
    sparsity = read(tmp_path / "sparsity.csv")[1][:, 1:]
    assert sparsity.shape == (3, 6) and 0 < sparsity.min() < sparsity.max() < 1


def test_everything_from_a_model_alone(searched: tuple[Path, Path], tmp_path: Path) -> None:
    main(
        [
            "--model",
            str(searched[0]),
            "--length",
            "400",
            "--dtype",
            "float32",
            "--out",
            str(tmp_path),
        ]
    )
    names = {path.stem for path in tmp_path.glob("*.png")}
    assert names == {"similarity", "ability", "hit", "variability", "maps", "sparsity"}
    assert (tmp_path / "similarity.safetensors").is_file()


def test_the_same_profile_gives_the_same_files(tmp_path: Path) -> None:
    first, second = (tmp_path / name for name in "ab")
    for folder in (first, second):
        folder.mkdir()
        draw_layers(profile(8), folder, "headwise heatmaps", OmniKV(filter_layers=(2, 4)))
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


def labels(figure: Any) -> list[list[Any]]:
    """The boxes of each axis' tick labels, in pixels, as drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    found = []
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            shown = [
                label for label in axis.get_ticklabels() if label.get_visible() and label.get_text()
            ]
            found.append([label.get_window_extent(canvas.get_renderer()) for label in shown])
    return found


@pytest.mark.parametrize("layers", [2, 30])
def test_pictures_can_be_read(layers: int) -> None:
    made = profile(layers, sliding=layers > 5)
    caption = "some-model\n" + "a very long command " * 30
    curves = {task: made.ability(task) for task in made.tasks}
    figures = [
        similarity_figure(made.mass(), "title", caption, filters=(1,)),
        curve_figure("ability", curves, made, caption),
        grid_figure(np.random.default_rng(0).random((layers, max(1, layers))), "label", caption),
    ]
    for figure in figures:
        for boxes in labels(figure):
            assert not any(a.overlaps(b) for a, b in pairwise(boxes))
        inside = figure.bbox
        for axes in figure.axes:
            box = axes.get_tightbbox()
            assert (
                box.x0 >= -1
                and box.y0 >= -1
                and box.x1 <= inside.x1 + 1
                and box.y1 <= inside.y1 + 1
            )
    # One cell of the similarity is at least five pixels wide, in both directions.
    axes = figures[0].axes[0]
    assert min(axes.bbox.width, axes.bbox.height) / layers >= 5


def test_a_caption_is_below_the_picture_and_within_its_width() -> None:
    figure = new_figure(6.0, 3.0, "model\n" + "headwise heatmaps --task x " * 12)
    axes = figure.subplots()
    axes.set_xlabel("layer")
    labels(figure)
    box = figure._supxlabel.get_window_extent()
    assert box.y1 <= axes.get_tightbbox().y0 and box.x0 >= 0 and box.x1 <= figure.bbox.x1
    assert "--task x" in figure._supxlabel.get_text()


def test_shades_leave_out_what_was_not_measured() -> None:
    colours, _ = shade(np.array([0.0, 0.5, 1.0, np.nan]), 0.0, 1.0)
    assert len({tuple(colour.round(3)) for colour in colours}) == 4
    assert len(set(colours[3].round(6))) == 1, "grey"


def test_ticks_and_spread() -> None:
    assert list(ticks(5)) == [0, 1, 2, 3, 4] and list(ticks(126)) == list(range(0, 126, 10))
    assert len(ticks(5000)) <= 16
    assert spread([3, 5, 9, 11], 9) == [3, 5, 9, 11] and spread(list(range(126)), 3) == [0, 62, 125]


def test_figures_are_saved_without_a_window_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # matplotlib itself refuses such a name when it is imported; whichever test comes first imports
    # it.
    import matplotlib  # noqa: F401

    monkeypatch.setenv("MPLBACKEND", "nowhere")
    assert [path.name for path in save(new_figure(2, 2, "x"), tmp_path / "a.b")] == [
        "a.b.png",
        "a.b.svg",
    ]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--profile", "nowhere"], "there is no similarity profile 'nowhere'"),
        (
            ["--model", "{model}", "--heads", "3.0"],
            "tiny has no head 3.0: its layers are 0 to 2, its heads 0 to 5",
        ),
        (["--model", "{model}", "--heads", "0.6"], "tiny has no head 0.6"),
        (
            ["--profile", "{profile}", "{config}"],
            "the profile is of some-model, the artifact of tiny",
        ),
    ],
)
def test_bad_use(
    searched: tuple[Path, Path], tmp_path: Path, options: list[str], line: str
) -> None:
    save_profile(profile(3), tmp_path)
    places = {"model": searched[0], "config": searched[1], "profile": tmp_path}
    with pytest.raises(HeadwiseError, match=re.escape(line)) as caught:
        main(
            [
                *(option.format(**places) for option in options),
                "--out",
                str(tmp_path / "out"),
                "--dtype",
                "float32",
            ]
        )
    assert "\n" not in str(caught.value) and not list((tmp_path / "out").glob("*"))


def test_heads_of_a_layer_that_slides(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = save_tiny(
        tmp_path / "hybrid",
        family="Gemma3",
        config="Gemma3Text",
        layer_types=kinds,
        sliding_window=32,
        head_dim=16,
    )
    options = [
        "--model",
        str(model),
        "--length",
        "400",
        "--dtype",
        "float32",
        "--out",
        str(tmp_path / "out"),
    ]
    with pytest.raises(
        HeadwiseError,
        match="layer 2 of hybrid is a sliding-window layer: choose",
    ):
        main([*options, "--heads", "2.0", "--picture", "maps"])
    main([*options, "--picture", "sparsity", "--picture", "maps"])
    sparsity = read(tmp_path / "out" / "sparsity.csv")[1][:, 1:]
    np.testing.assert_array_equal(np.isfinite(sparsity).all(1), [False, True, False])
    assert {
        name.partition(".")[0] for name in load_file(tmp_path / "out" / "maps.safetensors")
    } == {"1"}
