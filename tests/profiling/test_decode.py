"""headwise decode on a tiny model: its figures and its refusals."""

from __future__ import annotations

import json
import math

import pytest
import torch

from artifacts import Artifact, Decode, HeadwiseError, OmniKV, Prefill, save
from headwise.__main__ import main
from profiling.evaluation.speed import at_random
from profiling.quality.forced_decode import forced_losses, prefill_texts
from runtime.fingerprint import fingerprint
from tests.profiling.conftest import text_losses
from tests.tiny_text_model import save_tiny
from tests.typed import make_prompts


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text(" ".join(f"{i} of many numbered words" for i in range(400)))
    return file


@pytest.fixture
def compared(folder, tmp_path, monkeypatch):
    """compared(words): the record that headwise decode writes."""
    monkeypatch.setattr("profiling.quality.trials.new_tokens", lambda tokenizer, prompt: 4)

    def call(words):
        out = tmp_path / "figures.json"
        out.unlink(missing_ok=True)
        main(["decode", *f"--model {folder} --dtype float32 --json {out} {words}".split()])
        assert list(tmp_path.glob("figures.json*")) == [out], "no resume file is left"
        return json.loads(out.read_text())

    return call


def figures(record, task, measure):
    """Estimates of a measure, by method."""
    return {
        each["method"]: each
        for each in record["figures"]
        if (each["task"], each["measure"]) == (task, measure)
    }


@pytest.fixture
def artifact_file(loaded, tmp_path):
    """made(name, budget): an artifact with a decode section."""

    def make(name, budget, **more):
        artifact = Artifact(
            model=fingerprint(loaded.model, name="tiny"),
            search=None,
            patterns={},
            prefill=Prefill(dense_below=4096, layers=(None, None, None)),
            decode=Decode(omnikv=OmniKV(filter_layers=(0,), budget=budget, **more)),
        )
        save(artifact, tmp_path / f"{name}.yaml", {})
        return tmp_path / f"{name}.yaml"

    return make


def test_forced_losses_equal_those_of_one_prefill(loaded, text):
    from transformers import DynamicCache

    prompts = make_prompts(f"text:{text}", loaded.tokenizer, length=200, samples=9, seed=0)
    prefilled = list(
        prefill_texts(loaded.model, lambda: DynamicCache(config=loaded.model.config), prompts, 30)
    )
    assert [len(some.ids) for some in prefilled] == [8, 1]
    assert prefilled[0].cache.get_seq_length() == 170
    losses = forced_losses(loaded.model, prefilled, 30)
    expected = torch.stack([text_losses(loaded.model, each.input_ids)[-30:] for each in prompts])
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    assert prefilled[0].cache.get_seq_length() == 199


def test_decode_measures_what_the_artifacts_section_loses(artifact_file, compared, text, capsys):
    for budget in (0.999, 0.05):
        record = compared(
            f"{artifact_file('cfg', budget)} --repeats 0 --length 400 --samples 2 --text {text}"
        )
        assert record["settings"]["methods"] == ["dense", "dense+omnikv"]
        ends = figures(record, "text:words.txt", "perplexity, last 128 tokens")
        own, dense = ends["dense+omnikv"], ends["dense"]
        assert own["difference"] == pytest.approx(own["value"] / dense["value"] - 1, rel=1e-6)
        assert own["count"] == 2 and dense["difference"] is None
        if budget < 0.5:
            assert abs(own["difference"]) > 0.01
        else:
            assert math.log(own["value"] / dense["value"]) == pytest.approx(0, abs=1e-3)
        assert figures(record, "passkey", "score")["dense+omnikv"]["count"] == 2
        printed = capsys.readouterr().out
        assert "perplexity, last 128 tokens" in printed and "| dense+omnikv |" in printed


def test_decode_compares_caches_without_an_artifact(compared, text):
    names = ["dense+random:budget=0.3,window=8", "dense+snapkv:budget=0.3,window=8"]
    record = compared(
        f"--methods {' '.join(names)} --text {text} --samples 2 --length 400 --repeats 0"
    )
    assert [each["name"] for each in record["methods"]] == ["dense", *names]
    assert [each["kept"] for each in record["methods"]] == [1.0, 0.3, 0.3]
    ends = figures(record, "text:words.txt", "perplexity, last 128 tokens")
    drawn, voted = (ends[name]["difference"] for name in names)
    assert drawn != pytest.approx(voted, abs=1e-3) and min(abs(drawn), abs(voted)) > 1e-3


def test_decode_times_and_memory_of_every_method(artifact_file, compared, capsys):
    policy = "dense+streaming:sinks=4,window=60"
    file = artifact_file("cfg", 0.05)
    record = compared(
        f"{file} --methods dense+omnikv {policy} --context 512 --samples 0 --repeats 1 --steps 2"
    )
    timed = {each["method"]: each for each in record["decode"]}
    assert list(timed) == ["dense", "dense_kernel", "dense+omnikv", policy]
    assert {each["length"] for each in timed.values()} == {512} and record["figures"] == []
    # Keys and values of 3 layers, 2 KV heads of 16 numbers each, in fp32.
    token = 3 * 2 * 2 * 16 * 4
    for name, tokens in (("dense_kernel", 512), (policy, 64)):
        assert tokens * token <= timed[name]["cache_bytes"] <= 1.6 * tokens * token
    row = timed["dense+omnikv"]
    (seconds,) = row["rounds"]
    over = {name: rounds[0] / seconds for name, rounds in row["dense_rounds"].items()}
    assert row["speedups"] == pytest.approx(over) and row["steps"] == 2
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line.split() for line in lines if line.startswith("| dense+omnikv "))
    assert line[3:6:2] == [f"{min(over.values()):.2f}x", f"{over['dense']:.2f}x"]
    assert line[7] == f"{1e3 / row['tokens_per_second']:.2f}"
    assert "## 512 tokens" in lines


@pytest.mark.parametrize("family", ["sliding", "convolutions"])
def test_decode_times_a_model_whose_cache_cannot_be_cut_back(family, hybrid, compared, tmp_path):
    """Keys that have left a window, or a state, do not come back: the cache grows each round."""
    model = hybrid
    if family == "convolutions":
        layers = ["conv", "full_attention", "conv"]
        model = save_tiny(tmp_path / "lfm2", family="Lfm2", layer_types=layers)
    # The second --model counts. Windows have 32 tokens.
    words = f"--model {model} --methods dense+snapkv:budget=0.5,window=8 --samples 0 --repeats 2"
    for context in (100, 8):
        record = compared(f"{words} --steps 2 --context {context}")
        timed = {each["method"]: each for each in record["decode"]}
        assert list(timed) == ["dense", "dense_kernel", "dense+snapkv:budget=0.5,window=8"]
        assert all(len(each["rounds"]) == 2 for each in timed.values())


def test_decode_caches_are_filled_with_equal_keys(loaded, artifact_file):
    import headwise

    plain = headwise.load(artifact_file("cfg", 0.5)).new_cache(loaded.model)
    banked = headwise.load(artifact_file("cfg", 0.5)).new_cache(loaded.model, offload="packed")
    method = type("", (), {"drops": False})
    for cache in (plain, banked):
        at_random(loaded, 300, 7, method, cache)
    assert plain.get_seq_length() == banked.get_seq_length() == 300
    assert torch.equal(plain.layers[0].keys, banked.layers[0].keys)


def test_decode_with_a_failing_kernel_writes_no_record(
    artifact_file, compared, tmp_path, monkeypatch
):
    def failing(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr("runtime.omnikv.decode.OmniKV.select_tokens", failing)
    with pytest.raises(HeadwiseError, match="RuntimeError: no such instruction"):
        compared(f"{artifact_file('cfg', 0.1)} --samples 1 --length 300 --repeats 0")
    assert not (tmp_path / "figures.json").exists()


def test_decode_of_nothing_is_refused(compared):
    with pytest.raises(HeadwiseError, match="leaves nothing to measure"):
        compared("--methods dense+snapkv --repeats 0 --samples 0")


def test_decode_refuses_the_seed_of_the_search(searched, compared):
    with pytest.raises(HeadwiseError, match="prompts of seed 0 are those of the search"):
        compared(f"{searched}/cfg.yaml --methods headwise+snapkv --seed 0")


def test_decode_refuses_an_artifact_without_sections(searched, compared):
    with pytest.raises(HeadwiseError, match="no decode or kv_cache section: headwise filters"):
        compared(f"{searched}/cfg.yaml")
