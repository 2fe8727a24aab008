"""capture() hands out a layer's own inputs, and leaves the model as it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from artifacts import HeadwiseError
from profiling.inside.capture import CAPTURE_NAME, LayerInputs, capture
from profiling.memory_use import peak_memory
from tests.profiling.conftest import tiny
from tests.profiling.inside.plain import output

ROOT = Path(__file__).parents[3]
FAMILIES = ["llama", "qwen2", "qwen3", "gpt_neox", "mistral", "gemma3", "gemma2", "gpt_oss"]
# Windows by layer, as the configurations in conftest have them.
WINDOWS: dict[str, list[int | None]] = {
    "mistral": [24, 24, 24],
    "gemma3": [16, None, 16],
    "gemma2": [16, None, 16],
    "gpt_oss": [16, None, 16],
    "llama4": [16, 16, None],
}


def tokens(length: int = 75) -> Tensor:
    return torch.randint(0, 97, (1, length), generator=torch.Generator().manual_seed(1))


def attention_outputs(model: Any, ids: Tensor) -> list[Tensor]:
    """Inputs of each layer's output projection under eager attention, (1, S, H*E)."""
    seen: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
        for name, module in model.named_modules()
        if name.endswith((".o_proj", "attention.dense"))
    ]
    former = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        model(ids, use_cache=False)
    model.set_attn_implementation(former)
    for hook in hooks:
        hook.remove()
    return seen


def flat(x: LayerInputs) -> Tensor:
    """(1, S, H*D) in fp32, as an output projection takes it."""
    return output(x).transpose(0, 1).flatten(1)[None].float()


@pytest.mark.parametrize(
    ("family", "length"), [*((family, 75) for family in FAMILIES), ("gemma3", 1), ("gemma3", 300)]
)
def test_captured_tensors_reproduce_each_layers_output(family: str, length: int) -> None:
    model = tiny(family)
    expected = attention_outputs(model, tokens(length))
    found: list[LayerInputs] = []
    got: list[Tensor] = []

    def visit(x: LayerInputs) -> None:
        found.append(x)
        got.append(flat(x))

    capture(model, tokens(length), visit)
    assert [x.layer for x in found] == [0, 1, 2]
    assert [x.sliding_window for x in found] == WINDOWS.get(family, [None] * 3)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
    for x in found:
        assert x.k.shape[1] == (4 if family == "gpt_neox" else 2), "keys must come unrepeated"
        assert (x.softcap is not None) == (family == "gemma2")
        assert (x.sinks is not None) == (family == "gpt_oss")


def test_the_model_is_left_as_it_was_when_a_visit_fails() -> None:
    model = tiny("gemma3").train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    model.set_attn_implementation("eager")

    def visit(x: LayerInputs) -> None:
        assert model.config._attn_implementation == CAPTURE_NAME
        if x.layer == 1:
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        capture(model, tokens(), visit)
    assert model.config._attn_implementation == "eager"
    assert [module.training for module in model.modules()] == modes
    got: list[int] = []
    capture(model, tokens(), lambda x: got.append(x.layer))
    assert got == [0, 1, 2]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["mamba", "bert", "mpt"])
def test_a_model_without_attention_that_can_be_reached(family: str) -> None:
    """None at all, one that is not causal, one that does not go through the interface."""
    with pytest.raises(HeadwiseError, match="model without attention that Headwise can serve"):
        capture(tiny(family), tokens(), lambda x: None)


def test_a_hybrid_models_other_layers_are_passed_by() -> None:
    seen: list[int] = []
    capture(tiny("lfm2"), tokens(), lambda x: seen.append(x.layer))
    assert seen == [1]


def test_a_chunked_layer_is_local() -> None:
    model = tiny("llama4")
    windows: list[int | None] = []
    with torch.no_grad():
        expected = model(tokens(), use_cache=False).logits[:, -1]
    got: list[Tensor] = []
    with model.register_forward_hook(lambda *args: got.append(args[2].logits[:, -1])):
        capture(model, tokens(), lambda x: windows.append(x.sliding_window))
    assert windows == WINDOWS["llama4"]
    torch.testing.assert_close(got[0], expected, atol=2e-5, rtol=1e-4)


def grown() -> int:
    """Bytes by which a prompt of 12,000 tokens raises this process's peak."""
    model = tiny("gemma3")
    capture(model, tokens(64), lambda x: None)
    before = peak_memory._mark(model.device, reset=True)
    capture(model, tokens(12_000), lambda x: None)
    return peak_memory._mark(model.device, reset=False) - before


@pytest.mark.exhaustive
def test_memory_grows_linearly_with_the_prompt() -> None:
    """A bool mask of 12,000 x 12,000 would be 137 MiB, for sliding-window layers too.

    In a process of its own: where others have used more before, no peak would show.
    """
    command = [sys.executable, "-c", f"from {__name__} import grown; print(grown())"]
    assert 0 < int(subprocess.check_output(command, cwd=ROOT)) < 400 * 2**20


@pytest.mark.parametrize("shape", [(2, 8), (8,), (1, 0)])
def test_only_one_unpadded_prompt(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\(1, S\)"):
        capture(tiny("llama"), torch.zeros(shape, dtype=torch.long), lambda x: None)
