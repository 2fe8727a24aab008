"""Each decode step hands out eager attention's row, and decoding goes on unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from profiling.inside.decode_capture import CAPTURE_NAME, StepInputs, capture_decode
from tests.profiling.conftest import tiny
from tests.profiling.inside.test_capture import WINDOWS, tokens

LENGTH, STEPS, TAIL = 60, 5, 3


def eager_weights(model: Any, ids: Tensor) -> list[Tensor]:
    """(H, S, S) of each layer."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(ids, use_cache=False, output_attentions=True).attentions
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    return [w[0] for w in weights]


def decoded(
    model: Any, ids: Tensor, **options: Any
) -> tuple[dict[tuple[int, int], Tensor], tuple[int, ...], list[Any]]:
    """Probabilities by step and layer, the new tokens, and the order of the calls."""
    found: dict[tuple[int, int], Tensor] = {}
    order: list[Any] = []

    def visit(step: int, x: StepInputs) -> None:
        assert x.q.shape[2] == 1 and x.k.shape[2] == x.v.shape[2]
        found[step, x.layer] = x.probabilities
        order.append((step, x.layer, x.sliding_window))

    options = {"steps": STEPS, "tail": TAIL} | options
    new = capture_decode(model, ids, visit, order.append, **options)
    return found, new, order


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2", "gpt_oss", "llama4"])
def test_each_step_is_a_row_of_eager_attention(family: str) -> None:
    model = tiny(family)
    ids = tokens(LENGTH)
    found, new, order = decoded(model, ids)
    expected = eager_weights(model, torch.cat([ids, torch.tensor([new])], dim=1))
    windows = WINDOWS.get(family, [None] * 3)
    layers = [(layer, windows[layer]) for layer in range(3)]
    assert order == [
        x for step in range(-TAIL, STEPS) for x in (*((step, *layer) for layer in layers), step)
    ]
    for (step, layer), probabilities in found.items():
        row = expected[layer][:, LENGTH - 1 + step, : LENGTH + step]
        width = probabilities.shape[1]
        assert width == min(windows[layer] or LENGTH + STEPS, row.shape[1])
        torch.testing.assert_close(probabilities, row[:, -width:], atol=1e-5, rtol=1e-4)
        assert row[:, :-width].abs().sum() == 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox"])
def test_the_models_own_tokens_are_those_of_generate(family: str) -> None:
    model = tiny(family)
    ids = tokens(LENGTH)
    wanted = model.generate(
        ids, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None
    )[0, LENGTH:]
    assert decoded(model, ids, steps=12)[1] == tuple(wanted.tolist())
    avoided = decoded(model, ids, steps=12, avoid=[int(wanted[0])])[1]
    assert int(wanted[0]) not in avoided


def test_a_given_continuation_is_fed_and_then_the_models_own_tokens_follow() -> None:
    model = tiny("llama")
    given = (5, 9, 5)
    found, new, _ = decoded(model, tokens(LENGTH), continuation=given, tail=0)
    assert new[:3] == given and min(found)[0] == 0
    with torch.no_grad():
        logits = model(torch.cat([tokens(LENGTH), torch.tensor([new])], dim=1)).logits[0]
    assert tuple(logits[LENGTH - 1 : -1].argmax(-1)[3:].tolist()) == new[3:]


def test_the_model_is_left_as_it_was_when_a_visit_fails() -> None:
    model = tiny("gemma3").train()

    def visit(step: int, inputs: StepInputs) -> None:
        assert model.config._attn_implementation == CAPTURE_NAME and not model.training
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        capture_decode(model, tokens(LENGTH), visit, lambda step: None, steps=2)
    assert model.config._attn_implementation == "sdpa" and model.training


@pytest.mark.parametrize(("length", "steps", "tail"), [(3, 1, 2), (1, 1, 0), (9, 0, 0), (9, 1, -1)])
def test_sizes_that_do_not_fit(length: int, steps: int, tail: int) -> None:
    with pytest.raises(ValueError, match=f"do not fit {length} tokens, got {steps} and {tail}"):
        decoded(tiny("llama"), tokens(length), steps=steps, tail=tail)
