"""Gradients of a prompt's loss by what heads put out, against differences of the loss itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from profiling.inside.capture import Run, attend_densely, attending_with, layer_mask, masks_of
from profiling.inside.loss_gradients import NAME, loss_gradients
from runtime.layers import attention_layers
from tests.runtime.tiny import FAMILIES, tiny_model

LENGTH = 130


def prompt() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, 200, (1, LENGTH), generator=generator)


def loss_with(model: Any, ids: Tensor, layer: int, added: Tensor) -> float:
    """The summed loss with (S, H, E) added to a layer's attention."""
    run = Run(lambda inputs: None)

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        out, weights = attend_densely(run, module, *args, **kwargs)
        return (out + added[None] if getattr(module, "layer_idx", None) == layer else out), weights

    with torch.no_grad(), masks_of(run), attending_with(model, "differences", attention, layer_mask):
        logits = model(input_ids=ids, use_cache=False).logits[0].double()
    return float(nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_every_architecture_has_the_gradients_that_differences_show(family: str) -> None:
    model, ids = tiny_model(family, vocab_size=260), prompt()
    found = loss_gradients(model, ids)
    assert found is not None and set(found) == set(attention_layers(model))
    torch.manual_seed(1)
    for layer, gradient in found.items():
        added = torch.randn_like(gradient) * 1e-3
        difference = (loss_with(model, ids, layer, added) - loss_with(model, ids, layer, -added)) / 2
        # A router that sends a token elsewhere is no slope.
        near = 0.2 if "Mixtral" in family or "Moe" in family else 0.01
        size = float(added.norm() * gradient.norm()) / gradient.numel() ** 0.5
        assert float((gradient * added).sum()) == pytest.approx(difference, rel=near, abs=near * size)


def test_several_pieces_of_logits_come_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model("Llama"), prompt() % 97
    whole = loss_gradients(model, ids)
    monkeypatch.setattr("profiling.inside.loss_gradients._LOGITS", 97 * 40)
    pieces = loss_gradients(model, ids)
    assert whole is not None and pieces is not None
    for layer, gradient in whole.items():
        torch.testing.assert_close(pieces[layer], gradient)


def test_the_model_is_left_as_it_was() -> None:
    model, ids = tiny_model("Gemma3"), prompt() % 97
    model.train()
    before = model.config._attn_implementation
    with torch.no_grad():
        expected = model.eval()(ids).logits
    model.train()
    hooks = [len(module._forward_hooks) for module in model.modules()]
    loss_gradients(model, ids)
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == before
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, expected)


def test_layers_are_computed_again_on_the_way_back() -> None:
    model, ids = tiny_model("Llama"), prompt() % 97
    calls: list[int] = []
    handle = model.model.layers[1].self_attn.register_forward_hook(lambda module, args, output: calls.append(1))
    loss_gradients(model, ids)
    handle.remove()
    # Twice for the few tokens that show how logits are made, then there and back.
    assert len(calls) == 4


def test_nothing_of_a_pass_is_kept() -> None:
    from transformers import AttentionInterface

    model, ids = tiny_model("Gemma3"), prompt() % 97
    kept = loss_gradients(model, ids, wanted=lambda inputs: inputs.sliding_window is None)
    assert kept is not None and set(kept) == {1, 2}
    attention = AttentionInterface()[NAME]
    held = dict(
        zip(attention.__code__.co_freevars, (cell.cell_contents for cell in attention.__closure__), strict=True)
    )
    assert held["edges"] == {}
    assert not [name for name, value in held.items() if isinstance(value, Tensor)]


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_drops_out_in_training_gives_the_same_twice() -> None:
    sizes = {"word_embed_proj_dim": 128, "ffn_dim": 96, "dropout": 0.5, "do_layer_norm_before": True}
    model, ids = tiny_model("OPT", **sizes), prompt() % 97
    first, second = (loss_gradients(model, ids) for _ in range(2))
    model.train()
    third = loss_gradients(model, ids)
    assert first is not None and second is not None and third is not None
    for layer, gradient in first.items():
        assert torch.equal(second[layer], gradient) and torch.equal(third[layer], gradient)


def test_what_a_dtype_cannot_hold_is_told_by_none() -> None:
    model, ids = tiny_model("Llama"), prompt() % 97
    model.model.layers[1].mlp.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * float("inf"),))
    assert loss_gradients(model, ids) is None


def test_a_model_that_nothing_is_asked_of_has_no_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model("Llama"), prompt() % 97
    monkeypatch.setattr("torch.autograd.grad", None)
    assert loss_gradients(model, ids, wanted=lambda inputs: False) == {}


def test_logits_of_a_model_s_own_making_are_told_by_none() -> None:
    model, ids = tiny_model("Llama"), prompt() % 97
    handle = model.register_forward_hook(
        lambda module, args, output: type(output)(logits=output.logits.sin(), past_key_values=output.past_key_values)
    )
    assert loss_gradients(model, ids) is None
    handle.remove()
    assert loss_gradients(model, ids) is not None
