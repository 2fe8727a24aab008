"""headwise demo on a tiny model: search, gate, apply, compare."""

from __future__ import annotations

from pathlib import Path

import pytest

import artifacts
from search.demo import main, run
from search.model.config import ModelSearch
from search.model.limits import Limits

LENGTH = 512


def test_it_searches_by_default_applies_and_compares(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A random model has no head that can do without much.
    limits = Limits(max_kl=100, max_perplexity=100, max_nll=100, max_lost=1)
    out = tmp_path / "demo" / "cfg.yaml"
    config = ModelSearch(
        model=str(tiny_model),
        out=out,
        lengths=(LENGTH,),
        tasks=("prose",),
        n_trials=1,
        limits=limits,
        dtype="float32",
        # Nor has it anything to gain at such a length.
        keep=True,
        command="the command",
    )
    assert run(config, repeats=1)
    artifact = artifacts.load(out)
    said = capsys.readouterr().out
    assert artifact.search is not None and artifact.search.allocation == "model"
    assert artifact.evidence.reported_on.name == "held-out"
    assert artifact.evidence.measurements, "the search is by the seconds of this machine"
    assert said.startswith("$ the command\n") and f"wrote {out}" in said
    after = said[said.index(f"seconds to the first token after {LENGTH} tokens") :]
    answers = [line.split()[0] for line in after.splitlines() if " answers " in line]
    assert answers == ["dense", "headwise"]
    assert out.with_suffix(".png").is_file()


def test_the_command_searches_as_heads_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[ModelSearch] = []
    monkeypatch.setattr(
        "search.demo.run", lambda config, repeats: asked.append(config) or len(asked) == 1
    )
    assert main(["--out", str(tmp_path)]) == 0
    # What is not worth serving is not written, and nothing is compared.
    assert main(["--out", str(tmp_path)]) == 3
    command = f"headwise search --model smollm2 --length 8192 --out {tmp_path / 'cfg.yaml'}"
    out = tmp_path / "cfg.yaml"
    default = ModelSearch(model="smollm2", out=out, lengths=(8192,), command=command)
    assert asked == [default, default]
