"""Tiny random models, one for each way in which a layer can attend."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.__main__ import main
from profiling.models.loading import load_model
from profiling.prompts.words import sentences
from profiling.quality.forced import text_logits, token_losses
from profiling.quality.trials import Trial
from search.model.config import ModelSearch
from search.paper import run
from tests.profiling.tokenizers import MAKERS
from tests.runtime.tiny import tiny_model
from tests.search.conftest import save_tiny

HYBRID = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 16,
}
# Windows that short prompts leave, where those of tests/runtime are wider.
SMALLER: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 24},
    "Gemma2": HYBRID,
    "Gemma3": HYBRID,
    "GptOss": HYBRID,
    "Lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "Llama4": {
        "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
        "attention_chunk_size": 16,
        "no_rope_layers": [1, 1, 0],
    },
}


def tiny(family: str, **changes: Any) -> Any:
    """A random model of three layers in fp32 whose attention is uneven."""
    return tiny_model(family, num_hidden_layers=3, **SMALLER.get(family, {}), **changes)


@pytest.fixture(autouse=True)
def _one_thread():
    """Everything here is tiny: on a busy machine threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny random model and its tokenizer; not to be written to."""
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def loaded(folder):
    return load_model(str(folder), dtype="float32")


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory):
    """A model of five layers, the second and the last of which see every key."""
    return save_tiny(
        tmp_path_factory.mktemp("model") / "hybrid",
        family="Gemma3",
        config="Gemma3Text",
        num_hidden_layers=5,
        layer_types=[f"{'full' if at in (1, 4) else 'sliding'}_attention" for at in range(5)],
        sliding_window=32,
        head_dim=16,
    )


@pytest.fixture(scope="session", params=["bytes", "metaspace"])
def tokenizer(request):
    return MAKERS[request.param]()


@pytest.fixture(scope="session")
def story(tmp_path_factory):
    """A text of some 60,000 characters in which no sentence comes twice."""
    path = tmp_path_factory.mktemp("texts") / "story.txt"
    source = sentences(random.Random(0))
    path.write_text("".join(f"{i}. {next(source)}" for i in range(900)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def searched(folder, tmp_path_factory):
    """The model `tiny`, an artifact `cfg.yaml` of it and a text; not to be written to."""
    place = tmp_path_factory.mktemp("searched")
    (place / "tiny").symlink_to(folder)
    sentence = "It was a long way to the sea, and nobody saw it."
    (place / "text.txt").write_text(" ".join(f"{at}. {sentence}" for at in range(400)))
    model = str(place / "tiny")
    search = ModelSearch(
        model=model,
        out=place / "cfg.yaml",
        length=LENGTH,
        budget="0.8",
        preset="paper",
        dtype="float32",
        picture=False,
        command="x",
    )
    run(search)
    return place


@pytest.fixture
def sketched(monkeypatch):
    """Lay pictures out without rendering them."""
    from matplotlib.figure import Figure

    def sketch(figure, file, format, **_):
        if format == "png":
            figure.draw_without_rendering()
        file.write(b"a picture")

    monkeypatch.setattr(Figure, "savefig", sketch)


@pytest.fixture
def invented(monkeypatch):
    """Replace trials by invented ones; return the names of their methods, in order."""
    names = []

    def trials(_, __, prompts, method):
        for number, prompt in enumerate(prompts):
            names.append(method.name)
            value = (sum(prompt.input_ids) + len(method.name)) % 5 / 4
            answer = {"text": "", "score": value, "token_accuracy": value, "nll": 1 + value}
            loss = {"blocks": [1 + value], "block_tokens": [1], "forced": 1 + value}
            has_answer = prompt.answer is not None or prompt.scored
            # A distribution over one token: nothing diverges from it.
            yield Trial(number, answer if has_answer else loss, torch.zeros(1, 1))

    monkeypatch.setattr("profiling.evaluation.measure.trials", trials)
    return names


def _some_prose() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)[:20])


# Tokens of the search and of its evaluations.
LENGTH = 900


@pytest.fixture
def command(searched, tmp_path, monkeypatch):
    """command(words): the record of an evaluation: of little prose, with few decoded tokens."""
    monkeypatch.setattr("profiling.quality.trials.new_tokens", lambda tokenizer, prompt: 4)
    monkeypatch.setattr("profiling.quality.trials.FORCED", 8)
    monkeypatch.setattr("profiling.prompts.tasks.texts.pythons_own", _some_prose)
    for file in searched.glob("cfg*"):
        shutil.copy(file, tmp_path / file.name)

    def call(more, *, out="report", extra=""):
        base = f"{tmp_path}/cfg.yaml {extra} --model {searched}/tiny --out {tmp_path}/{out}"
        words = f"{base} --length {LENGTH} --dtype float32 --no-memory {more}"
        assert main(["evaluate", *words.split()]) == 0
        return json.loads((tmp_path / out / "evaluation.json").read_text())

    return call


def text_losses(model: Any, ids: Sequence[int]) -> Tensor:
    """-log p of each of S tokens but the first, (S - 1) fp32, in one prefill."""
    logits = text_logits(model, tuple(ids))
    return token_losses(logits, torch.tensor(ids[1:], device=logits.device, dtype=torch.long))
