"""A folder that lacks weights, or has others, is refused by a line that names one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from artifacts import HeadwiseError
from profiling.models.loading import load_model
from tests.profiling.models.gguf_files import random_model
from tests.profiling.tokenizers import byte_level

Weights = dict[str, torch.Tensor]
UP = "model.layers.1.mlp.up_proj.weight"


def saved(folder: Path, change: Callable[[Weights], Weights], **options: object) -> str:
    """Save a tiny Llama and its tokenizer, with its weights changed."""
    model = random_model("llama", vocab_size=384, **options)
    model.save_pretrained(folder)
    byte_level().save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("max_memory", [None, 300_000])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: {name: w[name] for name in w if name != UP}, f"the weight '{UP}' is missing"),
        (
            lambda w: {name: w[name] for name in w if "layers.1" not in name},
            "9 weights (first 'model.layers.1.input_layernorm.weight') are missing",
        ),
        (lambda w: {name: w[name] for name in w if "lm_head" not in name}, "'lm_head.weight' is"),
        (lambda w: w | {f"{UP}_scale": torch.ones(1)}, f"'{UP}_scale' is unknown to LlamaFor"),
        (
            lambda w: w | {"model.layers.2.mlp.up_proj.weight": w[UP].clone()},
            "'model.layers.2.mlp.up_proj.weight' is unknown",
        ),
        (lambda w: w | {UP: torch.ones(97, 64)}, "97, 64]"),
    ],
)
def test_load_model_refuses_a_folder_with_other_weights(change, says, max_memory, tmp_path, capsys):
    folder = saved(tmp_path / "m", change)
    with pytest.raises(HeadwiseError) as caught:
        load_model(folder, dtype="float32", max_memory=max_memory)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert "LOAD REPORT" not in capsys.readouterr().err


@pytest.mark.parametrize("lost", ["shard", "index entries", "config layers", "bin"])
def test_load_model_refuses_a_part_of_a_checkpoint(lost, tmp_path):
    folder = tmp_path / "m"
    saved(folder, lambda weights: weights)
    weights = load_file(folder / "model.safetensors")
    if lost in ("shard", "index entries"):
        (folder / "model.safetensors").unlink()
        random_model("llama", vocab_size=384).save_pretrained(folder, max_shard_size="100KB")
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        last = sorted(set(content["weight_map"].values()))[-1]
        if lost == "shard":
            (folder / last).unlink()
        else:
            content["weight_map"] = {
                name: file for name, file in content["weight_map"].items() if file != last
            }
            index.write_text(json.dumps(content))
    if lost == "config layers":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    if lost == "bin":
        (folder / "model.safetensors").unlink()
        del weights[UP]
        torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(HeadwiseError, match="cannot load the model 'm'") as caught:
        load_model(str(folder), dtype="float32")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", ["tied", "old buffers"])
def test_load_model_takes_a_folder_whose_weights_are_all_there(case, tmp_path):
    if case == "tied":
        folder = saved(tmp_path / "m", lambda weights: weights, tie_word_embeddings=True)
    else:
        # Old checkpoints have frequencies in each layer, which transformers computes today.
        buffers = {f"model.layers.{at}.self_attn.rotary_emb.inv_freq": torch.ones(8) for at in "01"}
        folder = saved(tmp_path / "m", lambda weights: weights | buffers)
    assert load_model(folder, dtype="float32").model.config.num_hidden_layers == 2
