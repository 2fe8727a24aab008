"""python -m search.filters as its users run it, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import artifacts
from artifacts import HeadwiseError
from profiling import similarity
from profiling.similarities import budget_meter, layer_similarity
from runtime import load
from search import filters
from search.decode import filter_search
from search.published import head_budget as heads

LENGTH = 600
MEASURE = ["--task", "passkey", "--task", "kv_retrieval", "--length", str(LENGTH), "--steps", "3", "--samples", "1"]
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
    assert after.decode is not None and after.prefill == before.prefill and after.patterns == before.patterns
    section = after.decode.omnikv
    assert (section.selector, section.window, section.budget, section.prefill_ratio) == ("uniform", 4, 0.25, 0.5)
    mass = more.pop("similarity.mass")
    error, map_error = more.pop("similarity.error"), more.pop("similarity.head_error", None)
    assert (map_error is not None) == (section.head_map is not None)
    assert np.isfinite(error[np.triu_indices(3)]).all() and np.isnan(error[2, 0])
    assert mass.shape == (3, 3) and sorted(more) == sorted(arrays)
    assert section.filter_layers == (0,) and section.dense_layers == ()
    assert section.similarity is not None and section.similarity.tasks == ("passkey", "kv_retrieval")
    assert section.similarity.top_k == LENGTH // 4 and 0 < section.similarity.kept <= 1
    printed = capsys.readouterr().out
    assert printed.endswith(f"next: python -m profiling.decode {out} --model {command[1]}\n")
    assert "held-out prompts" in printed and "evenly spaced" in printed and "50 random, mean" in printed
    artifacts.load(by_head)


def test_kv_heads_choose_for_kv_heads(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sections = {}
    for kind in ("pooled", "head", "group"):
        out = tmp_path / f"{kind}.yaml"
        filters.main([*command, "--out", str(out), "--budget", "0.25", "--heads", kind])
        after, arrays = artifacts.load_pair(out)
        assert after.decode is not None
        sections[kind] = after.decode.omnikv
        printed = capsys.readouterr().out
        assert ("one choice for all" in printed) == (kind != "pooled") == ("similarity.head_error" in arrays)
    assert sections["pooled"].head_map is None
    for kind in ("head", "group"):
        section = sections[kind]
        served = [layer for layer in range(3) if section.filter_of(layer) is not None]
        assert [layer for layer, row in enumerate(section.head_map or ()) if row is not None] == served
        assert section.similarity is not None and section.similarity.error is not None


def test_kascades_rule_maps_single_heads(command: list[str], tmp_path: Path) -> None:
    out = tmp_path / "cfg.yaml"
    filters.main([*command, "--out", str(out), "--budget", "0.25", "--rule", "kascade"])
    section = artifacts.load(out).decode
    assert section is not None and section.omnikv.filter_layers == (0,)
    assert {len(heads) for row in section.omnikv.head_map or () for heads in row or ()} == {1}


def test_the_rule_by_loss_decodes_as_the_runtime_does(tiny_model: Path, by_head: Path) -> None:
    from profiling.models.loading import load_model
    from profiling.prompts.prompt import make_prompts
    from profiling.similarities.layer_similarity import SimilarityConfig, continuation
    from search.decode.decode_loss import decode_loss
    from search.decode.filter_layers import Choice

    loaded = load_model(str(tiny_model), dtype="float32")
    config = SimilarityConfig(model="tiny", tasks=("kv_retrieval",), length=LENGTH, steps=6, top_k=1)
    prompts = make_prompts("kv_retrieval", loaded.tokenizer, length=LENGTH, samples=2, seed=0)
    rights = [continuation(config, loaded.tokenizer, prompt)[:6] for prompt in prompts]
    for budget, dense in ((30, False), (LENGTH + 20, True)):
        loss = decode_loss(config, loaded, artifacts.load(by_head), budget, prompts)(Choice((0,), ()))
        expected = []
        for prompt, right in zip(prompts, rights, strict=True):
            ids = torch.tensor([[*prompt.input_ids, *right]])
            with torch.no_grad():
                logits = loaded.model(ids).logits[0, LENGTH - 1 : -1]
            expected.append(torch.nn.functional.cross_entropy(logits, torch.tensor(right)))
        assert (abs(loss - float(torch.stack(expected).mean())) < 1e-4) == dense


def test_the_least_coverage_within_an_error(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cfg.yaml"
    options = [*command, "--out", str(out), "--budget", "0.25", "--heads", "head", "--target-error"]
    filters.main([*options, "0.5", f"--json={tmp_path / 'figures.json'}"])
    figures = json.loads((tmp_path / "figures.json").read_text())
    held_out = figures["scores"]["held_out"]
    assert held_out["mapped"] and held_out["filter_layers"] == [0] and 0 < held_out["error"] < 1
    assert [point["coverage"] is None for point in figures["points"]][-1] is False and figures["coverage"]
    loose = artifacts.load(out).decode
    assert "coverage" in capsys.readouterr().out
    assert loose is not None and loose.omnikv.coverage is not None and 0.5 <= loose.omnikv.coverage < 1
    with pytest.raises(HeadwiseError, match=r"--target-error 1e-12 cannot be met: a coverage of 0.99 has an error of"):
        filters.main([*options, "1e-12"])
    options[-1] = "--target-tokens"
    filters.main([*options, "140", f"--json={tmp_path / 'figures.json'}"])
    points = json.loads((tmp_path / "figures.json").read_text())["points"]
    assert [point["budget"] for point in points] == [140, 150, None]
    assert points[-1]["tokens"] == pytest.approx(140, abs=15)


def test_a_killed_run_goes_on_and_finds_the_same(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    # Two tasks, of calibration, between kinds of maps and held-out: six prompts, two of which are finished.
    monkeypatch.setattr(layer_similarity, "_decode", lambda *given: decoded.append(1) or decode(*given))
    filters.main(cut)
    assert len(decoded) == 6 and "2 units are finished" in capsys.readouterr().err
    whole, cut_off = (artifacts.load(tmp_path / name) for name in ("whole.yaml", "cut.yaml"))
    assert whole.content_sha256 == cut_off.content_sha256
    assert not list(tmp_path.glob("*.ledger"))


@pytest.mark.parametrize(
    ("options", "module", "name", "pieces"),
    [
        # Of three layers each but the first is tried without, then of the two that are left.
        (["--rule", "loss"], filter_search, "decode_loss", 3),
        # Two prompts that choose the coverage, two that report.
        (["--target-error", "0.5"], budget_meter, "watched", 4),
    ],
)
def test_a_killed_run_loses_the_choice_or_the_prompt_in_hand(
    options: list[str],
    module: Any,
    name: str,
    pieces: int,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = [*command, "--budget", "0.25", *options, "--out"]
    filters.main([*run, str(tmp_path / "whole.yaml")])
    if name == "decode_loss":
        # One choice for all heads, as IndexCache has it.
        section = artifacts.load(tmp_path / "whole.yaml").decode
        assert section is not None and section.omnikv.filter_layers == (0,) and section.omnikv.head_map is None
        assert "greedy by loss: 3 of 3 choices in" in capsys.readouterr().err
    done: list[int] = []
    real, limit = getattr(module, name), pieces - 1

    def counted(work: Any) -> Any:
        def piece(*given: Any) -> Any:
            if len(done) == limit:
                raise KeyboardInterrupt
            found = work(*given)
            done.append(1)
            return found

        return piece

    monkeypatch.setattr(
        module, name, (lambda *given: counted(real(*given))) if name == "decode_loss" else counted(real)
    )
    with pytest.raises(KeyboardInterrupt):
        filters.main([*run, str(tmp_path / "cut.yaml")])
    limit = pieces + 1
    filters.main([*run, str(tmp_path / "cut.yaml")])
    assert len(done) == pieces
    whole, cut = (artifacts.load(tmp_path / f"{one}.yaml") for one in ("whole", "cut"))
    assert whole.content_sha256 == cut.content_sha256 and not list(tmp_path.glob("*.ledger"))


def test_the_file_it_starts_from_may_be_the_one_it_writes(command: list[str], by_head: Path, tmp_path: Path) -> None:
    out = tmp_path / "cfg.yaml"
    artifacts.save(*artifacts.load_pair(by_head)[:1], out, artifacts.load_arrays(by_head))
    at = command.index(str(by_head))
    filters.main([*command[:at], str(out), *command[at + 1 :], "--out", str(out), "--layers", "1"])
    after = artifacts.load(out)
    assert after.decode is not None and after.decode.omnikv.filter_layers == (1,)
    assert after.decode.omnikv.dense_layers == (0,)
    assert len(list(tmp_path.iterdir())) == 2


def test_what_others_write_while_it_measures_is_kept_and_so_is_the_section_when_heads_are_searched_again(
    command: list[str], by_head: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "cfg.yaml"
    artifacts.save(artifacts.load(by_head), out, artifacts.load_arrays(by_head))
    section = artifacts.KVCache(policies={"all": artifacts.Full()}, layers=("all",) * 3)
    real = filter_search.compare

    def meanwhile(*args: Any) -> Any:
        artifacts.update(out, lambda now, arrays: (now.model_copy(update={"kv_cache": section}), arrays))
        return real(*args)

    monkeypatch.setattr(filter_search, "compare", meanwhile)
    at = command.index(str(by_head))
    filters.main([*command[:at], str(out), *command[at + 1 :], "--out", str(out)])
    first = artifacts.load(out)
    assert first.kv_cache == section and first.decode is not None
    options = {"length": 1000, "budget": "0.5", "dtype": "float32", "calibration": "passkey", "command": "again"}
    again = heads.run(heads.HeadSearch(model=str(tiny_model), out=out, **options))
    assert artifacts.load(out) == again and again.search is not None and again.search.command == "again"
    assert again.kv_cache == section and again.decode == first.decode
    assert "similarity.mass" in artifacts.load_arrays(out)


def test_a_profile_saves_the_measurement_and_runtime_decodes_by_the_choice(
    command: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    from profiling.models.loading import load_model

    profile, out = tmp_path / "profile", tmp_path / "cfg.yaml"
    similarity.main(["--model", str(tiny_model), "--out", str(profile), *MEASURE, "--dtype", "float32"])
    filters.main([*command, "--out", str(out), "--profile", str(profile), "--layers", "1", "--budget", "64"])
    loaded = load_model(str(tiny_model), dtype="float32")
    ids = torch.randint(3, 90, (1, 200))
    with load(out).apply(loaded.model) as handle:
        loaded.model.generate(ids, past_key_values=handle.new_cache(), max_new_tokens=4, do_sample=False)
        assert handle.stats()["decode"] == 3 * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "0"], "--budget must be a number of tokens or a share between 0 and 1, got '0'"),
        (["--budget", "1.5"], "--budget must be a number of tokens or a share between 0 and 1, got '1.5'"),
        (["--layers", "1,x"], "--layers must be layer numbers with commas between, such as 2,8,18, got '1,x'"),
        (["--layers", "9"], "filter layer 9 is no full-attention layer"),
        (["--max-error", "0.5", "--layers", "1"], "--layers and --max-error exclude each other"),
        (["--max-error", "-1"], "--max-error must be at least 0, got -1.0"),
        (["--sparse", "1"], "--sparse must be between 0 and 1, got 1.0"),
        (["--dense-layers", "1"], "--dense-layers goes with --layers"),
        (["--window", "0"], "--window must be at least 1, got 0"),
        (["--prefill-ratio", "0"], "--prefill-ratio must be a positive number, got 0.0"),
        (
            ["--dense-first", "3"],
            "3 full-attention layers of which 1 may attend to everything do not leave 3 dense",
        ),
        (["--profile", "nowhere"], "there is no similarity profile"),
        (["--task", "riddle"], "unknown task"),
        (["--target-error", "0.5", "--coverage", "0.9"], "exclude each other"),
        (["--rule", "kascade", "--heads", "pooled"], "maps KV heads one to one: leave out --heads pooled"),
        (["--rule", "kascade", "--max-error", "1"], "--rule kascade chooses by itself: leave out --max-error"),
        (["--rule", "loss", "--heads", "head"], "--rule loss has one choice for all heads: leave out --heads head"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    options: list[str], message: str, command: list[str], tmp_path: Path
) -> None:
    with pytest.raises(HeadwiseError, match=message):
        filters.main([*command, "--out", str(tmp_path / "new.yaml"), *options])
    assert not list(tmp_path.iterdir())


def test_limits_that_nothing_meets_are_one_line_and_what_was_measured_serves_others(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command += ["--out", str(tmp_path / "new.yaml")]
    message = "1 layers in all that attend to everything meet --max-error: 0 with none dense keep"
    with pytest.raises(HeadwiseError, match=message):
        filters.main([*command, "--max-error", "0"])
    assert [path.name for path in tmp_path.iterdir()] == ["new.yaml.filters.ledger"]
    decoded: list[int] = []
    decode = layer_similarity._decode
    monkeypatch.setattr(layer_similarity, "_decode", lambda *given: decoded.append(1) or decode(*given))
    filters.main([*command, "--max-error", "9"])
    assert len(decoded) == 2, "only the held-out prompts are left to be measured"
    assert not list(tmp_path.glob("*.ledger"))
