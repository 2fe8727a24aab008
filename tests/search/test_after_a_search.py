"""What comes after a search with one budget for the model: its report, why heads got their patterns, a transfer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import artifacts
from artifacts import HeadwiseError, pattern_name
from profiling.inside.head_fidelity import fidelity
from profiling.models.loading import load_model
from search.explain import Question
from search.explain import run as explain
from search.heads import main as heads
from search.model.prompts import whole_contexts
from search.model.report import report
from search.transfer import Transfer
from search.transfer import run as transfer
from tests.search.conftest import save_tiny

TASKS = ["passkey", "line_turns@questions=2"]


@pytest.fixture(scope="module")
def searched(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("searched") / "cfg.yaml"
    options = ["--length", "1000", "--dtype", "float32", "--cost", "flops", "--budget", "0.7", "--n-trials", "2"]
    limits = ["--max-kl", "100", "--max-perplexity", "100", "--max-nll", "100", "--max-lost", "1"]
    tasks = [word for task in TASKS for word in ("--task", task)]
    assert heads(["--model", str(tiny_model), "--out", str(out), *options, *limits, *tasks, "--no-picture"]) == 0
    return out


def test_the_report_says_what_was_found_and_what_to_type_next(searched: Path) -> None:
    artifact = artifacts.load(searched)
    said = report(artifact, searched, "tiny")
    assert f"{sum(artifact.search.summary.winners.values())} heads" in said if artifact.search else False
    for task in artifact.evidence.tasks:
        assert task.task in said
    assert "answers lost" in said and "counted; not timed here" in said
    assert said.endswith(f"python -m search.gate {searched} --model tiny --task text:FILE")


def test_times_are_quoted_against_the_better_dense(searched: Path) -> None:
    artifact = artifacts.load(searched)
    where = {"command": "c", "device": "a machine", "versions": {}, "length": 1000, "unit": "s"}
    ours, sdpa = "dense attention by Headwise's kernel", "dense attention by sdpa"
    rows = {ours: 2.0, sdpa: 8.0, "predicted": 1.1}

    def said(seconds: float) -> str:
        measured = [
            artifacts.Measurement(name="attention", value=seconds, baseline=value, baseline_name=name, **where)
            for name, value in rows.items()
        ]
        return report(
            artifact.model_copy(update={"evidence": artifacts.Evidence(measurements=tuple(measured))}), searched, "m"
        )

    assert "1,000 tokens (a machine): 2.00 times as fast as the better dense, 8.00 times as fast as the model" in said(
        1.0
    )
    assert "(predicted 1.100 s, +10%)" in said(1.0)
    assert "2.00 times SLOWER than the better dense" in said(4.0)
    for line in ("dense as the model comes              8.000 s", "dense by Headwise's kernel            2.000 s"):
        assert line in said(1.0)


def test_every_head_is_explained_by_the_recorded_price(searched: Path) -> None:
    arrays = artifacts.load_arrays(searched)
    assert len(np.unique(arrays["allocation.price"])) == 1
    for layer in range(3):
        for head in range(6):
            answer = explain(Question(file=searched, layer=layer, head=head))
            why = " ".join(answer["why"])
            assert "has the least sum" in why or "in a later step" in why or "left the dearer estimates out" in why
            assert answer["unit"] == "flops" and sum(row["chosen"] for row in answer["candidates"]) == 1


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (None, "allocation.ranks", "searched for 2 ranks of tensor parallelism, which share a layer's price"),
        ("allocation.price", "allocation.former", r"no allocation\.price in its sidecar"),
        (".a_64_125.", ".a_64_126.", "the search tried a_64_126, which searches try no more"),
    ],
)
def test_without_a_price_of_its_own_and_known_candidates_no_head_is_chosen(
    old: str | None, new: str, says: str, searched: Path, tiny_model: Path, tmp_path: Path
) -> None:
    artifact, arrays = artifacts.load_pair(searched)
    changed = {name.replace(old, new) if old else name: array for name, array in arrays.items()}
    file = tmp_path / "changed.yaml"
    artifacts.save(artifact, file, changed if old else {**changed, new: np.array([2])})
    with pytest.raises(HeadwiseError, match=says):
        transfer(Transfer(source=file, model=str(tiny_model), out=tmp_path / "new.yaml"))
    if old != ".a_64_125.":
        (why,) = explain(Question(file=file, layer=1, head=0))["why"]
        assert ("by what the slowest of 2 ranks takes in a layer" if old is None else "was not written down") in why


def test_a_fine_tune_of_other_weights_is_searched_again_at_the_price(
    searched: Path, tiny_model: Path, tmp_path: Path
) -> None:
    import torch
    import transformers as t

    other = save_tiny(tmp_path / "other")
    model = t.AutoModelForCausalLM.from_pretrained(other)
    torch.manual_seed(3)
    rows = model.model.layers[1].self_attn.q_proj.weight.data[:16]
    rows.copy_(torch.randn_like(rows) * rows.std() * 2)
    model.save_pretrained(other)
    files: dict[str, Any] = {"source": searched, "out": tmp_path / "new.yaml"}
    wanted = Transfer(**files, model=str(other), max_drift=0.005, picture=False, command="test")
    written, before, _, moved = transfer(wanted)
    assert moved.any()
    _, arrays = artifacts.load_pair(tmp_path / "new.yaml")
    _, old = artifacts.load_pair(searched)
    price, weight = float(old["allocation.price"][0]), old["allocation.weight"]
    for layer, head in np.argwhere(moved):
        named = [name.removesuffix(".objective") for name in arrays if name.endswith(".objective") and name[0] == "c"]
        named = [name for name in named if name.startswith("candidates.")]
        totals = {
            int(name.split(".")[1]): weight[layer] * arrays[f"{name}.objective"][layer, head]
            + price * arrays[f"{name}.flops"][layer, head]
            for name in named
        }
        chosen = int(arrays["chosen.candidate"][layer, head])
        assert totals[chosen] <= min(totals.values()) * (1 + 1e-5)
    assert written.evidence == artifacts.Evidence() and before.evidence.tasks
    # Scores are of the contexts of the search's own prompts, on the fine-tune.
    loaded, (layer, head) = load_model(str(other), dtype="float32"), tuple(np.argwhere(moved)[0])
    made = {prompt.context: prompt for prompt in whole_contexts(TASKS, loaded, length=1000, samples=1, seed=0)}
    contexts = [replace(prompt, input_ids=prompt.context, turn=0) for prompt in made.values()]
    name = pattern_name(pattern := artifacts.BlockSparse(blocks=4))
    prefill = before.prefill.model_copy(update={"layers": ((name,) * 6,) * 3, "front": None})
    alone = before.model_copy(update={"patterns": {name: pattern}, "prefill": prefill})
    found = np.mean([fidelity(loaded.model, alone, prompt).error[layer, head] for prompt in contexts])
    of_it = next(values for key, values in arrays.items() if key.endswith(f".{name}.error"))
    assert of_it[layer, head] == pytest.approx(found, rel=1e-3)
