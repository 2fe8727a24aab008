"""A fingerprint knows a model again in any dtype and tells another one."""

import pytest
import torch
import transformers

from artifacts import HeadwiseError, ModelInfo
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


def test_an_open_fingerprint_is_said_and_refused_where_asked(build, artifact_for, caplog) -> None:
    from runtime import Headwise

    model = build()
    artifact = artifact_for(model)
    unknown = artifact.model_copy(update={"model": artifact.model.model_copy(update={"weights_sha256": None})})
    with Headwise(unknown).apply(model):
        assert "has no fingerprint (weights_sha256 open): any model of its shape passes" in caplog.text
    with pytest.raises(HeadwiseError, match=r"weights_sha256 open.*profiling\.fidelity --update fills it in"):
        Headwise(unknown).apply(model, check_fingerprint=True)
    caplog.clear()
    with Headwise(artifact).apply(model, check_fingerprint=True):
        assert not caplog.text
