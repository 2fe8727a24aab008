"""Fingerprints identify a model in any dtype and distinguish other models."""

import re

import pytest
import torch
import transformers
from torch import nn

from artifacts import HeadwiseError, ModelInfo
from runtime import LoadedArtifact
from runtime.fingerprint import compare, fingerprint, weights_sha256
from runtime.lazy import LazyTensor
from tests.runtime.every_architecture import tiny_causal


def test_fingerprint_fields(build):
    info = fingerprint(build(), name="tiny", revision="r1")
    assert (info.name, info.revision, info.architecture) == ("tiny", "r1", "LlamaForCausalLM")
    assert (info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (2, 4, 2, 64)
    assert (
        info.rope == {"rope_theta": 10000.0, "rope_type": "default"} and info.max_positions == 1024
    )
    assert ModelInfo.model_validate_json(info.model_dump_json()) == info


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_fingerprint_ignores_dtype_and_folder(stored, build, tmp_path):
    model = build()
    model.model.layers[0].self_attn.q_proj.weight.data *= 1e-3
    model.to(stored).save_pretrained(tmp_path)
    loaded = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ]
    infos = [fingerprint(m, name="tiny") for m in (model, *loaded)]
    assert infos.count(infos[0]) == len(infos)
    changes = {"use_cache": False, "eos_token_id": 5, "max_position_embeddings": 2048}
    compare(fingerprint(build(), name="a"), fingerprint(build(**changes), name="b", revision="r"))


def test_fingerprint_covers_every_parameter_and_ignores_layout(build):
    model = build()
    hashes = [weights_sha256(model)]
    for name in ("lm_head", "model.norm", "model.layers.1.mlp.down_proj"):
        weight = model.get_submodule(name).weight
        weight.data.flatten()[0] = weight.data.flatten()[0] * 1.25 + 0.5
        hashes.append(weights_sha256(model))
    assert len(set(hashes)) == 4
    weight = model.lm_head.weight
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous() and weights_sha256(model) == hashes[-1]


def test_fingerprint_counts_tied_weights_once(build):
    tied = build(tie_word_embeddings=True)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert weights_sha256(tied) == weights_sha256(build(tie_word_embeddings=True))
    assert weights_sha256(tied) != weights_sha256(build())


def test_fingerprint_rejects_meta_weights(build):
    model = build().to("meta")
    message = r"got lm_head\.weight on the meta device: use check_weights=False"
    with pytest.raises(HeadwiseError, match=message):
        weights_sha256(model)


def test_apply_unset_fingerprint_warns_or_raises_if_strict(build, artifact_for, warnings):
    model = build()
    artifact = artifact_for(model)
    unknown = artifact.model_copy(
        update={"model": artifact.model.model_copy(update={"weights_sha256": None})}
    )
    with pytest.raises(HeadwiseError, match=r"weights_sha256 open.*headwise gate --out fills"):
        LoadedArtifact(unknown).apply(model, check_fingerprint=True)
    with LoadedArtifact(artifact).apply(model, check_fingerprint=True):
        assert warnings() == []
    with LoadedArtifact(unknown).apply(model):
        (message,) = warnings()
    assert "has no fingerprint (weights_sha256 open): any model of its shape passes" in message


class Wrapped(nn.Module):
    """Layer that wraps another, like PEFT's tuners and its modules to save."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.add_module(name, inner)
        self.name = name

    def forward(self, x):
        return self.get_submodule(self.name)(x)


def adapted(model):
    for layer in model.model.layers:
        layer.self_attn.q_proj = Wrapped(layer.self_attn.q_proj, "base_layer")
    return model


def saved(model):
    model.model.norm = Wrapped(model.model.norm, "original_module")
    return model


class Stored(LazyTensor):
    """Tensor of codes and a scale that reads as a weight, like torchao's tensors."""

    @classmethod
    def make(cls, codes, scale):
        tensor = cls.empty(codes.shape, torch.float32, codes.device)
        tensor.codes, tensor.scale = codes, scale
        return tensor

    def read(self):
        return self.codes.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls.make(args[0].codes, args[0].scale)
        return super().__torch_dispatch__(func, types, args, kwargs)


def stored(model):
    """Return the model with one weight of another library's tensor type."""
    attention = model.model.layers[0].self_attn
    codes = (attention.q_proj.weight.detach() * 16).to(torch.int8)
    attention.q_proj.weight = nn.Parameter(Stored.make(codes, 1 / 16), requires_grad=False)
    return model


def fp8(model):
    weight = model.model.layers[0].self_attn.q_proj.weight
    codes = weight.detach().to(torch.float8_e4m3fn)
    model.model.layers[0].self_attn.q_proj.weight = nn.Parameter(codes, requires_grad=False)
    return model


def quantized(model):
    model.config.quantization_config = {"quant_method": "awq"}
    return model


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (adapted, "an adapter around model.layers.0.self_attn.q_proj.base_layer.weight"),
        (saved, "an adapter around model.norm.original_module.weight"),
        (stored, "model.layers.0.self_attn.q_proj.weight of type Stored"),
        (fp8, "model.layers.0.self_attn.q_proj.weight of torch.float8_e4m3fn"),
        (quantized, "quantized weights (awq)"),
    ],
)
def test_apply_rejects_weights_without_fingerprint(changed, why, build, artifact_for, warnings):
    headwise, model = LoadedArtifact(artifact_for(build())), changed(build())
    message = f"plain floating-point weights, got {re.escape(why)}: use check_weights=False"
    with pytest.raises(HeadwiseError, match=f"{message}.*other weights of the same") as error:
        headwise.apply(model)
    assert "\n" not in str(error.value)
    with headwise.apply(model, check_weights=False):
        pass
    with pytest.raises(HeadwiseError, match="for another model: num_layers"):
        headwise.apply(changed(build(num_hidden_layers=3)), check_weights=False)
    # A search of such a model records no fingerprint.
    assert warnings() == []
    assert fingerprint(model, name="x").weights_sha256 is None
    assert len(warnings()) == 1 and "the weights get no fingerprint: " in warnings()[0]


@pytest.mark.parametrize("changed", [adapted, stored])
def test_apply_serves_adapters_and_tensor_subclasses(changed, build, artifact_for, masked, ids):
    artifact, model, prompt = artifact_for(build()), changed(build()), ids(200)
    with torch.no_grad(), masked(model):
        expected = model(prompt).logits
    applied = LoadedArtifact(artifact).apply(
        model, strict=True, check_weights=False, backend="reference"
    )
    with torch.no_grad(), applied as handle:
        torch.testing.assert_close(model(prompt).logits, expected, atol=2e-4, rtol=1e-3)
        assert handle.stats()["sparse"] == 2


class Holder(nn.Module):
    """Linear layer that has its weight elsewhere than in a parameter, as quantizers have."""

    def __init__(self, layer: nn.Module, place: str) -> None:
        super().__init__()
        weight = layer.weight.detach().clone()
        if place == "attribute":
            self.weight = weight
        elif place == "list":
            self.weights = [weight]
        elif place == "mapping":
            self.meta = {"weights": (weight,)}
        elif place == "integers":
            self.register_buffer("codes", (weight * 64).to(torch.int8))
        else:
            self.register_buffer("weight", weight, persistent=place == "buffer")

    def forward(self, x):
        raise NotImplementedError


PLACES = ("buffer", "non-persistent buffer", "attribute", "list", "mapping", "integers")


@pytest.mark.parametrize("place", PLACES)
def test_fingerprint_covers_weights_outside_of_parameters(place, build):
    def held(seed):
        model = build(seed=0)
        torch.manual_seed(seed)
        mlp = model.model.layers[0].mlp
        nn.init.normal_(mlp.down_proj.weight)
        mlp.down_proj = Holder(mlp.down_proj, place)
        return weights_sha256(model)

    assert held(1) == held(1) != held(2)


def test_fingerprint_covers_a_norm_in_a_buffer_and_no_frequencies(build):
    model = build()
    rotary, norm = model.model.rotary_emb, model.model.norm
    before = weights_sha256(model)
    rotary.inv_freq *= 2
    assert weights_sha256(model) == before
    weight = norm.weight.detach().clone()
    del norm.weight
    norm.register_buffer("weight", weight, persistent=False)
    in_buffer = weights_sha256(model)
    # The same tensor under the same name.
    assert in_buffer == before
    norm.weight *= 2
    assert weights_sha256(model) != in_buffer


def test_fingerprint_covers_the_biases_of_a_router():
    model = tiny_causal("deepseek_v3")
    before = weights_sha256(model)
    (bias,) = (each for name, each in model.named_buffers() if name.endswith("correction_bias"))
    bias += 1
    assert weights_sha256(model) != before
