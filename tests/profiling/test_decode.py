"""headwise decode on a tiny model: its figures and its refusals."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from artifacts import (
    Artifact,
    Decode,
    HeadwiseError,
    OmniKV,
    Prefill,
    load_pair,
    save,
    window_arrays,
)
from headwise.__main__ import main
from profiling.prompts.held_out import Seen
from profiling.prompts.prompt import Prompt, make_prompts
from profiling.prompts.texts import read_ids
from profiling.prompts.tokens import Encoder
from profiling.prompts.words import sentences
from profiling.quality.forced_decode import begin, dense_losses, forced_losses
from runtime.fingerprint import fingerprint


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text(" ".join(f"{i} of many numbered words" for i in range(400)))
    return file


@pytest.fixture
def rows(folder, tmp_path):
    """rows(words): the rows of the record that headwise decode writes."""

    def call(words):
        out = tmp_path / "figures.json"
        out.unlink(missing_ok=True)
        main(["decode", *f"--model {folder} --dtype float32 --json {out} {words}".split()])
        return json.loads(out.read_text())["rows"]

    return call


@pytest.fixture
def artifact_file(loaded, tmp_path):
    """made(name, budget, selector=): an artifact with a decode section."""

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


@pytest.fixture
def base(text):
    """Options of a comparison on 20 tokens of a text, without times."""
    return f"--repeats 0 --text {text} --text-length 200 --forced 20"


def test_forced_losses_equal_those_of_one_prefill(loaded, text):
    from transformers import DynamicCache

    prompts = make_prompts(f"text:{text}", loaded.tokenizer, length=200, samples=9, seed=0)
    begun = list(begin(loaded.model, lambda: DynamicCache(config=loaded.model.config), prompts, 30))
    assert [len(some.ids) for some in begun] == [8, 1] and begun[0].cache.get_seq_length() == 170
    losses = forced_losses(loaded.model, begun, 30)
    expected = dense_losses(loaded.model, prompts, 30)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    assert begun[0].cache.get_seq_length() == 199


def test_decode_change_is_of_the_same_tokens(artifact_file, base, rows):
    base += " --texts 2 --trials 2 --task passkey --task-length 400 --prefill-chunk 150"
    for budget in (0.999, 0.05):
        dense, headwise = rows(f"{base} {artifact_file('cfg', budget)}")
        assert dense["change"] is None and len(dense["answers"]) == len(headwise["answers"]) == 2
        expected = math.log(headwise["perplexity"] / dense["perplexity"])
        change = headwise["change"]
        assert change["value"] == pytest.approx(expected, abs=1e-5) and change["count"] == 2
        cuts = budget < 0.5
        assert (abs(expected) > 0.01) == (change["high"] - change["low"] > 0.01) == cuts


def test_decode_dense_prefill_measures_decode_alone(artifact_file, base, rows):
    base += f" --trials 0 {artifact_file('a', 0.05)}"
    own = rows(base)
    assert [row["method"] for row in own] == ["dense", "headwise"]
    assert own[0]["tokens"] is None
    # Steps of 181 to 199 tokens, a fraction of each.
    read = sum(math.ceil(0.05 * n) for n in range(181, 200)) / 19
    assert own[1]["tokens"] == pytest.approx(read)
    # The artifact's own prefill is dense, so a dense one equals it. One text has no interval.
    plain = rows(f"{base} --dense-prefill")
    assert plain[1]["perplexity"] == pytest.approx(own[1]["perplexity"], rel=1e-5)
    assert plain[1]["tokens"] == own[1]["tokens"]
    assert plain[1]["change"]["low"] == plain[1]["change"]["high"]
    uniform = artifact_file("uniform", 0.1, selector="uniform")
    base = base.rpartition(" ")[0]
    for words, reason in (
        (str(uniform), "--dense-prefill"),
        (f"{artifact_file('b', 0.1)} --offload packed", "--offload"),
    ):
        with pytest.raises(HeadwiseError, match=reason):
            rows(f"{base} --dense-prefill {words}")


@pytest.mark.parametrize("task", ["passkey", "text"])
def test_decode_prompts_that_a_search_saw_are_replaced_or_counted(
    searched, loaded, tmp_path, task, capsys
):
    source = sentences(random.Random(0))
    file = tmp_path / "words.txt"
    file.write_text("".join(f"{i}. {next(source)}" for i in range(100)))
    own = make_prompts(f"{task}:{file}", loaded.tokenizer, length=600, samples=1, seed=1000)
    artifact, arrays = load_pair(searched / "cfg.yaml")
    artifact = artifact.model_copy(
        update={"decode": Decode(omnikv=OmniKV(filter_layers=(0,), budget=0.5))}
    )
    config = tmp_path / "cfg.yaml"
    out = tmp_path / "figures.json"

    def overlaps(seen):
        digests = Seen(seen).digests
        calibration = artifact.search.calibration.model_copy(update={"seen_windows": len(digests)})
        search = artifact.search.model_copy(update={"calibration": calibration})
        with_windows = arrays | window_arrays(digests)
        save(artifact.model_copy(update={"search": search}), config, with_windows)
        words = f"{config} --model {searched / 'tiny'} --repeats 0 --json {out} --dtype float32 "
        words += f"--task {task}:{file} --task-length 600 --trials 1"
        main(["decode", *words.split()])
        return json.loads(out.read_text())["seen_by_search"]

    assert overlaps(own) == []
    whole = [Prompt(read_ids(Encoder(loaded.tokenizer), file), None)]
    row = {"task": f"{task}:words.txt", "length": 600}
    assert overlaps(whole) == [{**row, "overlapping": 1, "samples": 1}]
    assert "1 of 1 prompts of" in capsys.readouterr().out


def test_decode_units_of_a_short_text_and_of_questions_on_one_document(
    rows, folder, tmp_path, capsys
):
    text = "".join(f"{at}. Nobody saw ship {at * at} on its way. " for at in range(20))
    windows = len(text) // 200
    (tmp_path / "a.txt").write_text(text)
    lines = [{"prompt": f"{text} Question {at}?", "answer": "no"} for at in range(4)]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (dense, cache) = rows(
        f"--policy streaming:sinks=4,window=60 --repeats 0 --text {tmp_path}/a.txt --texts 9 "
        f"--text-length 200 --forced 20 --task jsonl:{tmp_path}/b.jsonl --task-length 300"
    )
    assert cache["change"]["count"] == len(cache["losses"]) == windows > 2
    assert len(dense["answers"]) == 4 and dense["accuracy"]["count"] == 1
    printed = capsys.readouterr().out
    assert "accuracy of 4\n" in printed
    assert f"{windows} of 9 prompts of text:a.txt at 200 tokens: there is no more" in printed
    assert "4 of 20 prompts of jsonl:b.jsonl at 300 tokens" in printed


def test_decode_refuses_a_policy_that_is_given_twice(rows):
    with pytest.raises(HeadwiseError, match="--policy full is given twice"):
        rows("--policy full --policy full")


def test_decode_with_a_failing_kernel_writes_no_record(
    artifact_file, base, rows, tmp_path, monkeypatch
):
    def failing(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr("runtime.omnikv.decode.OmniKV.select_tokens", failing)
    with pytest.raises(HeadwiseError, match="RuntimeError: no such instruction"):
        rows(f"{base} --trials 0 {artifact_file('cfg', 0.1)}")
    assert not (tmp_path / "figures.json").exists()


def test_decode_compares_caches_with_the_artifact(artifact_file, text, rows):
    kinds = ["full", "random:budget=0.3,window=8", "snapkv:budget=0.3,window=8"]
    policies = " ".join(f"--policy {kind}" for kind in kinds)
    dense, headwise, full, drawn, voted = rows(
        f"{artifact_file('cfg', 0.999)} {policies} --text {text} --texts 2 --text-length 200 "
        "--forced 70 --trials 0 --repeats 0"
    )
    assert [row["method"] for row in (full, drawn, voted)] == kinds
    assert dense["apart"] is headwise["apart"] is None and abs(headwise["change"]["value"]) < 0.01
    assert full["change"]["value"] == pytest.approx(0, abs=1e-4)
    for row in (drawn, voted):
        assert row["apart"]["low"] < row["apart"]["value"] < row["apart"]["high"]
        less = row["change"]["value"] - headwise["change"]["value"]
        assert row["apart"]["value"] == pytest.approx(less, abs=1e-5)
        # 64 tokens of each text, and the 6 that are left.
        means = [(64 * first + 6 * second) / 70 for first, second in row["losses"]]
        assert math.exp(sum(means) / 2) == pytest.approx(row["perplexity"], rel=1e-4)
    assert drawn["change"]["value"] != pytest.approx(voted["change"]["value"], abs=1e-3)


def test_decode_times_and_memory_of_every_method(artifact_file, rows, tmp_path, capsys):
    policy = "streaming:sinks=4,window=60"
    base = f"--policy {policy} --context 512 --trials 0 --repeats 1 --steps 2"
    timed = rows(f"{base} {artifact_file('cfg', 0.05)}")
    printed = capsys.readouterr().out.splitlines()
    names = ["dense", "dense_kernel", "headwise", policy]
    assert [row["method"] for row in timed] == names
    for row in timed:
        assert row["token_seconds"] > 0
    # Keys and values of 3 layers, 2 KV heads of 16 numbers each, in fp32.
    token = 3 * 2 * 2 * 16 * 4
    assert 512 * token <= timed[1]["device_bytes"] <= 1.6 * 512 * token
    assert 64 * token <= timed[3]["device_bytes"] <= 1.1 * 64 * token
    record = json.loads((tmp_path / "figures.json").read_text())
    seconds = {name: rounds[0] for name, rounds in record["all_seconds"].items()}
    over = {name: seconds[name] / seconds["headwise"] for name in names[:2]}
    assert record["speedups"]["headwise"] == pytest.approx(over)
    (line,) = (line.split() for line in printed if line.startswith("headwise "))
    assert line[3:5] == [f"{min(over.values()):.2f}x", f"{over['dense']:.2f}x"]
