"""A GGUF file's model is the one that was written, at long prompts too, or the file is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from artifacts import HeadwiseError
from profiling.models import gguf
from profiling.models.gguf_header import read_header, shards
from profiling.models.loading import load_config, load_model, load_tokenizer
from tests.profiling.models.gguf_files import (
    VOCABULARY,
    fields_of,
    random_model,
    tensors_of,
    write,
    write_gguf,
)

WINDOW = {"head_dim": 16, "sliding_window": 64}
GEMMA3 = WINDOW | {"num_hidden_layers": 6}
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
SOFT_CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
YARN_FIELDS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 512,
}
LONG = [1.0 + at / 2 for at in range(8)]
SHORT = [1.0 + at / 8 for at in range(8)]
LONGROPE = {"rope_type": "longrope", "long_factor": LONG, "short_factor": SHORT}
LONG_TENSORS = {"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Positions beyond those that a scaling starts from, and beyond each window.
LENGTH = 700


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of models for each test; compiled kernels stay in their own."""
    monkeypatch.setattr("profiling.models.cache.cache_folder", lambda: tmp_path / "cache")


def llama3_factors(theta: float) -> list[float]:
    """Factors of the file by Llama's own definition, of frequencies of 8 pairs."""
    model = random_model("llama", head_dim=16, rope_parameters=LLAMA3 | {"rope_theta": theta})
    plain = theta ** (-torch.arange(8) / 8)
    return (plain / model.model.rotary_emb.inv_freq).tolist()


def rotated(theta: float = 10_000.0, **own: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default"} | own | {"rope_theta": theta}}


def nested(full: dict[str, Any], windows: float = 10_000.0) -> dict[str, Any]:
    return {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6} | full,
            "sliding_attention": {"rope_type": "default", "rope_theta": windows},
        }
    }


# Kind of a model, its options, and fields and tensors of its file beside the usual ones.
CARRIED: dict[str, tuple[Any, ...]] = {
    "plain": ("llama", {"head_dim": 16}, {"expert_count": 0}),
    "no scaling": ("llama", {"head_dim": 16}, {"rope.scaling.type": "none"}),
    "no field of a base": ("llama", {"head_dim": 16}, {"rope.freq_base": None}),
    "factors of 1": ("llama", {"head_dim": 16}, {}, {"rope_freqs.weight": [1.0] * 8}),
    "llama3": (
        "llama",
        {"head_dim": 16, "max_position_embeddings": 16_384} | rotated(5e5, **LLAMA3),
        {"rope.freq_base": 5e5, "context_length": 16_384},
        {"rope_freqs.weight": llama3_factors(5e5)},
    ),
    "linear": ("llama", {"head_dim": 16} | rotated(rope_type="linear", factor=4.0), LINEAR),
    "linear of old files": (
        "llama",
        {"head_dim": 16} | rotated(rope_type="linear", factor=4.0),
        {"rope.scale_linear": 4.0},
    ),
    "yarn": ("qwen2", rotated(**YARN), YARN_FIELDS),
    "yarn with its own factors": (
        "qwen2",
        rotated(**YARN, beta_fast=16.0, attention_factor=0.5 * (1 + 0.1 * math.log(4))),
        YARN_FIELDS | {"rope.scaling.attn_factor": 0.5, "rope.scaling.yarn_beta_fast": 16.0},
    ),
    "heads of another width": (
        "qwen3",
        {"head_dim": 32},
        {"attention.key_length": 32, "attention.value_length": 32},
    ),
    "partial rotation": ("phi3", {"partial_rotary_factor": 0.75}, {"rope.dimension_count": 12}),
    "window": ("phi3", {"sliding_window": 64}, {"attention.sliding_window": 64}),
    "no window": ("phi3", {}, {"attention.sliding_window": 0}),
    "longrope": (
        "phi3",
        {"original_max_position_embeddings": 512} | rotated(**LONGROPE),
        {"rope.scaling.original_context_length": 512},
        LONG_TENSORS,
    ),
    "base of starcoder2": (
        "starcoder2",
        {"norm_epsilon": 1e-6} | rotated(1e6),
        {"rope.freq_base": 1e6, "attention.layer_norm_epsilon": 1e-6},
    ),
    "soft caps": ("gemma2", WINDOW | SOFT_CAPS, {"attention.sliding_window": 64} | SOFT_CAPS),
    "scale of scores": (
        "gemma2",
        WINDOW | {"query_pre_attn_scalar": 64},
        {"attention.sliding_window": 64, "attention.scale": 0.125},
    ),
    "linear beside windows": (
        "gemma3_text",
        GEMMA3 | nested({"rope_type": "linear", "factor": 8.0}),
        {"attention.sliding_window": 64, "rope.freq_base": 1e6}
        | LINEAR
        | {"rope.scaling.factor": 8.0},
    ),
    "base and pattern of windows": (
        "gemma3_text",
        GEMMA3 | {"layer_types": ["sliding_attention", "full_attention"] * 3} | nested({}, 5e3),
        {
            "attention.sliding_window": 64,
            "attention.sliding_window_pattern": 2,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 5e3,
        },
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CARRIED)
def test_load_model_of_a_gguf_file_has_the_logits_of_the_model_written(case, tmp_path):
    kind, options, changes, *factors = CARRIED[case]
    architecture = kind.removesuffix("_text")
    model = random_model(kind, **options)
    fields = fields_of(model, architecture) | changes
    if "attention.layer_norm_epsilon" in fields:
        del fields["attention.layer_norm_rms_epsilon"]
    fields = {key: value for key, value in fields.items() if value is not None}
    tensors = tensors_of(model, architecture) | dict(*factors)
    file = write(tmp_path / "m.gguf", architecture, fields, tensors)
    loaded = load_model(str(file), dtype="float32").model
    tokens = torch.randint(3, 90, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(tokens).logits, model(tokens).logits, atol=1e-4, rtol=1e-4
        )
    assert load_config(str(file)).rope_parameters == loaded.config.rope_parameters


@pytest.mark.parametrize(("layers", "scalar"), [(2, 256), (46, 32)])
def test_load_config_of_gemma2_27b_scales_scores_by_its_width(layers, scalar, tmp_path):
    model = random_model("gemma2", num_hidden_layers=layers, num_attention_heads=2, **WINDOW)
    fields = fields_of(model, "gemma2") | {"attention.sliding_window": 64}
    file = write(tmp_path / "m.gguf", "gemma2", fields, {"output_norm.weight": [1.0]})
    assert load_config(str(file)).query_pre_attn_scalar == scalar


@pytest.mark.parametrize(
    ("kind", "fields", "factors", "says"),
    [
        ("llama", {"logit_scale": 0.5}, {}, "llama.logit_scale = 0.5"),
        ("llama", {"expert_count": 8}, {}, "llama.expert_count = 8"),
        ("llama", {"attention.sliding_window": 512}, {}, "llama.attention.sliding_window = 512"),
        ("llama", {"attention.causal": False}, {}, "llama.attention.causal = False"),
        ("llama", {"attention.scale": 0.5}, {}, "llama.attention.scale = 0.5"),
        ("llama", {"of_tomorrow": 3}, {}, "llama.of_tomorrow = 3"),
        ("llama", {"rope.of_tomorrow": 3}, {}, "rope.of_tomorrow = 3"),
        ("llama", {"rope.scaling.type": "dynamic"}, {}, "rope.scaling.type = 'dynamic'"),
        ("llama", {"rope.scaling.attn_factor": 2.0}, {}, "rope.scaling.attn_factor = 2"),
        ("llama", {}, {"rope_freqs.weight": SHORT}, "not Llama 3.1's"),
        ("llama", {}, {"rope_freqs.weight": [2.0]}, "1 factors for 8 frequencies"),
        ("llama", LINEAR, {"rope_freqs.weight": LONG}, "linear scaling and rope_freqs"),
        ("llama", YARN_FIELDS, {"rope_freqs.weight": LONG}, "YaRN and rope_freqs"),
        ("llama", {}, LONG_TENSORS, "rope.scaling.original_context_length"),
        ("qwen2", {"rope.dimension_count": 8}, {}, "rotates 8 of 16 dimensions"),
        ("qwen2", {"attention.sliding_window": 512}, {}, "sliding_window is 512"),
        ("qwen2", YARN_FIELDS | {"rope.scaling.yarn_ext_factor": 0.5}, {}, "yarn_ext_factor = 0.5"),
    ],
)
def test_load_config_refuses_a_gguf_field_that_the_model_cannot_have(
    kind, fields, factors, says, tmp_path
):
    model = random_model(kind)
    tensors = tensors_of(model, kind) | factors
    file = write(tmp_path / "m.gguf", kind, fields_of(model, kind) | fields, tensors)
    with pytest.raises(HeadwiseError) as caught:
        load_config(str(file))
    assert says in str(caught.value) and "m.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("without", "added", "says"),
    [
        ("blk.1.ffn_up.weight", {}, "'model.layers.1.mlp.up_proj.weight' is missing"),
        ("", {"blk.0.attn_q_norm.weight": [1.0] * 16}, "does not know all of them"),
        ("", {"blk.2.ffn_up.weight": [[1.0] * 64] * 96}, "does not know all of them"),
    ],
)
def test_load_model_refuses_a_gguf_file_with_other_tensors(without, added, says, tmp_path, capsys):
    model = random_model("llama")
    tensors = tensors_of(model, "llama") | added
    tensors.pop(without, None)
    file = write(tmp_path / "m.gguf", "llama", fields_of(model, "llama"), tensors)
    with pytest.raises(HeadwiseError, match=says):
        load_model(str(file), dtype="float32")
    assert "LOAD REPORT" not in capsys.readouterr().err
    assert not list((tmp_path / "cache").glob("models/*/config.json")), "nothing is cached"


@pytest.fixture
def split_model(tmp_path):
    """Files of a model in three parts, and the whole file."""
    model = random_model("llama")
    tensors = tensors_of(model, "llama")
    names = sorted(tensors)
    files = []
    for part in range(3):
        # As gguf-split writes them: only the first has the fields of the model.
        fields = fields_of(model, "llama") if part == 0 else {}
        file = tmp_path / f"tiny-{part + 1:05}-of-00003.gguf"
        own = {name: tensors[name] for name in names[part::3]}
        files.append(write(file, "llama", fields, own, split=(part, 3, len(names))))
    return files, write_gguf(tmp_path / "whole.gguf")


def test_load_model_of_one_shard_loads_all_that_lie_beside_it(split_model, tmp_path):
    files, whole = split_model
    right = load_model(str(whole), dtype="float32").model.state_dict()
    for given in (files[0], files[2]):
        loaded = load_model(str(given), dtype="float32")
        assert loaded.name == "tiny"
        torch.testing.assert_close(loaded.model.state_dict(), right, rtol=0, atol=0)
    (tmp_path / "current.gguf").symlink_to(files[1])
    assert shards(tmp_path / "current.gguf") == tuple(files)
    assert load_config(str(files[1])).num_hidden_layers == 2
    assert load_tokenizer(str(files[2])).vocab_size == VOCABULARY


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("missing", "one of 3 files of a model, and 1 of them are missing"),
        ("renamed", "one of 3 files of a model: all must lie in one folder"),
        ("swapped", "is no part 2 of 3"),
        ("of another", "not of one model"),
        ("damaged", "cannot read the GGUF file tiny-00002-of-00003.gguf"),
    ],
)
def test_load_model_of_a_split_that_is_not_whole_names_the_parts(change, says, split_model):
    files, _ = split_model
    given = files[0]
    if change == "missing":
        files[1].unlink()
    if change == "renamed":
        given = files[0].rename(files[0].with_name("mine.gguf"))
    if change == "swapped":
        files[1].write_bytes(files[2].read_bytes())
    if change == "of another":
        write(files[1], "llama", {}, {"output_norm.weight": [1.0] * 64}, split=(1, 3, 21))
    if change == "damaged":
        files[1].write_bytes(files[1].read_bytes()[:40])
    for load in (load_model, load_config, load_tokenizer):
        with pytest.raises(HeadwiseError, match=says) as caught:
            load(str(given))
        assert "\n" not in str(caught.value)


def test_converted_depends_on_the_code_and_on_transformers(tmp_path, monkeypatch):
    import transformers

    file = write_gguf(tmp_path / "m.gguf")

    def convert():
        return gguf.converted([file], name="m", dtype="float32")

    first = convert()
    assert convert() == first
    monkeypatch.setattr(gguf, "_FORMAT", gguf._FORMAT + 1)
    second = convert()
    monkeypatch.setattr(transformers, "__version__", "99.0")
    assert len({first, second, convert()}) == 3


def test_read_header_of_a_gguf_file_has_fields_and_tensors(split_model):
    files, whole = split_model
    header = read_header(whole)
    assert header.fields["llama.attention.head_count"] == 4
    numbers = sum(each.numel() for each in random_model("llama").parameters())
    assert header.elements == sum(read_header(file).elements for file in files) == numbers
    assert len(header.tensors) == len({each.name for each in header.tensors}) == 21
