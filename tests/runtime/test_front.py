"""The point of an artifact's front that a target asks for is what is served, and sizes go with the
prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import artifacts
from artifacts import Front, HeadwiseError, Point
from runtime import load
from tests.runtime.batches import given
from tests.runtime.caches.feeding import fed
from tests.runtime.omnikv import CLOSE

FAST, MIDDLE, EXACT = "a_64_64", "bs_2", "vs_70_70"
GROWTH = artifacts.Growth(
    length=128,
    powers={
        "a_shape": {"window": 1.0},
        "vertical_slash": {"vertical": 0.5, "slash": 1.0},
        "block_sparse": {"blocks": 1.0},
    },
)


def rows(model: Any, name: str) -> tuple[tuple[str, ...], ...]:
    return ((name,) * model.config.num_attention_heads,) * model.config.num_hidden_layers


@pytest.fixture
def saved(build, artifact_for, tmp_path) -> tuple[Any, Path]:
    """A model, and the file of an artifact whose own rows are the middle point of its front."""
    model = build()
    artifact = artifact_for(model)
    kept = {
        name: pattern
        for name, pattern in artifact.patterns.items()
        if name in (FAST, MIDDLE, EXACT)
    }
    figures = [
        (FAST, 1.0, 8.0, 0.3, 0.7),
        (MIDDLE, 2.0, 4.0, 0.2, 0.95),
        (EXACT, 4.0, 2.0, 0.1, 0.9),
    ]
    points = tuple(
        Point(cost=cost, speedup=speedup, kl=kl, recall=recall, density=0.5)
        for _, cost, speedup, kl, recall in figures
    )
    front = Front(length=200, unit="flops", dense_cost=8.0, measured_on="held_out", points=points)
    assert artifact.search is not None
    changes = {
        "patterns": kept,
        "search": artifact.search.model_copy(
            update={"cost": artifacts.SearchCost(unit="flops", device="any")}
        ),
        "prefill": artifact.prefill.model_copy(
            update={"layers": rows(model, MIDDLE), "front": front}
        ),
    }
    beside = artifacts.front_arrays(kept, [rows(model, name) for name, *_ in figures])
    artifacts.save(artifact.model_copy(update=changes), tmp_path / "cfg.yaml", beside)
    return model, tmp_path / "cfg.yaml"


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ({}, MIDDLE),
        ({"target_speedup": 4.1}, FAST),
        ({"target_speedup": 4}, MIDDLE),
        ({"target_speedup": 0.0}, EXACT),
        ({"target_kl": 0.35}, FAST),
        ({"target_kl": 0.2}, MIDDLE),
        ({"target_kl": 0.19}, EXACT),
        ({"target_recall": 0.5}, FAST),
        ({"target_recall": 0.9}, MIDDLE),
    ],
)
def test_a_target_chooses_a_point(saved, target, name):
    model, path = saved
    headwise = load(path, **target)
    assert headwise.artifact.prefill.layers == rows(model, name)
    assert headwise.artifact.prefill.front == load(path).artifact.prefill.front


def test_what_is_served_is_the_point(saved, masked, ids):
    model, path = saved
    prompt = ids(300)
    with masked(model, rows=rows(model, EXACT)):
        expected = model(prompt).logits
    with load(path, target_kl=0.1).apply(model, strict=True, backend="reference"):
        torch.testing.assert_close(model(prompt).logits, expected, **CLOSE)


@pytest.mark.parametrize(
    ("target", "values"),
    [
        ({"target_speedup": 9}, ["cfg.yaml", "target_speedup 9", "from 2 to 8"]),
        ({"target_kl": 0.05}, ["target_kl 0.05", "from 0.1 to 0.3"]),
        ({"target_recall": 0.99}, ["target_recall 0.99", "from 0.7 to 0.95"]),
        ({"target_kl": 0.1, "target_recall": 0.9}, ["one of", "target_kl", "target_recall"]),
        ({"target_kl": -1.0}, ["target_kl", "-1.0"]),
        ({"target_kl": float("nan")}, ["target_kl", "nan"]),
        ({"target_speedup": "2x"}, ["target_speedup", "'2x'"]),
    ],
)
def test_a_target_that_cannot_be_met_is_one_line(saved, target, values):
    with pytest.raises(HeadwiseError) as caught:
        load(saved[1], **target)
    text = str(caught.value)
    assert text.isprintable() and all(value in text for value in values)


def test_no_front_to_choose_from(build, artifact_for, tmp_path):
    artifacts.save(artifact_for(build()), tmp_path / "cfg.yaml")
    with pytest.raises(
        HeadwiseError, match=r"cfg\.yaml: target_kl: the artifact has no front to choose from"
    ):
        load(tmp_path / "cfg.yaml", target_kl=0.1)


@pytest.mark.parametrize(
    ("family", "chunks"), [("Llama", (300,)), ("Gemma3", (600,)), ("Llama", (150, 150, 200))]
)
def test_sizes_go_with_the_prompt_and_the_keys_of_a_chunk(
    family, chunks, build, apply, masked, ids
):
    model, prompt = build(family), ids(sum(chunks))
    with masked(model, growth=GROWTH):
        expected = fed(model, prompt, chunks, DynamicCache(config=model.config))
    with masked(model):
        as_found = fed(model, prompt, chunks, DynamicCache(config=model.config))
    with apply(model, growth=GROWTH, strict=True):
        found = fed(model, prompt, chunks, DynamicCache(config=model.config))
    torch.testing.assert_close(found, expected, **CLOSE)
    assert (as_found - expected).abs().max() > 1e-2


def test_a_padded_prompt_is_served_as_alone(build, apply, ids):
    model, tokens = build(), ids(450, batch=2)
    real = torch.ones_like(tokens)
    real[0, :250] = 0
    with apply(model, growth=GROWTH, strict=True):
        together = model(tokens, **given(real)).logits
        torch.testing.assert_close(together[0, 250:], model(tokens[:1, 250:]).logits[0], **CLOSE)
        torch.testing.assert_close(together[1], model(tokens[1:]).logits[0], **CLOSE)
