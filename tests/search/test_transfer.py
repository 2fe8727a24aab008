"""python -m search.transfer: the heads that moved are searched again, the others keep their patterns."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import artifacts
from artifacts import HeadwiseError
from profiling.inside.capture import LayerInputs, capture
from profiling.inside.head_fidelity import fidelity
from profiling.ledger import Ledger
from profiling.models.loading import load_model
from profiling.prompts.prompt import digest, make_prompts
from runtime import load
from search.explain import Question
from search.explain import run as explain
from search.published.config import HeadSearch
from search.published.head_budget import run as run_search
from search.transfer import Transfer, main, run
from search.transferring.rules import of_heads
from tests.search.conftest import save_tiny

LENGTH = 1000
MOVED = [(0, 1), (2, 4)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Fine-tunes of one tiny model in whose stream attention leaves no trace: what one head does no other one sees."""
    import transformers as t

    folder = tmp_path_factory.mktemp("models")
    base = save_tiny(folder / "base")

    def change(name: str, alter: Callable[[Any], None]) -> Path:
        model = t.AutoModelForCausalLM.from_pretrained(base)
        alter(model)
        model.save_pretrained(folder / name)
        t.AutoTokenizer.from_pretrained(base).save_pretrained(folder / name)
        return folder / name

    def silence(model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.data.zero_()

    base = change("base", silence)
    return change


def _perturb(model: Any) -> None:
    """New queries for two heads: they look elsewhere."""
    torch.manual_seed(5)
    for layer, head in MOVED:
        rows = model.model.layers[layer].self_attn.q_proj.weight.data[16 * head : 16 * (head + 1)]
        rows.copy_(torch.randn_like(rows) * rows.std() * 2)


@pytest.fixture(scope="module")
def source(models: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("found") / "cfg.yaml"
    base = models("same", lambda model: None)
    options = {"length": LENGTH, "budget": "0.6", "dtype": "float32", "calibration": "passkey", "picture": False}
    run_search(HeadSearch(model=str(base), out=out, samples=2, command="test", **options))
    return out


@pytest.fixture(scope="module")
def finetune(models: Callable[..., Path]) -> Path:
    return models("finetune", _perturb)


def options(source: Path, model: Path, out: Path, **more: Any) -> Transfer:
    return Transfer(source=source, model=str(model), out=out, **{"picture": False, "command": "test", **more})


@pytest.fixture(scope="module")
def transferred(source: Path, finetune: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("transferred") / "new.yaml"
    run(options(source, finetune, out))
    return out


def test_the_same_weights_have_not_drifted(source: Path, models: Callable[..., Path], tmp_path: Path) -> None:
    written, before, drift, moved = run(options(source, models("copy", lambda model: None), tmp_path / "new.yaml"))
    np.testing.assert_allclose(drift.by_head, 0, atol=1e-4)
    assert not moved.any()
    assert written.prefill == before.prefill
    assert written.patterns == before.patterns


def test_only_the_heads_that_moved_are_searched_again(
    source: Path, finetune: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new.yaml"
    assert main([str(source), "--model", str(finetune), "--out", str(out), "--no-picture"]) == 0
    said = capsys.readouterr().out
    assert said.endswith(f"next: python -m search.gate {out} --model {finetune} --task text:FILE\n")
    assert "2 of 18 heads drifted by more than 0.25 and were searched again" in said
    assert "layers   0 (1), 2 (1)" in said
    before, old = artifacts.load_pair(source)
    after, new = artifacts.load_pair(out)
    assert [tuple(at) for at in np.argwhere(new["transfer.again"])] == MOVED
    assert [tuple(at) for at in np.argwhere(new["transfer.drift"] > 0.25)] == MOVED
    for layer, (row, other) in enumerate(zip(before.prefill.layers, after.prefill.layers, strict=True)):
        assert row is not None and other is not None
        kept = [head for head in range(6) if (layer, head) not in MOVED]
        assert [row[head] for head in kept] == [other[head] for head in kept]
    for name in (name for name in old if name.startswith("candidates.")):
        changed = {tuple(at) for at in np.argwhere(old[name] != new[name])}
        assert changed <= set(MOVED)
    assert after.search is not None
    assert after.search.command.endswith("2 of 18 heads searched again")
    assert set(after.patterns) == {name for row in after.prefill.layers for name in row or ()}
    assert {path.name for path in tmp_path.iterdir()} == {"new.yaml", after.sidecar.file if after.sidecar else ""}


def test_heads_searched_again_are_as_a_search_of_the_fine_tune_finds_them(
    transferred: Path, finetune: Path, tmp_path: Path
) -> None:
    searched = tmp_path / "searched.yaml"
    settings = {"length": LENGTH, "budget": "0.6", "dtype": "float32", "calibration": "passkey", "picture": False}
    run_search(HeadSearch(model=str(finetune), out=searched, samples=2, command="test", **settings))
    (one, mine), (other, theirs) = artifacts.load_pair(transferred), artifacts.load_pair(searched)
    for layer, head in MOVED:
        rows = one.prefill.layers[layer], other.prefill.layers[layer]
        assert rows[0] is not None and rows[1] is not None
        assert rows[0][head] == rows[1][head]
        for name in theirs:
            if name.startswith(("candidates.", "chosen.")):
                np.testing.assert_allclose(mine[name][layer, head], theirs[name][layer, head], rtol=1e-4, atol=1e-6)


def test_scores_and_summary_are_measured_on_the_fine_tune(transferred: Path, finetune: Path) -> None:
    artifact, arrays = artifacts.load_pair(transferred)
    loaded = load_model(str(finetune), dtype="float32")
    prompts = make_prompts("passkey", loaded.tokenizer, length=LENGTH, samples=2, seed=0)
    found = [fidelity(loaded.model, artifact, prompt) for prompt in prompts]
    for measure in ("error", "recall", "density"):
        mean = np.mean([getattr(one, measure) for one in found], axis=0)
        np.testing.assert_allclose(arrays[f"chosen.{measure}"], mean, rtol=1e-3, atol=1e-5)
        assert artifact.search is not None
        assert getattr(artifact.search.summary, measure) == pytest.approx(mean.mean(), rel=1e-3)
    assert sum(artifact.search.summary.winners.values()) == 18
    # What the heads that moved would have had, had their patterns been kept.
    before = arrays["transfer.before"] + arrays["transfer.drift"] * np.maximum(arrays["transfer.before"], 0.01)
    for at in MOVED:
        assert arrays["chosen.error"][at] < before[at]


def test_the_runtime_serves_it_to_the_fine_tune_alone(source: Path, finetune: Path, transferred: Path) -> None:
    with load(transferred).apply(load_model(str(finetune), dtype="float32").model):
        pass
    with pytest.raises(HeadwiseError, match="weights_sha256"), load(source).apply(load_model(str(finetune)).model):
        pass


def test_explain_tells_of_drift(transferred: Path) -> None:
    assert "Searched again on this model" in explain(Question(file=transferred, layer=2, head=4))["why"][0]
    assert explain(Question(file=transferred, layer=2, head=3))["why"][0].startswith("Taken over")
    _, arrays = artifacts.load_pair(transferred)
    told = [head["error"] for head in explain(Question(file=transferred, layer=1))["heads"]]
    np.testing.assert_allclose(told, arrays["chosen.error"][1])


def test_a_larger_limit_keeps_more(source: Path, finetune: Path, tmp_path: Path) -> None:
    _, _, drift, moved = run(options(source, finetune, tmp_path / "all.yaml", max_drift=float("inf")))
    assert not moved.any()
    middle = float(sorted(drift.by_head[at] for at in MOVED)[1])
    _, _, _, moved = run(options(source, finetune, tmp_path / "one.yaml", max_drift=middle * 0.999))
    assert moved.sum() == 1


def test_evidence_and_sections_of_the_other_model_stay_behind(
    source: Path, finetune: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact, arrays = artifacts.load_pair(source)
    cache = artifacts.KVCache(policies={"full": artifacts.Full(kind="full")}, layers=("full",) * 3)
    with_cache = tmp_path / "cache.yaml"
    artifacts.save(artifact.model_copy(update={"kv_cache": cache}), with_cache, {**arrays, "kv.curve": np.zeros(3)})
    out = tmp_path / "new.yaml"
    main([str(with_cache), "--model", str(finetune), "--out", str(out), "--no-picture"])
    assert "not taken over: kv_cache, which were found on same" in capsys.readouterr().out
    assert artifacts.load(out).kv_cache is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 2}, "num_layers is 3 in the artifact, 2 in it"),
        ({"num_attention_heads": 3, "num_key_value_heads": 1}, "num_heads is 6 in the artifact, 3 in it"),
        ({"family": "Qwen2"}, "architecture is LlamaForCausalLM in the artifact, Qwen2ForCausalLM in it"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope is"),
    ],
)
def test_another_shape_is_no_fine_tune(source: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    other = save_tiny(tmp_path / "other", **changes)
    with pytest.raises(HeadwiseError, match=re.escape(said)):
        run(options(source, other, tmp_path / "new.yaml"))
    assert not (tmp_path / "new.yaml").exists()


def test_another_tokenizer_is_named(source: Path, finetune: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(finetune, other)
    file = other / "tokenizer.json"
    # Two symbols change places: the same text has other ids.
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(content))
    with pytest.raises(HeadwiseError, match="by the tokenizer of other: it writes the same prompts otherwise"):
        run(options(source, other, tmp_path / "new.yaml"))


def test_what_was_not_searched_is_refused(source: Path, finetune: Path, tmp_path: Path) -> None:
    artifact, arrays = artifacts.load_pair(source)
    bare = tmp_path / "bare.yaml"
    windows = arrays["calibration.seen_windows"]
    artifacts.save(artifact, bare, {"chosen.recall": arrays["chosen.recall"], "calibration.seen_windows": windows})
    with pytest.raises(HeadwiseError, match="no errors of its heads"):
        run(options(bare, finetune, tmp_path / "new.yaml"))
    where = artifacts.Imported(format="minference", file="best.json", sha256="0" * 64, scores="recall")
    prefill = artifact.prefill.model_copy(update={"imported": where})
    del arrays["calibration.seen_windows"]
    artifacts.save(artifact.model_copy(update={"search": None, "prefill": prefill}), bare, arrays)
    with pytest.raises(HeadwiseError, match="was not searched here"):
        run(options(bare, finetune, tmp_path / "new.yaml"))


def test_a_task_with_a_file_is_asked_for_and_the_others_are_known(source: Path, finetune: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "novel.txt", tmp_path / "text.yaml"
    text.write_text("It was a dark night. " * 200)
    artifact, arrays = artifacts.load_pair(source)
    assert artifact.search is not None
    tokenizer = load_model(str(finetune), dtype="float32").tokenizer
    made = [make_prompts(task, tokenizer, length=LENGTH, samples=2, seed=0) for task in ("passkey", f"text:{text}")]
    update = {"tasks": ("passkey", "text:novel.txt"), "sha256": digest([prompt for some in made for prompt in some])}
    calibration = artifact.search.calibration.model_copy(update=update)
    search = artifact.search.model_copy(update={"calibration": calibration})
    artifacts.save(artifact.model_copy(update={"search": search}), out, arrays)
    with pytest.raises(HeadwiseError, match=r"text:novel\.txt, whose file is not in the artifact: give --task"):
        run(options(out, finetune, tmp_path / "new.yaml"))
    run(options(out, finetune, tmp_path / "new.yaml", calibration=(f"text:{text}",)))
    assert (tmp_path / "new.yaml").exists()


def test_options_that_cannot_be_right(source: Path, finetune: Path, tmp_path: Path) -> None:
    for limit in (-0.1, float("nan")):
        with pytest.raises(HeadwiseError, match="--max-drift must be at least 0"):
            options(source, finetune, tmp_path / "new.yaml", max_drift=limit)
    with pytest.raises(HeadwiseError, match="--task kv_retrieval: the search looked at passkey"):
        run(options(source, finetune, tmp_path / "new.yaml", calibration=("kv_retrieval",)))


def test_heads_alone_are_what_they_are_in_the_layer(finetune: Path) -> None:
    loaded = load_model(str(finetune), dtype="float32")
    seen: list[LayerInputs] = []
    capture(loaded.model, torch.arange(70).reshape(1, 70), seen.append)
    part = of_heads(seen[0], [5, 0])
    assert part.q.shape == part.k.shape == part.v.shape == (1, 2, 70, 16)
    assert torch.equal(part.q[0, 0], seen[0].q[0, 5])
    assert torch.equal(part.k[0], seen[0].k[0, [1, 0]])


def test_what_is_in_the_ledger_is_not_measured_again(
    source: Path, finetune: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new.yaml"
    monkeypatch.setattr(Ledger, "remove", lambda self: None)
    first = run(options(source, finetune, out))[0]

    def never(*args: Any) -> None:
        raise AssertionError("a pass over a prompt that is finished")

    monkeypatch.setattr("profiling.inside.head_fidelity.capture", never)
    # Of another limit the drift is there, and heads are scored.
    assert run(options(source, finetune, out, max_drift=0.05))[3].sum() >= len(MOVED)
    monkeypatch.setattr("search.common.layers.capture", never)
    assert run(options(source, finetune, out))[0].content_sha256 == first.content_sha256
