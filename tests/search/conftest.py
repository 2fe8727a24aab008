"""A tiny random model with a tokenizer in a folder, of which commands take seconds."""

from __future__ import annotations

from typing import Any

import pytest

from search.model.config import ModelSearch
from search.paper import run
from tests.tiny_text_model import save_tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


# A search by MInference's Algorithm 1 of a prompt that is not a whole number of tiles.
PAPER: dict[str, Any] = {
    "length": 1000,
    "budget": "0.6",
    "dtype": "float32",
    "tasks": ("passkey",),
    "preset": "paper",
    "command": "test",
}


@pytest.fixture(scope="session")
def by_head(tiny_model, tmp_path_factory):
    """The artifact of a search of the tiny model with --preset paper; not to be written to."""
    out = tmp_path_factory.mktemp("by_head") / "cfg.yaml"
    run(ModelSearch(model=str(tiny_model), out=out, picture=False, **PAPER))
    return out


@pytest.fixture(scope="session")
def fine_tune(tiny_model, tmp_path_factory):
    """Other weights of the same shape."""
    import transformers as t

    folder = tmp_path_factory.mktemp("fine-tune") / "tiny"
    model = t.AutoModelForCausalLM.from_pretrained(tiny_model)
    model.model.layers[1].mlp.down_proj.weight.data.mul_(1.01)
    model.save_pretrained(folder)
    t.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder
