"""headwise search and headwise demo as their users run them, on tiny models."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import artifacts
from artifacts import HeadwiseError
from headwise.__main__ import main
from kernels.attention import cpu
from kernels.native import build
from kernels.registry import CannotBuildError
from profiling.inside.head_fidelity import fidelity
from profiling.models.loading import load_model
from runtime import load
from runtime.fingerprint import fingerprint
from runtime.layers import attention_layers, full_layers
from search import demo
from search.model.config import ModelSearch
from search.model.costs import causal_tiles
from search.model.limits import Limits
from search.model.start import serving_backend
from search.paper import run, target_tiles
from tests.runtime.tiny import FAMILIES, GEMMA4_SHARED
from tests.runtime.tiny import tiny_model as tiny_of_family
from tests.sampling import sampled
from tests.search.conftest import PAPER
from tests.tiny_text_model import save_tokenizer
from tests.typed import make_prompts

# A fused projection, sliding layers, sinks, and experts with another layout; tests of capture and
# gradients have more, the runtime's matrix all.
TRAITS = ("Phi3", "Gemma3", "GptOss", "Llama4")


def test_heads_writes_pair_and_picture_and_scores_match_the_artifact(tiny_model, tmp_path):
    out = tmp_path / "cfg.yaml"
    run(ModelSearch(model=str(tiny_model), out=out, dense_tail=64, **PAPER))
    artifact, arrays = artifacts.load_pair(out)
    expected = {"cfg.yaml", artifact.sidecar.file, "cfg.png", "cfg.svg", "cfg.csv"}
    assert {path.name for path in tmp_path.iterdir()} == expected
    assert len(out.with_suffix(".csv").read_text().splitlines()) == 1 + 3 * 6
    loaded = load_model(str(tiny_model), dtype="float32")
    (prompt,) = make_prompts("passkey", loaded.tokenizer, length=1000, samples=1, seed=0)
    measured = fidelity(loaded.model, artifact, prompt)
    for name in ("error", "recall", "density"):
        np.testing.assert_allclose(arrays[f"chosen.{name}"], getattr(measured, name), atol=1e-5)


def test_heads_selects_smallest_error_within_budget(by_head):
    artifact, arrays = artifacts.load_pair(by_head)
    errors = [
        values
        for name, values in arrays.items()
        if name.startswith("candidates") and name.endswith(".error")
    ]
    assert len(errors) == 6
    assert (artifact.prefill.dense_below, artifact.prefill.dense_tail) == (500, 0)
    np.testing.assert_array_equal(arrays["chosen.error"], np.min(errors, axis=0))
    assert 0.5 < artifact.search.summary.density <= arrays["chosen.density"].max()
    target = target_tiles(PAPER["budget"], PAPER["length"], 0)
    assert arrays["chosen.density"].max() <= target / causal_tiles(PAPER["length"])
    assert artifact.search.budget == PAPER["budget"]
    assert artifact.search.spent == pytest.approx(artifact.search.summary.density)
    assert sum(artifact.search.summary.winners.values()) == 18


def searched(model, folder):
    """The artifact of a search of a model without a folder, and the model's folder."""
    model.save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    words = f"--model {folder}/model --out {folder}/cfg.yaml --preset paper --length 512"
    assert main(f"search {words} --budget 0.6 --dtype float32 --no-picture".split()) == 0
    return folder / "cfg.yaml", folder / "model"


@pytest.mark.parametrize("family", sampled(FAMILIES, *TRAITS))
@pytest.mark.filterwarnings("ignore")
def test_heads_result_runs_on_each_architecture(family, tmp_path):
    model = tiny_of_family(family, vocab_size=260)
    out, _ = searched(model, tmp_path)
    rows = artifacts.load(out).prefill.layers
    layers = {layer for layer, row in enumerate(rows) if row is not None}
    assert layers == set(full_layers(attention_layers(model)))
    with torch.no_grad(), load(out).apply(model, strict=True) as handle:
        model(torch.randint(3, 250, (1, 512)))
        assert handle.stats()["sparse"] == len(layers)


@pytest.mark.filterwarnings("ignore")
def test_search_with_shared_kv_layers_covers_all_of_them(tmp_path):
    """Also Gemma 4's layers, whose queries transformers cuts to those with requested logits."""
    model = tiny_of_family(
        "Gemma4", vocab_size=260, vocab_size_per_layer_input=260, **GEMMA4_SHARED
    )
    out, folder = searched(model, tmp_path)
    assert [row is not None for row in artifacts.load(out).prefill.layers] == [False, True] * 3
    with torch.no_grad(), load(out).apply(model, strict=True) as handle:
        model(torch.randint(3, 97, (1, 512)))
        assert handle.stats()["sparse"] == 3
    words = f"{out} --model {folder} --out {tmp_path}/new.yaml"
    for command, section in (("filters", "decode"), ("kv --target-share 0.5", "kv_cache")):
        with pytest.raises(HeadwiseError, match=f"layer 2 .*: the {section} section"):
            main(f"{command} {words}".split())


def test_search_with_failing_kernel_build_reports_one_line(tiny_model, monkeypatch, capfd):
    loaded = load_model(str(tiny_model), dtype="float32")
    model = fingerprint(loaded.model, name=loaded.name)
    monkeypatch.setenv("CXX", "false")
    # Not what this process has loaded before.
    monkeypatch.setattr(build, "load", build._load)
    assert serving_backend("auto", model, "float32", "cpu") == "reference"
    output = capfd.readouterr().err
    assert output.count("\n") == 1 and "reference" in output and "false" in output
    assert serving_backend("auto", model, "float32", "cpu", quiet=True) == "reference"
    assert serving_backend("reference", model, "float32", "cpu") == "reference"
    assert capfd.readouterr().err == ""
    with pytest.raises(HeadwiseError, match=r"--backend cpu: .*false"):
        serving_backend("cpu", model, "float32", "cpu")
    with pytest.raises(HeadwiseError, match="--backend abacus: "):
        serving_backend("abacus", model, "float32", "cpu")
    monkeypatch.undo()
    assert serving_backend("auto", model, "float32", "cpu") == "cpu"
    assert capfd.readouterr().err == ""


def test_serving_backend_checks_each_backend_once_and_raises_other_errors(
    tiny_model, monkeypatch, capfd
):
    loaded = load_model(str(tiny_model), dtype="float32")
    model = fingerprint(loaded.model, name=loaded.name)

    def failing(*_, **__):
        raise error

    monkeypatch.setattr(cpu, "run", failing)
    # A build that fails for this call alone: `supports` still accepts the kernel.
    error: Exception = CannotBuildError("its kernel failed to build: no registers")
    assert serving_backend("auto", model, "float32", "cpu") == "reference"
    assert "its kernel failed to build: no registers" in capfd.readouterr().err
    error = ValueError("no layout")
    with pytest.raises(ValueError, match="no layout"):
        serving_backend("auto", model, "float32", "cpu")


LENGTH = 512


@pytest.fixture(scope="module")
def loaded(tiny_model):
    return load_model(str(tiny_model), dtype="float32")


def test_demo_searches_applies_and_prints_key_and_picture(tiny_model, loaded, tmp_path, capsys):
    out = tmp_path / "demo" / "cfg.yaml"
    options = {"length": LENGTH, "tasks": ("prose",), "dtype": "float32", "command": "the command"}
    # A random model has no head that can do without much, nor anything to gain at such a length.
    limits = Limits(max_perplexity=100.0, max_lost=1.0)
    config = ModelSearch(model=str(tiny_model), out=out, limits=limits, keep=True, **options)
    assert demo.demonstrate(config, loaded)
    artifact = artifacts.load(out)
    output = capsys.readouterr().out
    assert artifact.search is not None and artifact.search.allocation == "model"
    assert artifact.evidence.reported_on.name == "held-out"
    assert artifact.evidence.measurements, "the search is by the seconds of this machine"
    assert output.startswith("$ the command\n") and f"wrote {out}" in output
    *_, key, picture = (line for line in output.splitlines() if not line.startswith("first token "))
    # On a busy machine attention may be slower than dense: whole prefills are then not timed.
    if any(each.name == "seconds to the first token" for each in artifact.evidence.measurements):
        assert re.fullmatch(
            rf"first token .* s, [\d.]+x at {LENGTH} tokens; at most .* perplexity .*",
            output.splitlines()[-1],
        )
    assert re.match(rf"pass key \d+ hidden in {LENGTH} tokens: not found by dense attention", key)
    assert "not found by Headwise, which answers '" in key
    assert picture == f"picture of the patterns: {out.with_suffix('.png')}"
    assert out.with_suffix(".png").is_file()


def test_demo_reports_key_found_by_both(loaded, by_head, monkeypatch):
    monkeypatch.setattr(demo, "answer", lambda model, tokenizer, prompt: prompt.answer)
    line = demo._pass_key(loaded, by_head, LENGTH)
    says = rf"pass key (\d+) hidden in {LENGTH} tokens: found by both, dense attention and Headwise"
    assert re.fullmatch(says, line), line


def test_demo_exits_with_3_unless_the_artifact_is_reliably_faster(loaded, tmp_path, monkeypatch):
    ran: list[ModelSearch] = []
    monkeypatch.setattr(demo, "load_model", lambda name, **options: loaded)
    monkeypatch.setattr(
        demo, "demonstrate", lambda config, loaded: ran.append(config) or len(ran) == 1
    )
    words = ["demo", "--model", "other", "--length", "1024", "--out", str(tmp_path)]
    assert [main(words), main(words)] == [0, 3]
    out = tmp_path / "cfg.yaml"
    command = f"headwise search --model other --length 1024 --out {out}"
    assert all((each.model, each.out, each.command) == ("other", out, command) for each in ran)
