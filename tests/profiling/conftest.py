"""Tiny random models, one for each way in which a layer can attend."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from profiling import evaluate
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.prompt import Prompt
from profiling.quality.method import Method
from search.published.search import HeadSearch, run
from tests.search.conftest import save_tiny

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
HYBRID = GROUPED | {"head_dim": 32, "sliding_window": 16, "layer_types": LAYERS}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
CHUNKED = {
    "attention_chunk_size": 16,
    "intermediate_size_mlp": 96,
    "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
}
# Names of configurations in transformers, and their sizes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 32}),
    "gpt_neox": ("GPTNeoX", SIZES),
    "mistral": ("Mistral", GROUPED | {"sliding_window": 24}),
    "gemma3": ("Gemma3Text", HYBRID),
    "gemma2": ("Gemma2", HYBRID),
    "gpt_oss": ("GptOss", HYBRID | EXPERTS),
    "lfm2": ("Lfm2", GROUPED | {"layer_types": ["conv", "full_attention", "conv"]}),
    "llama4": ("Llama4Text", GROUPED | {"head_dim": 16, "num_local_experts": 2} | CHUNKED),
    "mamba": ("Mamba", {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}),
    "mpt": ("Mpt", {"vocab_size": 97, "d_model": 64, "n_layers": 2, "n_heads": 4}),
    "bert": ("Bert", SIZES),
}


def tiny(family: str) -> Any:
    """A random model in fp32; weights are large enough for attention to be uneven."""
    import transformers

    torch.manual_seed(0)
    name, sizes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
            if parameter_name.endswith("sinks"):
                parameter.copy_(torch.linspace(-1, 2, parameter.numel()))
    return model.eval()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Everything here is tiny: on a busy machine threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model and its tokenizer; not to be written to."""
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def loaded(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype="float32")


@pytest.fixture(scope="session")
def searched(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model `tiny`, an artifact `cfg.yaml` of it and a text; not to be written to."""
    place = tmp_path_factory.mktemp("searched")
    (place / "tiny").symlink_to(folder)
    (place / "text.txt").write_text("It was a long way to the sea, and nobody saw it. " * 400)
    model = str(place / "tiny")
    search = HeadSearch(model=model, out=place / "cfg.yaml", length=LENGTH, budget="0.8")
    run(replace(search, dtype="float32", picture=False, command="x"))
    return place


@pytest.fixture
def sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay pictures out without rendering them."""
    from matplotlib.figure import Figure

    def sketch(figure: Figure, file: BinaryIO, format: str, **_: Any) -> None:
        if format == "png":
            figure.draw_without_rendering()
        file.write(b"a picture")

    monkeypatch.setattr(Figure, "savefig", sketch)


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Trials of which no model knows; the name of the method of each one that is asked for."""
    asked: list[str] = []

    def trials(_: Any, __: Any, prompts: Sequence[Prompt], method: Method) -> Any:
        for number, prompt in enumerate(prompts):
            asked.append(method.name)
            value = (sum(prompt.input_ids) + len(method.name)) % 5 / 4
            answer = {"text": "", "score": value, "token_accuracy": value, "nll": 1 + value}
            choice = {"choice": value if prompt.choices else None}
            loss = {"blocks": [1 + value], "forced": 1 + value, "copies": None}
            asks = prompt.answer is not None or prompt.scored
            yield number, answer | choice if asks else loss

    monkeypatch.setattr("profiling.evaluation.measure.trials", trials)
    return asked


def _some_prose() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)[:20])


# Tokens of the search and of its evaluations.
LENGTH = 900
Command = Callable[..., dict[str, Any]]


@pytest.fixture
def command(searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """command(words): the record of an evaluation: of little prose, with few decoded tokens."""
    monkeypatch.setattr("profiling.quality.trials.new_tokens", lambda tokenizer, prompt: 4)
    monkeypatch.setattr("profiling.quality.trials.FORCED", 8)
    monkeypatch.setattr("profiling.prompts.texts.pythons_own", _some_prose)
    for file in searched.glob("cfg*"):
        shutil.copy(file, tmp_path / file.name)

    def call(more: str, *, out: str = "report", beside: Path | str = "") -> dict[str, Any]:
        base = f"{tmp_path}/cfg.yaml {beside} --model {searched}/tiny --out {tmp_path}/{out}"
        asked = f"{base} --length {LENGTH} --dtype float32 --no-memory {more}"
        assert evaluate.main(asked.split()) == 0
        record: dict[str, Any] = json.loads((tmp_path / out / "evaluation.json").read_text())
        return record

    return call
