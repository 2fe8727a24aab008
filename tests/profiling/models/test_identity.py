"""Identity of a model: it covers all that figures depend on, in any process."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from profiling.models.identity import identity_of
from tests.profiling.conftest import tiny
from tests.runtime.test_fingerprint import PLACES, Holder, Stored


class Adapter(nn.Module):
    """Layer with an adapter, as PEFT has them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 2)})
        self.scaling = {"default": 0.5}
        self._active_adapter = ["default"]


def wrapped(model):
    """The model with an adapter, which its fingerprint does not cover."""
    mlp = model.model.layers[0].mlp
    torch.manual_seed(0)
    mlp.down_proj = Adapter(mlp.down_proj)
    return mlp.down_proj


def key(model):
    identity = identity_of(model, "x")
    assert identity.unknown is None
    return identity.key


@pytest.fixture
def model():
    return tiny("Llama")


def test_identity_of_equal_models_is_equal_and_a_forward_pass_leaves_it(model):
    before = key(model)
    with torch.no_grad():
        model(torch.arange(20)[None])
    assert key(model) == before == key(tiny("Llama"))


def _one_element(model):
    model.lm_head.weight.data[3, 1] += 1e-3


def _frequencies(model):
    model.model.rotary_emb.inv_freq *= 2


def _rows(model):
    weight = model.lm_head.weight.data
    weight[[0, 1]] = weight[[1, 0]]


def _activation(model):
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def _tied(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def _bias(model):
    projection = model.model.layers[0].mlp.down_proj
    projection.bias = nn.Parameter(torch.zeros(projection.out_features))


def _parametrized(model):
    projection = model.model.layers[0].mlp.down_proj
    nn.utils.parametrize.register_parametrization(projection, "weight", nn.Tanh())


@pytest.mark.parametrize(
    "change",
    [
        _one_element,
        _rows,
        _frequencies,
        _activation,
        _tied,
        _bias,
        _parametrized,
        lambda model: model.to(torch.bfloat16),
        lambda model: model.set_attn_implementation("eager"),
        lambda model: setattr(model.config, "rms_norm_eps", 0.1),
        lambda model: setattr(model.model.norm, "variance_epsilon", 0.1),
        lambda model: setattr(model.generation_config, "eos_token_id", 7),
    ],
)
def test_identity_covers(change, model):
    before = key(model)
    change(model)
    assert key(model) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: nn.init.normal_(layer.lora_A["default"].weight),
        lambda layer: layer.scaling.update(default=0.25),
        lambda layer: layer._active_adapter.clear(),
    ],
)
def test_identity_covers_adapters(change, model):
    layer = wrapped(model)
    before = key(model)
    change(layer)
    assert key(model) != before


@pytest.mark.parametrize("place", PLACES)
def test_identity_covers_weights_outside_of_parameters(place, model):
    mlp = model.model.layers[0].mlp
    inner = mlp.down_proj
    keys = []
    for _ in range(2):
        mlp.down_proj = Holder(inner, place)
        keys.append(key(model))
        nn.init.normal_(inner.weight)
    assert keys[0] != keys[1]


def test_identity_covers_tensor_subclasses_and_what_tensors_carry(model):
    mlp = model.model.layers[0].mlp
    codes = (mlp.down_proj.weight.detach() * 16).to(torch.int8)
    keys = []
    for scale in (0.1, 0.2):
        mlp.down_proj.weight = nn.Parameter(Stored.make(codes, scale), requires_grad=False)
        keys.append(key(model))
    mlp.down_proj.weight = nn.Parameter(codes, requires_grad=False)
    for scale in (torch.tensor(0.1), torch.tensor(0.2)):
        # As bitsandbytes keeps its scales.
        mlp.down_proj.weight.quant_state = type("State", (), {})()
        mlp.down_proj.weight.quant_state.absmax = scale
        keys.append(key(model))
    assert len(set(keys)) == 4


def test_identity_covers_functions_with_what_they_are_bound_to(model):
    mlp = model.model.layers[0].mlp
    keys = []
    for slope in (0.1, 0.2):
        mlp.function = functools.partial(nn.functional.leaky_relu, negative_slope=slope)
        keys.append(key(model))
    assert keys[0] != keys[1]


STEERING = torch.zeros(1)


def _steered(module, inputs, output):
    return output + STEERING


def test_identity_covers_hooks_with_what_they_refer_to(model, monkeypatch):
    keys = [key(model)]
    handle = model.lm_head.register_forward_hook(_steered)
    keys += [key(model), key(model)]
    monkeypatch.setitem(globals(), "STEERING", torch.ones(1))
    keys.append(key(model))
    handle.remove()
    for added in (1.0, 2.0):
        vector = torch.full((1,), added)
        handle = model.lm_head.register_forward_hook(lambda m, i, out, by=vector: out + by)
        keys.append(key(model))
        handle.remove()
    model.lm_head.forward = functools.partial(torch.mul, other=vector)
    keys.append(key(model))
    assert keys[1] == keys[2] and len(set(keys)) == len(keys) - 1


def test_identity_covers_offloaded_weights():
    from accelerate import cpu_offload

    keys = []
    for change in (0.0, 0.0, 1e-3):
        model = tiny("Llama")
        model.model.layers[1].mlp.down_proj.weight.data[0, 1] += change
        cpu_offload(model)
        keys.append(key(model))
    assert keys[0] == keys[1] != keys[2]


def _meta(model):
    model.lm_head.to("meta")


def _opaque(model):
    model.lm_head.packed = iter([1])


def _opaque_hook(model):
    opaque = iter([1])
    model.lm_head.register_forward_hook(lambda *_: next(opaque))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_opaque_hook, "lm_head hook.closure.0 is of the type builtins.list_iterator"),
        (_meta, "lm_head.weight is on the meta device"),
        (_opaque, "lm_head.packed is of the type builtins.list_iterator"),
    ],
)
def test_identity_of_a_model_that_cannot_be_read_is_never_the_same(change, why, model):
    change(model)
    first, second = identity_of(model, "x"), identity_of(model, "x")
    assert first.unknown == second.unknown == why and first.key != second.key
