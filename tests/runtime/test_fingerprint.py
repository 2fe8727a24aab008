"""A fingerprint knows a model again in any dtype and tells another one."""

import pytest
import torch
import transformers
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from artifacts import HeadwiseError, ModelInfo
from runtime import Headwise
from runtime.fingerprint import compare, fingerprint, weights_sha256


def test_fields(build):
    info = fingerprint(build(), name="tiny", revision="r1")
    assert (info.name, info.revision, info.architecture) == ("tiny", "r1", "LlamaForCausalLM")
    assert (info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (2, 4, 2, 64)
    assert info.rope == {"rope_theta": 10000.0, "rope_type": "default"} and info.max_positions == 1024
    assert ModelInfo.model_validate_json(info.model_dump_json()) == info


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_one_checkpoint_in_any_dtype_and_folder(stored, build, tmp_path):
    model = build()
    model.model.layers[0].self_attn.q_proj.weight.data *= 1e-3
    model.to(stored).save_pretrained(tmp_path)
    loaded = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ]
    infos = [fingerprint(m, name="tiny") for m in (model, *loaded)]
    assert infos.count(infos[0]) == len(infos)


@pytest.mark.parametrize("name", ["lm_head", "model.norm", "model.layers.1.mlp.down_proj"])
def test_every_parameter_counts(name, build):
    model = build()
    before = weights_sha256(model)
    weight = model.get_submodule(name).weight
    weight.data.flatten()[0] = weight.data.flatten()[0] * 1.25 + 0.5
    assert weights_sha256(model) != before


def test_tied_weights_count_once(build):
    tied = build(tie_word_embeddings=True)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert weights_sha256(tied) == weights_sha256(build(tie_word_embeddings=True))
    assert weights_sha256(tied) != weights_sha256(build())


def test_a_layout_in_memory_changes_nothing(build):
    model = build()
    before = weights_sha256(model)
    weight = model.lm_head.weight
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous() and weights_sha256(model) == before


def test_what_does_not_make_another_model(build):
    one = fingerprint(build(), name="a")
    two = fingerprint(build(use_cache=False, eos_token_id=5, max_position_embeddings=2048), name="b", revision="r")
    compare(one, two)
    assert two.max_positions == 2048


def test_weights_that_are_not_there_are_refused(build):
    model = build().to("meta")
    with pytest.raises(HeadwiseError, match=r"cannot be fingerprinted: lm_head\.weight"):
        weights_sha256(model)


def test_an_open_fingerprint_is_said_and_refused_where_asked(build, artifact_for, warnings) -> None:
    model = build()
    artifact = artifact_for(model)
    unknown = artifact.model_copy(update={"model": artifact.model.model_copy(update={"weights_sha256": None})})
    with pytest.raises(HeadwiseError, match=r"weights_sha256 open.*search\.gate --out fills it in"):
        Headwise(unknown).apply(model, check_fingerprint=True)
    with Headwise(artifact).apply(model, check_fingerprint=True):
        assert warnings() == []
    with Headwise(unknown).apply(model):
        (said,) = warnings()
    assert "has no fingerprint (weights_sha256 open): any model of its shape passes" in said


class Adapted(nn.Module):
    """A linear layer with an adapter around it, as PEFT's tuners have it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.merged = False
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_A["default"](x).sum()


class Saved(nn.Module):
    """A module that is trained as a whole, as PEFT's ModulesToSaveWrapper has it."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original_module = original
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(3, 3)})

    def forward(self, x):
        return self.original_module(x)


def test_adapters_around_the_weights_make_no_other_model(build):
    plain, model = build(), build()
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    model.model.norm = Saved(model.model.norm)
    assert weights_sha256(model) == weights_sha256(plain)
    # The weights below an adapter are what counts.
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.base_layer.weight.mul_(1.5)
    assert weights_sha256(model) != weights_sha256(plain)


def test_a_merged_adapter_is_refused(build):
    model = build()
    model.model.layers[0].self_attn.q_proj = Adapted(model.model.layers[0].self_attn.q_proj)
    model.model.layers[0].self_attn.q_proj.merged = True
    with pytest.raises(HeadwiseError, match=r"an adapter is merged into model\.layers\.0\.self_attn\.q_proj"):
        weights_sha256(model)


class Params4bit(nn.Parameter):
    """Two codes a byte, as bitsandbytes has them: its own `to` wants what only the whole parameter has."""

    def to(self, *args, **kwargs):
        return Params4bit(super().to(*args, **kwargs), self.quant_state)


class Compressed(nn.Module):
    """A linear layer as compressed-tensors packs it: the weight itself is gone."""

    def __init__(self, codes):
        super().__init__()
        stored = {"packed": codes.view(torch.int32), "scale": torch.ones(64, 1), "shape": torch.tensor(codes.shape)}
        for name, value in stored.items():
            self.register_parameter(f"weight_{name}", nn.Parameter(value, requires_grad=False))


def quantised(model, kind, change=0):
    """The model, one layer of which is stored by another library; `change` is added to its codes."""
    attention = model.model.layers[0].self_attn
    codes = (attention.q_proj.weight.detach() * 16).to(torch.int8) + change
    stored = {
        "bitsandbytes": lambda: Params4bit(codes.view(torch.uint8).view(-1, 1), requires_grad=False),
        "torchao": lambda: nn.Parameter(TwoTensor(codes, torch.ones_like(codes)), requires_grad=False),
        "torchao fp8": lambda: codes.to(torch.float8_e4m3fn),
        "torchao fp4": lambda: codes.view(torch.float4_e2m1fn_x2),
    }
    if kind == "compressed-tensors":
        attention.q_proj = Compressed(codes)
        return model
    weight = stored[kind]()
    attention.q_proj.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
    return model


KINDS = ("bitsandbytes", "torchao", "torchao fp8", "torchao fp4", "compressed-tensors")


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_model_has_a_fingerprint_of_what_it_stores(kind, build):
    found = weights_sha256(quantised(build(), kind))
    assert found == weights_sha256(quantised(build(), kind))
    assert found not in (weights_sha256(quantised(build(), kind, change=8)), weights_sha256(build()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("said", [True, False])
def test_a_quantised_copy_is_told_what_can_be_compared(kind, said, build, artifact_for):
    """By its configuration, which says what quantised it, or by how its weights are stored."""
    headwise, model = Headwise(artifact_for(build())), quantised(build(), kind)
    if said:
        model.config.quantization_config = {"quant_method": kind}
    how = kind if said else r"model\.layers\.0\.self_attn\.q_proj\.weight\S* is torch\.\w+"
    with pytest.raises(
        HeadwiseError, match=rf"are quantised \({how}\).*check_weights=False.*search this model"
    ) as error:
        headwise.apply(model)
    assert "\n" not in str(error.value)
    with headwise.apply(model, check_weights=False):
        pass
    # An artifact of the quantised model itself is known by what is stored.
    with Headwise(artifact_for(model)).apply(model):
        pass
    with pytest.raises(HeadwiseError, match="for another model: num_layers"):
        headwise.apply(quantised(build(num_hidden_layers=3), kind), check_weights=False)


def test_adapters_around_quantised_weights_make_no_other_model(build):
    plain, model = quantised(build(), "bitsandbytes"), quantised(build(), "bitsandbytes")
    model.model.layers[0].self_attn.q_proj = Adapted(model.model.layers[0].self_attn.q_proj)
    assert weights_sha256(model) == weights_sha256(plain)
