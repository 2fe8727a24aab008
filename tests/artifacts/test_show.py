"""headwise show: the page of an artifact, its width, and its report on the files."""

from __future__ import annotations

import json

import numpy as np
import pytest

from artifacts import Evidence, TaskFigures, Verdict, load, save
from headwise.__main__ import main


@pytest.fixture
def page(capsys, monkeypatch):
    """page(path) -> the text for a terminal of `columns` columns."""

    def page(path, columns=80):
        monkeypatch.setenv("COLUMNS", str(columns))
        main(["show", str(path)])
        return capsys.readouterr().out

    return page


def map_rows(text):
    """Rows of the layer map: layer, letters of its heads, recall."""
    lines = [line for line in text.splitlines() if line.startswith("      ")]
    return [line.split() for line in lines if line.strip()[:2] in "0 1 2 3 4 "]


def test_show_page_has_the_figures_and_the_layer_map(saved, page):
    text = page(saved)
    assert all(len(line) <= 80 for line in text.splitlines())
    prose = " ".join(text.split())
    for figure in ("3 layers of 4 query and 2 KV heads", "1 prompt of 4,096 tokens"):
        assert figure in prose
    assert "budget asked 0.25 for each head, spent 0.310 of dense attention's operations" in prose
    assert "density 0.240 of tiles" in prose
    assert "vertical_slash      4  50.0%  vs_100_1800 x3, vs_30_2048_q32 x1\n" in text
    assert "prefill   2.5 s    3.75 s  dense sdpa   8,192        5\n" in text
    recall = np.linspace(0.5, 1.0, 12).reshape(3, 4).mean(1)
    assert map_rows(text) == [
        ["0", "VVAB", f"{recall[0]:.4f}"],
        ["1", "....", "-"],
        ["2", "VVAD", f"{recall[2]:.4f}"],
    ]


def test_show_page_has_every_kind_front_and_policies(tmp_path, every_kind, page):
    artifact, arrays = every_kind
    save(artifact, tmp_path / "cfg.yaml", arrays)
    text = page(tmp_path / "cfg.yaml", columns=100)
    letters = [row[1] for row in map_rows(text)]
    assert letters == ["VVAB", "....", "DBBV", "BVBD", "DDKV"]
    front = text[text.index("front at 4,096 tokens") :].splitlines()[2:4]
    assert [line.split()[:6] for line in front] == [
        ["0.5", "s", "4.00x", "0.25", "0.9000", "0.2000"],
        ["*", "1", "s", "2.00x", "0.01", "0.9000"],
    ]
    assert [line.split("  ")[-1].strip() for line in front] == ["12.0%", "4.0%"]
    assert "h2o: h2o of heavy 0.1, recent 512, normalised True, eviction greedy; 1 KV head" in text
    assert "full: full; 4 KV heads" in text
    narrow = page(tmp_path / "cfg.yaml")
    lines = narrow[: narrow.index("winners by kind")].splitlines()
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    "damage", [lambda file: file.unlink(), lambda file: file.write_bytes(b"changed")]
)
def test_show_of_a_damaged_sidecar_exits_with_3(saved, damage, capsys):
    assert main(["show", str(saved), "--json"]) == 0
    assert type(load(saved)).model_validate_json(capsys.readouterr().out) == load(saved)
    (sidecar,) = saved.parent.glob("*.safetensors")
    damage(sidecar)
    assert main(["show", str(saved)]) == 3 and "PROBLEM" in capsys.readouterr().out
    assert main(["show", str(saved), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["model"]["name"] == "tiny"


def test_show_page_wraps_rows_of_many_heads(tmp_path, make, page):
    artifact = make()
    patterns = {name: artifact.patterns[name] for name in ("bs_9", "dense")}
    changed = make(
        model=artifact.model.model_copy(update={"num_heads": 128, "num_layers": 1}),
        patterns=patterns,
        prefill=artifact.prefill.model_copy(update={"layers": (("bs_9",) * 127 + ("dense",),)}),
    )
    save(changed, tmp_path / "a.yaml")
    wrapped = [f"{'B' * 32}\n"] * 3 + [f"{'B' * 31}D\n"]
    assert "         ".join(wrapped) in page(tmp_path / "a.yaml")


@pytest.mark.parametrize("proven", [True, False])
def test_show_page_names_the_length_of_its_verdict(proven, tmp_path, make, page):
    tasks = tuple(
        TaskFigures(task="prose", length=tokens, prompts=2, kl=0.01) for tokens in (8192, 512)
    )
    losses = {"lost": 0.009, "lost_high": 0.0312, "perplexity": -0.004, "perplexity_high": 0.012}
    verdict = Verdict(proven=proven, why=None if proven else "because", **losses)
    save(make(evidence=Evidence(verdict=verdict, tasks=tasks)), tmp_path / "a.yaml")
    says = "verdict not proven up to 8,192 tokens: because; at most 3.1% fewer"
    if proven:
        says = (
            "verdict proven up to 8,192 tokens: at most 3.1% fewer correct answers (95% "
            "confidence; measured 0.9%); at most 1.2% more perplexity (95% confidence; measured "
            "-0.4%)"
        )
    assert says in " ".join(page(tmp_path / "a.yaml").split())


def test_show_page_escapes_control_characters(tmp_path, make, page):
    artifact = make()
    model = artifact.model.model_copy(update={"name": "evil\x1b[2J"})
    save(artifact.model_copy(update={"model": model, "evidence": Evidence()}), tmp_path / "a.yaml")
    text = page(tmp_path / "a.yaml")
    assert "\x1b" not in text and "evil\\x1b[2J" in text and "none measured yet" in text
