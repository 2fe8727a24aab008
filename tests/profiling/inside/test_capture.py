"""Inputs of layers and decode steps equal eager attention; the model is restored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from artifacts import HeadwiseError
from profiling.evaluation.peak_memory import high_water_mark
from profiling.inside import capture as capturing
from profiling.inside import decode_capture
from profiling.inside.capture import LayerInputs, capture
from profiling.inside.decode_capture import capture_decode
from tests.profiling.conftest import tiny
from tests.profiling.inside.plain import output
from tests.runtime.tiny import GEMMA4_SHARED, refused_model, tiny_model

ROOT = Path(__file__).parents[3]
FAMILIES = ["Llama", "Qwen2", "Qwen3", "GPTNeoX", "Mistral", "Gemma3", "Gemma2", "GptOss"]
# Windows by layer, as the configurations in conftest have them.
WINDOWS: dict[str, list[int | None]] = {
    "Mistral": [24, 24, 24],
    "Gemma3": [16, None, 16],
    "Gemma2": [16, None, 16],
    "GptOss": [16, None, 16],
    "Llama4": [16, 16, None],
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
    ("family", "length"), [*((family, 75) for family in FAMILIES), ("Gemma3", 1), ("Gemma3", 300)]
)
def test_capture_tensors_reproduce_each_layers_output(family, length):
    model = tiny(family)
    if family != "GptOss":
        # In float32 rounding of earlier layers exceeds the bound on some processors. The code of
        # GPT-OSS has steps that are float32 whatever the weights are.
        model = model.double()
    expected = attention_outputs(model, tokens(length))
    result = []
    got = []

    def visit(x):
        result.append(x)
        got.append(flat(x))

    capture(model, tokens(length), visit)
    assert [x.layer for x in result] == [0, 1, 2]
    assert [x.sliding_window for x in result] == WINDOWS.get(family, [None] * 3)
    expected = [each.float() for each in expected]
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
    for x in result:
        assert x.k.shape[1] == (4 if family == "GPTNeoX" else 2), "keys must come unrepeated"
        assert (x.logits.softcap is not None) == (family == "Gemma2")
        assert (x.logits.sinks is not None) == (family == "GptOss")


@pytest.mark.parametrize("module", [capturing, decode_capture])
def test_capture_that_fails_restores_the_model(module):
    model = tiny("Gemma3").train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    model.set_attn_implementation("eager")

    def visit(*arguments):
        assert model.config._attn_implementation == module.CAPTURE_NAME and not model.training
        if arguments[-1].layer == 1:
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        if module is capturing:
            capture(model, tokens(), visit)
        else:
            capture_decode(model, tokens(), visit, lambda step: None, steps=2)
    assert model.config._attn_implementation == "eager"
    assert [module.training for module in model.modules()] == modes
    got = []
    capture(model, tokens(), lambda x: got.append(x.layer))
    assert got == [0, 1, 2]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["MambaForCausalLM", "BertLMHeadModel", "MptForCausalLM"])
def test_capture_refuses_a_model_without_attention(family):
    """None at all, one that is not causal, one that does not go through the interface."""
    with pytest.raises(HeadwiseError, match="model without attention that Headwise can serve"):
        capture(refused_model(family), tokens(), lambda x: None)


def test_capture_skips_layers_without_attention():
    seen = []
    capture(tiny("Lfm2"), tokens(), lambda x: seen.append(x.layer))
    assert seen == [1]


def test_capture_of_a_chunked_layer_has_a_window():
    model = tiny("Llama4")
    windows = []
    with torch.no_grad():
        expected = model(tokens(), use_cache=False).logits[:, -1]
    got = []
    with model.register_forward_hook(lambda *args: got.append(args[2].logits[:, -1])):
        capture(model, tokens(), lambda x: windows.append(x.sliding_window))
    assert windows == WINDOWS["Llama4"]
    torch.testing.assert_close(got[0], expected, atol=2e-5, rtol=1e-4)


def test_capture_sees_every_query_of_layers_that_share_keys_and_values():
    model = tiny_model("Gemma4", **GEMMA4_SHARED)
    queries = {}
    capture(model, tokens(75), lambda x: queries.update({x.layer: x.q.shape[2]}))
    assert queries == dict.fromkeys(range(6), 75)


def test_capture_of_a_full_layer_that_holds_a_window_sees_no_window():
    windows = []
    capture(tiny_model("Exaone4"), tokens(), lambda x: windows.append(x.sliding_window))
    assert windows == [32, None]


def grown() -> int:
    """Bytes by which a prompt of 12,000 tokens raises this process's peak."""
    # So narrow that a mask would be much of it.
    model = tiny("Gemma3", hidden_size=64, head_dim=32)
    capture(model, tokens(64), lambda x: None)
    before = high_water_mark(model.device, reset=True)
    capture(model, tokens(12_000), lambda x: None)
    return high_water_mark(model.device, reset=False) - before


@pytest.mark.exhaustive
def test_capture_memory_grows_linearly_with_the_prompt():
    """A bool mask of 12,000 x 12,000 would be 137 MiB, for sliding-window layers too.

    In a separate process: an earlier, higher peak of this one would hide the rise.
    """
    command = [sys.executable, "-c", f"from {__name__} import grown; print(grown())"]
    assert 0 < int(subprocess.check_output(command, cwd=ROOT)) < 400 * 2**20


@pytest.mark.parametrize("shape", [(2, 8), (8,), (1, 0)])
def test_capture_refuses_other_shapes_than_one_prompt(shape):
    with pytest.raises(ValueError, match=r"\(1, S\)"):
        capture(tiny("Llama"), torch.zeros(shape, dtype=torch.long), lambda x: None)


LENGTH, STEPS, TAIL = 60, 5, 3


def decoded(model, ids, **options):
    """Probabilities by step and layer, the new tokens, and the order of the calls."""
    result = {}
    order = []

    def visit(step, x):
        assert x.q.shape[2] == 1 and x.k.shape[2] == x.v.shape[2]
        result[step, x.layer] = x.probabilities
        order.append((step, x.layer, x.sliding_window))

    options = {"steps": STEPS, "tail": TAIL} | options
    new = capture_decode(model, ids, visit, order.append, **options)
    return result, new, order


@pytest.mark.parametrize("family", ["Llama", "GPTNeoX", "Gemma2", "GptOss", "Llama4"])
def test_capture_decode_steps_equal_rows_of_eager_attention(family):
    model = tiny(family)
    ids = tokens(LENGTH)
    result, new, order = decoded(model, ids)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        whole = torch.cat([ids, torch.tensor([new])], dim=1)
        expected = model(whole, use_cache=False, output_attentions=True).attentions
    windows = WINDOWS.get(family, [None] * 3)
    layers = [(layer, windows[layer]) for layer in range(3)]
    assert order == [
        x for step in range(-TAIL, STEPS) for x in (*((step, *layer) for layer in layers), step)
    ]
    for (step, layer), probabilities in result.items():
        row = expected[layer][0, :, LENGTH - 1 + step, : LENGTH + step]
        width = probabilities.shape[1]
        assert width == min(windows[layer] or LENGTH + STEPS, row.shape[1])
        torch.testing.assert_close(probabilities, row[:, -width:], atol=1e-5, rtol=1e-4)
        assert row[:, :-width].abs().sum() == 0


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "GPTNeoX"])
def test_capture_decode_tokens_equal_generate(family):
    model = tiny(family)
    ids = tokens(LENGTH)
    wanted = model.generate(
        ids, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None
    )[0, LENGTH:]
    assert decoded(model, ids, steps=12)[1] == tuple(wanted.tolist())
    avoided = decoded(model, ids, steps=12, avoid=[int(wanted[0])])[1]
    assert int(wanted[0]) not in avoided


def test_capture_decode_of_a_continuation_goes_first():
    model = tiny("Llama")
    fed = (5, 9, 5)
    result, new, _ = decoded(model, tokens(LENGTH), continuation=fed, tail=0)
    assert new[:3] == fed and min(result)[0] == 0
    with torch.no_grad():
        logits = model(torch.cat([tokens(LENGTH), torch.tensor([new])], dim=1)).logits[0]
    assert tuple(logits[LENGTH - 1 : -1].argmax(-1)[3:].tolist()) == new[3:]


@pytest.mark.parametrize(("length", "steps", "tail"), [(3, 1, 2), (1, 1, 0), (9, 0, 0), (9, 1, -1)])
def test_capture_decode_refuses_sizes_that_do_not_fit(length, steps, tail):
    with pytest.raises(ValueError, match=f"do not fit {length} tokens, got {steps} and {tail}"):
        decoded(tiny("Llama"), tokens(length), steps=steps, tail=tail)
