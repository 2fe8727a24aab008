"""headwise decode on a tiny model: what it counts, and what it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from artifacts import Artifact, Decode, HeadwiseError, OmniKV, Prefill, load, save
from profiling import decode
from profiling.decoding import run as decoding
from profiling.decoding.losses import by_position, position_lines
from profiling.models.loading import LoadedModel
from profiling.prompts.prompt import make_prompts
from profiling.quality.forced_decode import begin, dense_losses, forced_losses
from runtime.fingerprint import fingerprint


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "words.txt"
    file.write_text(" ".join(f"{i} of many numbered words" for i in range(400)))
    return file


Rows = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def rows(folder: Path, tmp_path: Path) -> Rows:
    """rows(words): the rows of the record that headwise decode writes."""

    def call(words: str) -> list[dict[str, Any]]:
        out = tmp_path / "figures.json"
        out.unlink(missing_ok=True)
        decode.main(f"--model {folder} --dtype float32 --json {out} {words}".split())
        found: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
        return found

    return call


def config(loaded: LoadedModel, place: Path, budget: float) -> Path:
    artifact = Artifact(
        model=fingerprint(loaded.model, name="tiny"),
        search=None,
        patterns={},
        prefill=Prefill(dense_below=4096, layers=(None, None, None)),
        decode=Decode(omnikv=OmniKV(filter_layers=(0,), budget=budget)),
    )
    save(artifact, place, {})
    return place


def test_losses_of_forced_tokens_are_those_of_one_prefill(loaded: LoadedModel, text: Path) -> None:
    from transformers import DynamicCache

    prompts = make_prompts(f"text:{text}", loaded.tokenizer, length=200, samples=9, seed=0)
    begun = list(begin(loaded.model, lambda: DynamicCache(config=loaded.model.config), prompts, 30))
    assert [len(some.ids) for some in begun] == [8, 1] and begun[0].cache.get_seq_length() == 170
    losses = forced_losses(loaded.model, begun, 30)
    torch.testing.assert_close(
        losses, dense_losses(loaded.model, prompts, 30), rtol=1e-4, atol=1e-4
    )
    assert begun[0].cache.get_seq_length() == 170
    torch.testing.assert_close(forced_losses(loaded.model, iter(begun), 30), losses)
    assert begun[0].cache.get_seq_length() == 199


def test_the_change_is_that_of_the_same_tokens(
    loaded: LoadedModel, text: Path, tmp_path: Path, rows: Rows
) -> None:
    asked = (
        f"--repeats 0 --text {text} --texts 2 --text-length 200 --forced 20 --trials 2 "
        "--task passkey --task-length 400 --prefill-chunk 150"
    )
    for budget in (0.999, 0.05):
        dense, headwise = rows(f"{asked} {config(loaded, tmp_path / f'{budget}.yaml', budget)}")
        assert dense["change"] is None and len(dense["answers"]) == len(headwise["answers"]) == 2
        expected = math.log(headwise["perplexity"] / dense["perplexity"])
        change = headwise["change"]
        assert change["value"] == pytest.approx(expected, abs=1e-5) and change["count"] == 2
        cuts = budget < 0.5
        assert (abs(expected) > 0.01) == (change["high"] - change["low"] > 0.01) == cuts


def test_several_artifacts_are_compared_on_the_same_prompts(
    loaded: LoadedModel, text: Path, tmp_path: Path, rows: Rows
) -> None:
    first = config(loaded, tmp_path / "a.yaml", 0.05)
    second = config(loaded, tmp_path / "b.yaml", 0.1)
    asked = f"--repeats 0 --text {text} --trials 0 --text-length 200 --forced 20 {first}"
    own = rows(f"{asked} --beside {second}")
    assert [row["method"] for row in own] == ["dense", "headwise", "b"]
    assert own[0]["tokens"] is None
    # Steps of 181 to 199 tokens, a share of each.
    read = [sum(math.ceil(share * n) for n in range(181, 200)) / 19 for share in (0.05, 0.1)]
    assert [row["tokens"] for row in own[1:]] == pytest.approx(read)
    # Their prefills are dense: one for both gives the same, and no interval comes of one text.
    shared = rows(f"{asked} --beside {second} --dense-prefill")
    for row, other in zip(own, shared, strict=True):
        assert other["perplexity"] == pytest.approx(row["perplexity"], rel=1e-5)
        assert other["tokens"] == row["tokens"]
    assert shared[1]["change"]["low"] == shared[1]["change"]["high"]
    with pytest.raises(HeadwiseError, match="artifacts of one name cannot be told apart: b"):
        rows(f"{asked} --beside {second} --beside {second}")


def test_a_kernel_that_fails_is_no_row_of_dense_attention(
    loaded: LoadedModel, text: Path, tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr("runtime.omnikv.decode.OmniKV.choose", failing)
    made = config(loaded, tmp_path / "cfg.yaml", 0.1)
    with pytest.raises(HeadwiseError, match="RuntimeError: no such instruction"):
        rows(f"{made} --repeats 0 --text {text} --trials 0 --text-length 200 --forced 20")
    assert not (tmp_path / "figures.json").exists()


def test_one_prefill_serves_what_chooses_by_the_last_query_alone(
    loaded: LoadedModel, text: Path, tmp_path: Path, rows: Rows
) -> None:
    made = load(config(loaded, tmp_path / "cfg.yaml", 0.1))
    assert made.decode is not None
    section = made.decode.omnikv.model_copy(update={"selector": "uniform"})
    save(made.model_copy(update={"decode": Decode(omnikv=section)}), tmp_path / "uniform.yaml", {})
    asked = f"--dense-prefill --text {text} --text-length 200 --forced 20 {tmp_path}/uniform.yaml"
    with pytest.raises(HeadwiseError, match="--dense-prefill shares one cache: artifacts"):
        rows(asked)
    with pytest.raises(HeadwiseError, match="leave --offload away"):
        rows(f"{asked} --offload packed")


def test_caches_stand_beside_the_artifact(
    loaded: LoadedModel, text: Path, tmp_path: Path, rows: Rows
) -> None:
    kinds = ["full", "random:budget=0.3,window=8", "snapkv:budget=0.3,window=8"]
    made = config(loaded, tmp_path / "cfg.yaml", 0.999)
    dense, headwise, full, drawn, voted = rows(
        f"{made} --text {text} --texts 2 --text-length 200 --forced 70 --trials 0 --repeats 0 "
        + " ".join(f"--policy {kind}" for kind in kinds)
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


def test_caches_are_timed_without_an_artifact(rows: Rows) -> None:
    policy = "streaming:sinks=4,window=60"
    asked = f"--policy {policy} --context 512 --trials 0 --repeats 1 --steps 2"
    sdpa, full, stream = rows(f"{asked} --memory 1MiB")
    assert [row["method"] for row in (sdpa, full, stream)] == ["dense", "dense_kernel", policy]
    # Keys and values of 3 layers, 2 KV heads of 16 numbers each, in fp32.
    token = 3 * 2 * 2 * 16 * 4
    assert 512 * token <= full["device_bytes"] <= 1.6 * 512 * token
    assert 64 * token <= stream["device_bytes"] <= 1.1 * 64 * token
    for row in (sdpa, full, stream):
        assert row["batch"] == 2**20 // row["device_bytes"]
        assert row["token_seconds"] > 0 and row["batch_rate"] > 0
    with pytest.raises(HeadwiseError, match="too small for one sequence of 512 tokens"):
        rows(f"{asked} --memory 1000")


def test_perplexity_by_position() -> None:
    dense = torch.arange(600).float().expand(2, -1) / 600
    # One text loses nothing, the other more in each quarter.
    more = torch.stack([torch.zeros(600), 0.2 * (torch.arange(600) // 150)])
    found = by_position({"dense": dense, "b": dense + more}, dense)
    assert [part.start for part in found["b"]] == [0, 150, 300, 450]
    assert all(part.change is None for part in found["dense"])
    for quarter, part in enumerate(found["b"]):
        assert part.change is not None and part.change.count == 2
        assert part.change.value == pytest.approx(0.1 * quarter, abs=1e-6)
        # Student's t of one degree of freedom: 12.706 standard errors of 0.1 a quarter.
        assert part.change.high - part.change.value == pytest.approx(1.2706 * quarter, abs=1e-3)
        own = dense[0, 150 * quarter : 150 * (quarter + 1)].mean() + 0.1 * quarter
        assert part.perplexity == pytest.approx(math.exp(own), rel=1e-5)
    lines = position_lines(
        {name: [asdict(part) for part in parts] for name, parts in found.items()}
    )
    assert lines[0].split()[-8:] == ["from", "0", "from", "150", "from", "300", "from", "450"]
    second = found["b"][1].change
    assert second is not None and "%" not in lines[1]
    low, high = (100 * math.expm1(bound) for bound in (second.low, second.high))
    assert f"{found['b'][1].perplexity:.2f} +10.52% ({low:+.2f} to {high:+.2f})" in lines[2]
    assert by_position({"dense": dense[:, :500]}, dense[:, :500]) == {} and position_lines({}) == []


def test_an_interrupted_comparison_goes_on(
    loaded: LoadedModel, text: Path, tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = config(loaded, tmp_path / "a.yaml", 0.05)
    second = config(loaded, tmp_path / "b.yaml", 0.1)
    asked = (
        f"--repeats 0 --text {text} --texts 2 --text-length 200 --dense-prefill --trials 1 "
        f"--task-length 300 {first} --beside {second} --forced"
    )
    whole = rows(f"{asked} 20")
    measure = decoding._quality
    done: list[str] = []

    def killed(config: Any, loaded: Any, method: Any, *rest: Any) -> Any:
        if method.name == "b" and "killed" not in done:
            done.append("killed")
            raise KeyboardInterrupt
        done.append(method.name)
        return measure(config, loaded, method, *rest)

    monkeypatch.setattr(decoding, "_quality", killed)
    with pytest.raises(KeyboardInterrupt):
        rows(f"{asked} 20")
    assert done == ["dense", "headwise", "killed"]
    assert rows(f"{asked} 20") == whole and done[3:] == ["b"]
    assert not list(tmp_path.glob("*.ledger"))
    # Nothing of another text's, and nothing that is to be forgotten.
    done[:] = ["killed"]
    rows(f"{asked} 10 --fresh")
    assert done[1:] == ["dense", "headwise", "b"]


def test_time_stands_beside_both_dense_attentions(
    loaded: LoadedModel, tmp_path: Path, rows: Rows, capsys: pytest.CaptureFixture[str]
) -> None:
    made = config(loaded, tmp_path / "cfg.yaml", 0.05)
    timed = rows(f"{made} --context 300 --repeats 1 --steps 2 --trials 0")
    assert [row["method"] for row in timed] == ["dense", "dense_kernel", "headwise"]
    record = json.loads((tmp_path / "figures.json").read_text())
    seconds = {name: rounds[0] for name, rounds in record["all_seconds"].items()}
    over = {name: seconds[name] / seconds["headwise"] for name in ("dense", "dense_kernel")}
    assert record["speedups"]["headwise"] == pytest.approx(over)
    line = capsys.readouterr().out.splitlines()[-1].split()
    shown = [f"{min(over.values()):.2f}x", f"{over['dense']:.2f}x"]
    assert line[0] == "headwise" and line[3:5] == shown
