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
from tests.runtime.test_batches import padded, positions
from tests.runtime.test_caches import chunked

CLOSE = {"atol": 2e-4, "rtol": 1e-3}
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
        ({"target_speedup": 8.0}, FAST),
        ({"target_speedup": 4.1}, FAST),
        ({"target_speedup": 4}, MIDDLE),
        ({"target_speedup": 0.0}, EXACT),
        ({"target_kl": 0.35}, FAST),
        ({"target_kl": 0.2}, MIDDLE),
        ({"target_kl": 0.19}, EXACT),
        ({"target_recall": 0.5}, FAST),
        ({"target_recall": 0.9}, MIDDLE),
        ({"target_recall": 0.95}, MIDDLE),
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


OFFERS = (
    "speedups of attention from 2 to 8, kl from 0.1 to 0.3 nats a token and "
    "recall from 0.7 to 0.95, at 200 tokens"
)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            {"target_speedup": 9},
            f"cfg.yaml: no point of the front meets target_speedup 9: its points have {OFFERS}",
        ),
        (
            {"target_kl": 0.05},
            f"no point of the front meets target_kl 0.05: its points have {OFFERS}",
        ),
        (
            {"target_recall": 0.99},
            f"no point of the front meets target_recall 0.99: its points have {OFFERS}",
        ),
        (
            {"target_kl": 0.1, "target_recall": 0.9},
            "give one of target_speedup, target_kl, target_recall, got",
        ),
        ({"target_kl": -1.0}, "target_kl must be a number from 0 on, got -1.0"),
        ({"target_kl": float("nan")}, "target_kl must be a number from 0 on, got nan"),
        ({"target_speedup": "2x"}, "target_speedup must be a number from 0 on, got '2x'"),
    ],
)
def test_a_target_that_cannot_be_met_is_one_line(saved, target, message):
    with pytest.raises(HeadwiseError) as caught:
        load(saved[1], **target)
    assert message in str(caught.value) and str(caught.value).isprintable()


def test_no_front_to_choose_from(build, artifact_for, tmp_path):
    artifacts.save(artifact_for(build()), tmp_path / "cfg.yaml")
    with pytest.raises(
        HeadwiseError, match=r"cfg\.yaml: target_kl: the artifact has no front to choose from"
    ):
        load(tmp_path / "cfg.yaml", target_kl=0.1)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_sizes_go_with_the_prompt(family, build, apply, masked, ids):
    model = build(family)
    for length in (300, 600):
        prompt = ids(length)
        with masked(model, growth=GROWTH):
            expected = model(prompt).logits
        with masked(model):
            as_found = model(prompt).logits
        with apply(model, growth=GROWTH, strict=True):
            torch.testing.assert_close(model(prompt).logits, expected, **CLOSE)
        assert (as_found - expected).abs().max() > 1e-2


def test_sizes_go_with_the_keys_of_a_chunk(build, apply, masked, ids):
    model, prompt, chunks = build(), ids(500), (150, 150, 200)
    with masked(model, growth=GROWTH):
        expected = chunked(model, prompt, chunks, DynamicCache(config=model.config))
    with apply(model, growth=GROWTH, strict=True):
        found = chunked(model, prompt, chunks, DynamicCache(config=model.config))
    torch.testing.assert_close(found, expected, **CLOSE)


def test_a_padded_prompt_is_served_as_alone(build, apply, ids):
    model, prompts = build(), [ids(200)[0], ids(450)[0]]
    tokens, real = padded(prompts, "left")
    with apply(model, growth=GROWTH, strict=True):
        together = model(tokens, attention_mask=real, position_ids=positions(real)).logits
        for row, prompt in enumerate(prompts):
            torch.testing.assert_close(
                together[row, -len(prompt) :], model(prompt[None]).logits[0], **CLOSE
            )
