"""headwise filters as its users run it, on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import artifacts
from artifacts import HeadwiseError
from profiling import similarity
from profiling.models.loading import load_model
from profiling.similarities import layer_similarity
from runtime import load
from search import filters
from search.decode import filter_search
from search.published import search as heads
from tests.search.conftest import PUBLISHED

LENGTH = 600
MEASURE = f"--task passkey --task kv_retrieval --length {LENGTH} --steps 3 --samples 1".split()
RULES = ["--dense-first", "0", "--filters", "1", "--dtype", "float32"]


@pytest.fixture
def command(tiny_model: Path, by_head: Path) -> list[str]:
    return ["--model", str(tiny_model), str(by_head), *RULES, *MEASURE]


def test_fills_the_decode_section_and_leaves_the_rest(
    command: list[str], by_head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new.yaml"
    options = "--budget 0.25 --selector uniform --window 4 --prefill-ratio 0.5"
    filters.main([*command, "--out", str(out), *options.split()])
    before, arrays = artifacts.load_pair(by_head)
    after, more = artifacts.load_pair(out)
    assert (after.prefill, after.patterns) == (before.prefill, before.patterns)
    section = after.decode.omnikv
    assert (section.selector, section.window) == ("uniform", 4)
    assert (section.budget, section.prefill_ratio) == (0.25, 0.5)
    mass = more.pop("similarity.mass")
    error = more.pop("similarity.error")
    assert np.isfinite(error[np.triu_indices(3)]).all() and np.isnan(error[2, 0])
    assert mass.shape == (3, 3) and sorted(more) == sorted(arrays)
    assert section.filter_layers == (0,) and section.dense_layers == ()
    assert section.similarity.tasks == ("passkey", "kv_retrieval")
    assert section.similarity.top_k == LENGTH // 4 and 0 < section.similarity.kept <= 1
    printed = capsys.readouterr().out
    assert printed.endswith(f"next: headwise decode {out} --model {command[1]}\n")
    assert "held-out prompts" in printed and "evenly spaced" in printed


def test_a_killed_run_goes_on_and_finds_the_same(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filters.main([*command, "--out", str(tmp_path / "whole.yaml")])
    decoded: list[int] = []
    decode = layer_similarity._decode

    def dies_at_the_third(*given: Any) -> Any:
        if len(decoded) == 2:
            raise KeyboardInterrupt
        decoded.append(1)
        return decode(*given)

    monkeypatch.setattr(layer_similarity, "_decode", dies_at_the_third)
    cut = [*command, "--out", str(tmp_path / "cut.yaml")]
    with pytest.raises(KeyboardInterrupt):
        filters.main(cut)
    assert not (tmp_path / "cut.yaml").exists()
    with pytest.raises(HeadwiseError, match=r"its steps is 3, not 4; .*--fresh"):
        filters.main([*cut, "--steps", "4"])
    # Two tasks, of calibration and held-out: four prompts, two of which are finished.
    monkeypatch.setattr(
        layer_similarity, "_decode", lambda *given: decoded.append(1) or decode(*given)
    )
    filters.main(cut)
    assert len(decoded) == 4 and "2 units are finished" in capsys.readouterr().err
    whole, cut_off = (artifacts.load(tmp_path / name) for name in ("whole.yaml", "cut.yaml"))
    assert whole.content_sha256 == cut_off.content_sha256
    assert not list(tmp_path.glob("*.ledger"))


def test_in_place_other_sections_are_kept_and_a_search_keeps_this_one(
    command: list[str],
    by_head: Path,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also a section that another command writes meanwhile."""
    out = tmp_path / "cfg.yaml"
    artifacts.save(artifacts.load(by_head), out, artifacts.load_arrays(by_head))
    section = artifacts.KVCache(policies={"all": artifacts.Full()}, layers=("all",) * 3)
    real = filter_search.compare

    def meanwhile(*args: Any) -> Any:
        artifacts.update(
            out, lambda now, arrays: (now.model_copy(update={"kv_cache": section}), arrays)
        )
        return real(*args)

    monkeypatch.setattr(filter_search, "compare", meanwhile)
    at = command.index(str(by_head))
    more = ["--out", str(out), "--dense-first", "1", "--sparse", "0.3"]
    filters.main([*command[:at], str(out), *command[at + 1 :], *more])
    first = artifacts.load(out)
    assert first.kv_cache == section and len(list(tmp_path.iterdir())) == 2
    assert (first.decode.omnikv.filter_layers, first.decode.omnikv.dense_layers) == ((1,), (0,))
    again = heads.run(heads.HeadSearch(model=str(tiny_model), out=out, picture=False, **PUBLISHED))
    assert artifacts.load(out) == again
    assert again.kv_cache == section and again.decode == first.decode
    assert "similarity.mass" in artifacts.load_arrays(out)


def test_a_profile_saves_the_measurement_and_runtime_decodes_by_the_choice(
    command: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    profile = tmp_path / "profile"
    out = tmp_path / "cfg.yaml"
    similarity.main(
        ["--model", str(tiny_model), "--out", str(profile), *MEASURE, "--dtype", "float32"]
    )
    filters.main([*command, "--out", str(out), "--profile", str(profile), "--budget", "64"])
    loaded = load_model(str(tiny_model), dtype="float32")
    ids = torch.randint(3, 90, (1, 200))
    with load(out).apply(loaded.model) as handle:
        loaded.model.generate(
            ids, past_key_values=handle.new_cache(), max_new_tokens=4, do_sample=False
        )
        assert handle.stats()["decode"] == 3 * 3
