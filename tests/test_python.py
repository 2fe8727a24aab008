"""headwise.search, gate and evaluate on a loaded model equal the commands on its name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload
from torch import Tensor, nn

import artifacts
import headwise
from artifacts import HeadwiseError
from headwise.__main__ import main
from headwise.loaded_models import _call
from tests.default_dtype import OTHERS, default_dtype
from tests.sampling import sampled
from tests.tiny_text_model import save_tiny

LENGTH = 512
LIMITS = {"max_kl": 9, "max_perplexity": 9, "max_nll": 9, "max_lost": 1}
OPTIONS: dict[str, Any] = {
    "length": LENGTH,
    "tasks": "prose",
    "budget": 0.8,
    "cost": "flops",
    "picture": False,
    "keep": True,
    **LIMITS,
}
PAGE = (Path(__file__).parents[1] / "docs" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


class Patched(nn.Module):
    """A linear map with a correction of low rank, as adapters are put around one."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Linear(inner.in_features, 2, bias=False)
        self.up = nn.Linear(2, inner.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """The artifact of a search that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole") / "cfg.yaml"
    model, tokenizer = loaded(folder)
    before = state(model)
    result = headwise.search(model, tokenizer, out=out, **OPTIONS)
    assert result is not None and result.written and artifacts.load(out) == result.artifact
    assert state(model) == before
    return result.artifact


def loaded(folder: Path) -> tuple[Any, Any]:
    """The model, in training mode as a fine-tuning leaves it, and its tokenizer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.train(), transformers.AutoTokenizer.from_pretrained(folder)


def patch(model: Any) -> None:
    """Correct the output projection of every layer by an adapter."""
    torch.manual_seed(1)
    for layer in model.model.layers:
        layer.self_attn.o_proj = Patched(layer.self_attn.o_proj)


def state(model: Any) -> dict[str, Any]:
    """All of a model that a search might leave behind."""
    return {
        "attention": model.config._attn_implementation,
        "config": model.config.to_dict(),
        "devices": {name: weight.device for name, weight in model.named_parameters()},
        "requires grad": {name: weight.requires_grad for name, weight in model.named_parameters()},
        "training": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) for module in model.modules()],
        "pre hooks": [len(module._forward_pre_hooks) for module in model.modules()],
        "own": [sorted(vars(module)) for module in model.modules()],
        "grads": [name for name, weight in model.named_parameters() if weight.grad is not None],
    }


def test_search_equals_the_command(whole, folder, tmp_path):
    words = ["--model", str(folder), "--out", str(tmp_path / "cfg.yaml"), "--no-picture"]
    words += f"--length {LENGTH} --task prose --budget 0.8 --cost flops --keep".split()
    words += ["--dtype", "float32"]
    for name, limit in LIMITS.items():
        words += [f"--{name.replace('_', '-')}", str(limit)]
    assert main(["search", *words]) == 0
    assert artifacts.load(tmp_path / "cfg.yaml").content_sha256 == whole.content_sha256
    assert whole.search is not None and f"length={LENGTH}" in whole.search.command


@pytest.mark.parametrize("where", ["call", "model"])
def test_calls_in_inference_mode_are_served(where, whole, folder, tmp_path, capsys):
    """A search takes gradients where the weights allow them; gate and evaluate need none."""
    model, tokenizer = loaded(folder)
    if where == "model":
        weights = model.state_dict()
        with torch.inference_mode():
            model = type(model)(model.config)
            model.load_state_dict(weights)
    before = state(model)
    out = tmp_path / "cfg.yaml"
    with torch.inference_mode(where == "call"):
        found = headwise.search(model, tokenizer, out=out, **OPTIONS)
        assert torch.is_inference_mode_enabled() == (where == "call")
        headwise.gate(model, tokenizer, out, length=LENGTH, tasks="prose", **LIMITS)
        quick = {"samples": 1, "methods": ("headwise",), "speed": False}
        report = tmp_path / "report"
        headwise.evaluate(model, tokenizer, out, out=report, length=LENGTH, tasks="prose", **quick)
    assert found.written and state(model) == before
    reported = "no gradients (model.embed_tokens.weight was made in" in capsys.readouterr().err
    assert reported == (where == "model")
    same = found.artifact.content_sha256 == whole.content_sha256
    assert same == (where == "call")


@pytest.mark.parametrize("dtype", sampled(OTHERS), ids=str)
def test_functions_under_another_default_dtype_return_the_same(dtype, whole, folder, tmp_path):
    out = tmp_path / "cfg.yaml"
    measured = {"length": LENGTH, "tasks": ["prose"]}
    quick = {"quick": True, "speed": False}
    results = []
    for default in (dtype, torch.get_default_dtype()):
        with default_dtype(default):
            model, tokenizer = loaded(folder)
            if default is dtype:
                result = headwise.search(model, tokenizer, out=out, **OPTIONS)
                assert result is not None
                assert result.artifact.content_sha256 == whole.content_sha256
            gated = headwise.gate(model, tokenizer, out, **measured, **LIMITS)
            report = tmp_path / str(default)
            figures = headwise.evaluate(model, tokenizer, out, out=report, **measured, **quick)
            results.append((gated.tasks, figures["figures"]))
    assert results[0] == results[1]


def test_evaluate_takes_an_offloaded_model(whole, folder, tmp_path):
    model, tokenizer = loaded(folder)
    rows = tuple(None if row is None else ("a",) * len(row) for row in whole.prefill.layers)
    origin = artifacts.Imported(format="minference", file="f.json", sha256="0" * 64)
    artifact = artifacts.Artifact(
        model=whole.model,
        search=None,
        patterns={"a": artifacts.AShape(sink=64, window=64)},
        prefill=artifacts.Prefill(dense_below=128, layers=rows, imported=origin),
    )
    artifacts.save(artifact, tmp_path / "cfg.yaml")
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.device.type == "meta"
    options = {"length": LENGTH, "tasks": ["prose"], "quick": True, "speed": False}
    record = headwise.evaluate(
        model, tokenizer, tmp_path / "cfg.yaml", out=tmp_path / "report", **options
    )
    assert record["figures"] and "meta" not in str(record)


def test_functions_under_autocast_are_refused(folder, tmp_path):
    model, tokenizer = loaded(folder)
    before = state(model)
    for function in (headwise.search, headwise.gate, headwise.evaluate):
        artifact = [] if function is headwise.search else ["cfg.yaml"]
        says = r"under torch\.autocast.*model\.to\(torch"
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(HeadwiseError, match=says) as caught,
        ):
            function(model, tokenizer, *artifact, out=tmp_path / "out")
        assert "\n" not in str(caught.value)
    assert state(model) == before and not list(tmp_path.iterdir())


def test_search_records_its_call_without_a_password():
    call = _call("search", {"out": "a.yaml", "storage": "mysql://me:secret@db/x"})
    assert call == "headwise.search(model, tokenizer, out='a.yaml', storage='mysql://me@db/x')"


def test_search_interrupted_leaves_the_model_alone(folder, tmp_path):
    model, tokenizer = loaded(folder)
    before = state(model)
    resume = tmp_path / "cfg.yaml.heads.ledger"

    def interrupt(*_: Any) -> None:
        if list(resume.glob("*.unit")):
            raise KeyboardInterrupt

    handle = model.get_input_embeddings().register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        headwise.search(model, tokenizer, out=tmp_path / "cfg.yaml", **OPTIONS)
    handle.remove()
    assert state(model) == before


@pytest.mark.slow
def test_python_page_blocks_run_on_a_patched_model(folder, tmp_path, monkeypatch):
    """On a small model with short prompts and wide limits."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"patch": patch, "state": state}
    small = {
        '"smollm2"': f'{str(folder)!r}, dtype="float32"',
        '"MODEL"': repr(str(folder)),
        "# Quantize it": "model.train(); patch(model); before = state(model)  # Quantize it",
        'out="cfg.yaml"': 'out="cfg.yaml", name="patched"',
        "4096": "512",
        "bfloat16": "float32",
        "* 600": "* 20",
        "max_lost=0.03": 'budget=0.8, cost="flops", tasks="prose", keep=True',
        "max_lost=0.05": 'max_perplexity=9.0, tasks="prose"',
        "quick=True": 'tasks="passkey", samples=1, speed=False, methods=["headwise"]',
    }
    for block in BLOCKS:
        for text, smaller in small.items():
            block = block.replace(text, smaller)
        exec(compile(block, "python.md", "exec"), names)
    assert len(BLOCKS) == 6 and (tmp_path / "report" / "index.html").is_file()
    model = names["model"]
    assert state(model) == names["before"]
    assert names["result"].artifact.model.name == names["record"]["model"]["name"] == "patched"
    # The page's model is in evaluation mode; this one is left as it is, in training mode.
    stats = names["handle"].stats()
    assert stats["sparse"] == 0 and any("training" in reason for reason in stats["dense"])
    assert names["gate"].passes and [task.task for task in names["gate"].tasks] == ["prose"]
    plain, tokenizer = loaded(folder)
    with pytest.raises(HeadwiseError, match="weights_sha256"):
        headwise.gate(plain, tokenizer, "cfg.yaml", length=LENGTH, tasks=["prose"])
    assert all(module.training for module in plain.modules())
    with headwise.load("cfg.yaml").apply(model), pytest.raises(HeadwiseError, match="applied"):
        headwise.search(model, tokenizer, out="cfg.yaml", **OPTIONS)


@pytest.mark.parametrize(
    ("function", "options", "says"),
    [
        (headwise.search, {"budgets": 0.3}, "'budgets'; known: "),
        (headwise.search, {"dtype": "float32"}, "unknown option 'dtype'"),
        (headwise.search, {"max_kl": "low"}, "--max-kl .* 'low'"),
        (headwise.gate, {"memory": True}, "unknown option 'memory'"),
        (headwise.evaluate, {"memory": True}, "unknown option 'memory'"),
    ],
)
def test_functions_with_a_wrong_option_name_it(function, options, says, folder, tmp_path):
    model, tokenizer = loaded(folder)
    before = state(model)
    artifact = [] if function is headwise.search else ["cfg.yaml"]
    with pytest.raises(HeadwiseError, match=says):
        function(model, tokenizer, *artifact, out=tmp_path / "out", **options)
    assert state(model) == before and not list(tmp_path.iterdir())


def test_search_of_no_model_is_refused(folder, tmp_path):
    model, tokenizer = loaded(folder)
    for wrong in (tokenizer, model.model.layers[0]):
        with pytest.raises(HeadwiseError, match=f"{type(wrong).__name__} is not a transformers"):
            headwise.search(wrong, tokenizer, out=tmp_path / "cfg.yaml")


def test_load_model_returns_the_model_and_its_tokenizer(folder):
    model, tokenizer = headwise.load_model(str(folder), dtype="float32", device="cpu")
    assert not model.training and model.dtype == torch.float32
    assert tokenizer.decode(tokenizer("the river")["input_ids"]) == "the river"
    ids = tokenizer("the river", return_tensors="pt")["input_ids"]
    torch.testing.assert_close(model(ids).logits, loaded(folder)[0].eval()(ids).logits)
